"""Co-LLM (arXiv 2403.03870): a row of the head beside the vocabulary says when to defer.

P = sigmoid(h . w) with h the last hidden state after the final norm; the other model writes the
token where P > eta. The vector w is the row of ``<|defer|>`` in the head of a fine-tuned model, or
stands alone in a file, for a base model that was left as it was. It has no part in sampling. With a
warm-up an answer's first tokens are deferred less: eta falls to its value in a straight line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trserve.errors import ConfigError
from trserve.router_lib.base import RequestView, StepResult
from trserve.router_lib.checkpoints import (
    Checkpoint,
    read_checkpoint,
    read_json_object,
    read_pickle,
)
from trserve.router_lib.learned import LearnedRouter, Network, as_threshold
from trserve.router_lib.registry import CO_LLM_PARAMETERS

DEFER = "<|defer|>"
TOKEN_ID = "defer_token_id"
"""Where the JSON beside a vector states which id ``<|defer|>`` has."""
_HEADS = ("lm_head.weight", "model.embed_tokens.weight")
"""Where a head may be; with tied embeddings there is but the second."""


FILE = "deferral.safetensors"
"""What a folder with the vector alone holds; a folder without it is a model's."""


@dataclass(frozen=True)
class Deferral:
    """A deferral vector [H], the file that it is from, and the id of its token where it has one."""

    vector: torch.Tensor
    checkpoint: Checkpoint
    token_id: int | None = None


class CoLLM(LearnedRouter):
    """To the other model where the probability of deferring is above ``eta``."""

    parameters = CO_LLM_PARAMETERS
    above = True
    capturable = True
    usual = 0.15

    def load(self) -> Network:
        """The deferral vector of the named file or folder; the threshold too, unless given."""
        found = read_deferral(self.checkpoint)
        check_served(found, self.context.tokenizer_size)
        vector, checkpoint = found.vector, found.checkpoint
        self.check_hidden_size(len(vector))
        self.take_threshold(checkpoint, as_threshold(checkpoint, checkpoint.facts.get("threshold")))
        self._vector = vector
        return lambda result: defer_probability(result, self._vector)

    def to(self, device: torch.device) -> None:
        """The vector."""
        if self.model == 0:
            self._vector = self._vector.to(device)

    def limits(
        self, params: Mapping[str, torch.Tensor], requests: Sequence[RequestView]
    ) -> torch.Tensor:
        """``eta``; over the first ``warm_up`` tokens of an answer it falls to that from 1."""
        eta, warm_up = super().limits(params, requests), params["warm_up"]
        if float(warm_up.max()) <= 0.0:
            return eta
        written = torch.tensor([float(r.committed_len - r.prompt_len) for r in requests])
        left = torch.where(written < warm_up, 1.0 - written / warm_up, 0.0)
        return eta + (1.0 - eta) * left


def defer_probability(result: StepResult, vector: torch.Tensor) -> torch.Tensor:
    """float32 [B]: sigmoid(h . w)."""
    return (result.hidden.float() @ vector).sigmoid_()


def read_deferral(path: Path) -> Deferral:
    """The deferral vector in the file or the model's folder ``path``. ConfigError without one."""
    if path.is_dir():
        file = path / FILE
        return _alone(file) if file.is_file() else _row_of_head(path)
    if path.suffix == ".safetensors":
        return _alone(path)
    content = read_pickle(path)
    if not isinstance(content, torch.Tensor):
        raise ConfigError(
            f"checkpoint {path}: expected one tensor [1, hidden size] or [hidden size]"
        )
    checkpoint = Checkpoint(path, {"vector": content}, {})
    return Deferral(_flat(checkpoint, "vector"), checkpoint)


def read_vector(path: Path, tokenizer_size: int) -> torch.Tensor:
    """The vector of ``path`` alone, to be served with so many ids. ConfigError as above."""
    found = read_deferral(path)
    check_served(found, tokenizer_size)
    return found.vector


def _alone(file: Path) -> Deferral:
    checkpoint = read_checkpoint(file)
    if len(checkpoint.names) != 1:
        raise checkpoint.error(f"expected one tensor, found {len(checkpoint.names)}")
    (name,) = checkpoint.names
    token = checkpoint.facts.get(TOKEN_ID)
    return Deferral(_flat(checkpoint, name), checkpoint, token if isinstance(token, int) else None)


def check_served(found: Deferral, tokenizer_size: int) -> None:
    """ConfigError if the served tokenizer knows the token for deferring: it would be sampled."""
    if found.token_id is not None and found.token_id < tokenizer_size:
        raise ConfigError(
            f"checkpoint {found.checkpoint.path}: {DEFER} is id {found.token_id} of the "
            f"{tokenizer_size} ids of the served tokenizer, so it could be sampled; serve the base "
            "model with the other model's tokenizer, which does not have it"
        )


def _flat(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """A tensor [H] or [1, H] as [H]."""
    try:
        (size,) = checkpoint.shape(name, 1)
        return checkpoint.take(name, size)
    except ConfigError:
        _, size = checkpoint.shape(name, 2)
        return checkpoint.take(name, 1, size)[0]


def _row_of_head(folder: Path) -> Deferral:
    row = _defer_id(folder)
    for wanted in _HEADS:
        for checkpoint in _files(folder):
            if wanted in checkpoint:
                return Deferral(checkpoint.row(wanted, row), checkpoint, row)
    raise ConfigError(f"checkpoint {folder}: no file there holds {' or '.join(_HEADS)}")


def _files(folder: Path) -> Iterator[Checkpoint]:
    safe = sorted(folder.glob("*.safetensors"))
    return (read_checkpoint(file) for file in safe or sorted(folder.glob("pytorch_model*.bin")))


def _defer_id(folder: Path) -> int:
    """The id of the token for deferring, as the folder's tokenizer states it."""
    for name in ("tokenizer.json", "added_tokens.json"):
        if (folder / name).is_file():
            found = _token_id(read_json_object(folder / name))
            if found is not None:
                return found
    raise ConfigError(
        f"checkpoint {folder}: neither tokenizer.json nor added_tokens.json there has the token "
        f"{DEFER}; name the folder of a Co-LLM model, or a file with the vector alone"
    )


def _token_id(stated: Mapping[str, Any]) -> int | None:
    added = stated.get("added_tokens")
    if added is None:
        return stated.get(DEFER)
    return next((int(token["id"]) for token in added if token["content"] == DEFER), None)
