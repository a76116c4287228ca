"""Routers to time: every one of the library, on a model's shape, with networks of random weights.

Where a network has a published size, it has that size. Knows routers and shapes; no clocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from trserve.demo import model_path, router_checkpoint
from trserve.params import RequestParams, SamplingParams
from trserve.router_lib.base import RouterContext, StepResult
from trserve.training.networks import R2R_CLASS, ConfidenceMLP, DeferVector, R2RClassifier
from trserve.workers.routing import Routing, create_router

NAMES: Final = (
    *("r-stitch", "entropy", "top-prob", "margin", "r2r", "citer", "confidence", "co-llm"),
    *("step-leader", "me", "random"),
)
LEARNED: Final = ("r2r", "citer", "confidence", "co-llm")
R2R_DIMS: Final = (1024,) * 6
SMALL_DIMS: Final = (128, 128)
"""What ``train-router`` makes unless it is told otherwise."""
R2R_EXPANSION: Final = 4
R2R_LOGITS: Final = 100
R2R_HIDDEN: Final = 1536
"""Of the published pair's small model: its router has 56 million weights."""
_WRITTEN: Final = 64
"""Tokens of output that a request has already."""


@dataclass(frozen=True)
class Shape:
    """What a router sees of its model; ``path`` holds its configuration."""

    path: Path
    hidden: int
    tokenizer_size: int
    embedding: torch.Tensor


class Request:
    """A request as routers see it, whose position moves on with each step."""

    def __init__(self, seed: int) -> None:
        self.rid = seed
        self.params = RequestParams(sampling=SamplingParams(seed=seed))
        self.prompt_len = 16
        self.committed_len = self.prompt_len + _WRITTEN
        self.row: NDArray[np.int32] = np.full(1 << 16, 7, np.int32)
        self.extras = b""
        self.finished = False
        self.peer_locs = (0, 0)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        return self.row[: self.committed_len + 1]


def routers(shape: Shape, folder: Path, *, shipped: bool) -> Iterator[tuple[str, Routing]]:
    """Every router by name; ``shipped``: with the embedded pair's own networks.

    Of R2R's networks, one of the published size, and one as small as training makes them.
    """
    for name in NAMES:
        config: dict[str, Any] = {}
        if name in LEARNED:
            own = router_checkpoint(name) if shipped else None
            place = own or write_network(name, shape.hidden, folder)
            config = {"checkpoint": str(place), "model": str(shape.path)}
        elif name == "step-leader":
            config = {"tokenizer": str(model_path("tiny"))}
        yield name, routing(name, shape, config)
    if not shipped:
        place = write_network("r2r", shape.hidden, folder, SMALL_DIMS)
        config = {"checkpoint": str(place), "model": str(shape.path)}
        yield "r2r " + "x".join(map(str, SMALL_DIMS)), routing("r2r", shape, config)


def routing(name: str, shape: Shape, config: Mapping[str, Any]) -> Routing:
    """The router ``name`` in the first model's worker."""
    context = RouterContext(
        model=0,
        models=("small", "large"),
        tokenizer_size=shape.tokenizer_size,
        config=config,
        path=str(shape.path),
        embedding=shape.embedding,
    )
    return Routing(create_router(name, context))


def write_network(name: str, hidden: int, folder: Path, dims: Sequence[int] = R2R_DIMS) -> Path:
    """A checkpoint with random weights for hidden states of ``hidden``; ``dims`` are R2R's.

    Without them it has the published size.
    """
    torch.manual_seed(0)
    file = folder / f"{name}-{hidden}-{len(dims)}.safetensors"
    facts: dict[str, Any] = {"threshold": 0.5}
    if name == "r2r":
        network: torch.nn.Module = R2RClassifier(hidden, R2R_LOGITS, dims, R2R_EXPANSION, 0.0)
        facts["model_type"] = R2R_CLASS
    else:
        network = DeferVector(hidden) if name == "co-llm" else ConfidenceMLP(hidden)
    save_file(network.state_dict(), file)
    file.with_suffix(".json").write_text(json.dumps(facts))
    return file


def step(shape: Shape, batch: int, routed: Routing) -> StepResult:
    """What a step of ``batch`` rows gives; logits as sharp as a model's."""
    generator = torch.Generator().manual_seed(batch)
    logits = 4.0 * torch.randn(batch, shape.tokenizer_size, generator=generator)
    requests: list[Any] = [Request(seed) for seed in range(batch)]
    return StepResult(
        logits=logits,
        hidden=torch.randn(batch, shape.hidden, generator=generator),
        token_ids=logits.argmax(-1),
        params=routed.parameter_tensors(requests),
        requests=requests,
        is_prefill=torch.zeros(batch, dtype=torch.bool),
    )
