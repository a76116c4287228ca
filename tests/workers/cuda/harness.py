"""The GPU's runner on the CPU beside the CPU's own, over the same random steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from trserve.models.cuda.weights import load_onto
from trserve.models.loading import load_model
from trserve.models.spec import read_spec
from trserve.router_lib.base import BaseRouter, RouterContext, StepResult
from trserve.router_lib.registry import describe
from trserve.workers.cuda.buckets import RunnerLimits
from trserve.workers.cuda.create import assemble_runner
from trserve.workers.cuda.runner import CudaRunner
from trserve.workers.in_step import StepAsk
from trserve.workers.kv_cache import KVCache
from trserve.workers.routing import Routing, create_router
from trserve.workers.runner import ForwardOutput, TorchRunner
from trserve.workers.sampler import RowSampling, Sampler, drawn_rows
from trserve.workers.step import StepInputs

ALL = frozenset({"slm", "extend", "router"})
BLOCK, NUM_BLOCKS = 8, 96
MAX_ROWS, MAX_TOKENS, ROW_TOKENS = 12, 64, 128
CPU = torch.device("cpu")


def router_of(name: str, index: int = 0, **config: Any) -> BaseRouter:
    """A built-in router as a worker has it."""
    entry = describe(name)
    assert entry is not None
    given = {p.name: p.default for p in entry.parameters} | config
    return create_router(
        name, RouterContext(model=index, models=("a", "b"), tokenizer_size=90, config=given)
    )


def graphs_runner(
    path: Path,
    router: BaseRouter,
    pieces: frozenset[str] = ALL,
    dtype: torch.dtype = torch.float32,
    attention: str = "auto",
    reads_sources: bool = False,
) -> CudaRunner:
    """The GPU's runner of ``path``, on the CPU."""
    spec = read_spec(path)
    runner = assemble_runner(
        load_onto(CPU, path, spec, dtype=dtype),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        limits=RunnerLimits(MAX_ROWS, MAX_TOKENS, pieces),
        row_tokens=ROW_TOKENS,
        model=router.model,
        tokenizer_size=90,
        attention=attention,
    )
    if router.reads_tap:
        runner.keep_tap()
    if reads_sources:
        runner.read_sources()
    runner.prepare(router)
    return runner


@dataclass(eq=False)
class Row:
    """A request's side of the steps."""

    table: np.ndarray
    tokens: list[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    computed: int = 0
    extras: bytes = b""
    params: Any = field(default_factory=lambda: SimpleNamespace(router={}))

    @property
    def committed_len(self) -> int:
        return len(self.tokens)

    @property
    def prompt_len(self) -> int:
        return 1


class Beside:
    """Both runners, and rows that both compute."""

    def __init__(
        self,
        path: Path,
        router: BaseRouter,
        *,
        seed: int,
        pieces: frozenset[str] = ALL,
        attention: str = "auto",
        reads_sources: bool = False,
    ) -> None:
        spec = read_spec(path)
        self.rng = np.random.default_rng(seed)
        self.router = router
        self.graphs = graphs_runner(
            path, router, pieces, attention=attention, reads_sources=reads_sources
        )
        kv = KVCache(spec, num_blocks=NUM_BLOCKS, block_size=BLOCK, dtype=torch.float32)
        decoder = load_model(path, spec, dtype=torch.float32)
        self.torch = TorchRunner(decoder, kv, tokenizer_size=90)
        if router.reads_tap:
            self.torch.keep_tap()
        self.sampler = Sampler(router.model)
        self.routing = Routing(router)
        self.step = StepInputs(
            max_tokens=MAX_TOKENS,
            max_rows=MAX_ROWS,
            max_blocks_per_row=ROW_TOKENS // BLOCK,
            block_size=BLOCK,
        )
        self._free = self.rng.permutation(NUM_BLOCKS).astype(np.int32).tolist()

    def row(self, length: int, **sampling: Any) -> Row:
        """A row of ``length`` random tokens, none of them computed."""
        blocks = ROW_TOKENS // BLOCK // 2
        table = np.array([self._free.pop() for _ in range(blocks)], np.int32)
        tokens = self.rng.integers(0, 90, length).tolist()
        seed = int(self.rng.integers(0, 2**63)) * 2 + 1
        usual = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": seed}
        return Row(table, tokens, **(usual | sampling))

    def fill(self, rows: list[Row], counts: list[int]) -> None:
        """Make a step that computes so many tokens of each row."""
        self.step.clear()
        for row, count in zip(rows, counts, strict=True):
            own = row.tokens[row.computed : row.computed + count]
            self.step.add_row(np.array(own), row.computed, row.table)
            row.computed += count

    def ask(self, rows: list[Row]) -> StepAsk:
        """What is known before the step."""
        found = RowSampling(
            temperatures=np.array([row.temperature for row in rows]),
            top_k=np.array([row.top_k for row in rows]),
            top_p=np.array([row.top_p for row in rows]),
            min_p=np.array([row.min_p for row in rows]),
            seeds=np.array([row.seed for row in rows], np.uint64),
            positions=np.array([len(row.tokens) for row in rows]),
        )
        found.drawn = drawn_rows(found.temperatures)
        bounds = self.routing.bounds(rows) if self.graphs.routes else None
        return StepAsk(found, bounds)

    def expected(
        self, rows: list[Row], ask: StepAsk
    ) -> tuple[ForwardOutput, np.ndarray, list[int | None]]:
        """The CPU's logits, tokens and destinations of the step."""
        output = self.torch.forward(self.step)
        tokens = self.sampler.sample(output.logits, ask.sampling)
        result = StepResult(
            logits=output.logits,
            hidden=output.hidden,
            token_ids=torch.from_numpy(tokens),
            params=self.routing.parameter_tensors(rows),
            requests=rows,
            is_prefill=torch.zeros(len(rows), dtype=torch.bool),
            tap=output.tap,
        )
        return output, tokens, list(self.routing.destinations(result))

    def before_graphs(self) -> None:
        """The CPU has computed the step, the graphs not yet."""

    def check(self, rows: list[Row], counts: list[int]) -> tuple[np.ndarray, list[int | None]]:
        """One step on both; they agree on every row. Returns tokens and destinations."""
        self.fill(rows, counts)
        ask = self.ask(rows)
        output, tokens, destinations = self.expected(rows, ask)
        self.before_graphs()
        found = self.graphs.decide(self.step, ask)
        assert torch.allclose(found.logits[:, :90], output.logits[:, :90], atol=2e-4)
        assert torch.isneginf(found.logits[:, 90:]).all()
        assert torch.allclose(found.hidden, output.hidden, atol=2e-4)
        assert found.tokens is not None
        assert found.tokens.tolist() == tokens.tolist()
        if self.graphs.routes:
            assert found.destinations == destinations
        return tokens, destinations
