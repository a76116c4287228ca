"""What a router learns from: one row for each prefix at which both models chose a token.

Knows recordings and arrays; no engine and no network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from trserve.errors import ConfigError
from trserve.records import ModelRows, RequestRecord

SMALL, LARGE = 0, 1


@dataclass(frozen=True, eq=False)
class Dataset:
    """N prefixes, in the order of the prompts.

    Attributes:
        hidden: float16 [N, H], the small model's state after its final norm.
        tokens: int64 [N], the small model's token.
        top_logits: float32 [N, K], its largest raw logits, falling.
        peer_tokens: int64 [N], the large model's token at the same prefix.
        own_logprob: float32 [N], the small model's log probability of the large model's token;
            where that is not among the K largest, the most that it can be.
        peer_logprob: float32 [N], the large model's log probability of its own token.
        request: int64 [N], index of the prompt.
        position: int64 [N], index in the answer.
    """

    hidden: torch.Tensor
    tokens: torch.Tensor
    top_logits: torch.Tensor
    peer_tokens: torch.Tensor
    own_logprob: torch.Tensor
    peer_logprob: torch.Tensor
    request: torch.Tensor
    position: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def differs(self) -> torch.Tensor:
        """float32 [N]: 1 where the models' tokens differ."""
        return (self.tokens != self.peer_tokens).float()

    def take(self, rows: torch.Tensor) -> Dataset:
        """The rows where ``rows`` (bool [N]) is set."""
        return Dataset(*(getattr(self, field.name)[rows] for field in fields(self)))

    def held_out(self, share: float, seed: int) -> torch.Tensor:
        """bool [N]: all rows of a ``share`` of the prompts, kept from training.

        Raises:
            ConfigError: these, or the others, would be none.
        """
        prompts, generator = torch.unique(self.request), torch.Generator().manual_seed(seed)
        shuffled = prompts[torch.randperm(len(prompts), generator=generator)]
        held = torch.isin(self.request, shuffled[: round(share * len(prompts))])
        if bool(held.all()) or not bool(held.any()):
            raise ConfigError(
                f"--prompts: of {len(prompts)} prompts a share of {share:g} cannot be held out; "
                "give more"
            )
        return held


def dataset_of(records: Iterable[RequestRecord], order: Sequence[str]) -> Dataset:
    """The rows of ``records``; ``order``: their request ids in the order of the prompts.

    The order makes the rows, and what is trained on them, the same on every run.

    Raises:
        ConfigError: there is no prefix at which both models chose a token.
    """
    place = {request_id: index for index, request_id in enumerate(order)}
    found = sorted(((place[r.request_id], r) for r in records if r.request_id in place), key=_first)
    parts = [part for index, record in found if (part := _rows_of(record, index))]
    if not parts:
        raise ConfigError("--prompts: both models chose a token at no prefix of their answers")
    return Dataset(**{name: _joined(parts, name) for name in parts[0]})


def _first(pair: tuple[int, RequestRecord]) -> int:
    return pair[0]


def _joined(parts: Sequence[Mapping[str, np.ndarray]], name: str) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([part[name] for part in parts]))


def _rows_of(record: RequestRecord, index: int) -> dict[str, np.ndarray] | None:
    own, peer = (record.rows(model, discarded=True) for model in (SMALL, LARGE))
    position, at, peer_at = np.intersect1d(own.positions, peer.positions, return_indices=True)
    if not len(position):
        return None
    wanted = peer.token_ids[peer_at]
    return {
        "hidden": own.hidden[at],
        "tokens": own.token_ids[at].astype(np.int64),
        "top_logits": own.top_logits[at],
        "peer_tokens": wanted.astype(np.int64),
        "own_logprob": _logprob_of(own, at, wanted),
        "peer_logprob": (peer.logits - peer.logsumexp)[peer_at],
        "request": np.full(len(at), index, np.int64),
        "position": position,
    }


def _logprob_of(rows: ModelRows, at: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    logprobs, hit = rows.top_logprobs[at], rows.top_ids[at] == wanted[:, None]
    last = logprobs[:, -1]
    found: np.ndarray = np.where(hit.any(1), (logprobs * hit).sum(1), last).astype(np.float32)
    return found
