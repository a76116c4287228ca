"""Rows with a signal that was put there, and requests as a recording gives them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from trserve.records import ModelRows
from trserve.training.dataset import Dataset

HIDDEN, LOGITS, VOCAB = 8, 5, 12


def planted(count: int = 3000, seed: int = 0) -> Dataset:
    """The models differ, and the small one is unsure, where the first hidden number is large."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, HIDDEN, generator=generator)
    hard = hidden[:, 0] > 1.0
    tokens = torch.randint(VOCAB, (count,), generator=generator)
    unsure, sure = torch.tensor(0.2).log(), torch.tensor(0.9).log()
    return Dataset(
        hidden=(5.0 + 3.0 * hidden).half(),
        tokens=tokens,
        top_logits=torch.randn(count, LOGITS, generator=generator).sort(descending=True).values,
        peer_tokens=torch.where(hard, (tokens + 1) % VOCAB, tokens),
        own_logprob=torch.where(hard, unsure, sure),
        peer_logprob=sure.expand(count),
        request=torch.arange(count) // 10,
        position=torch.arange(count) % 10,
    )


def record(
    request_id: str, own: dict[int, int], peer: dict[int, int], own_tops: Sequence[int] = (0, 1, 2)
) -> Any:
    """A request with tokens by position; the logits of ``own_tops`` fall from 3 by 1."""
    rows = [_rows(own, own_tops), _rows(peer, own_tops)]
    return SimpleNamespace(request_id=request_id, rows=lambda model, discarded: rows[model])


def _rows(tokens: dict[int, int], tops: Sequence[int]) -> ModelRows:
    count = len(tokens)
    falling = np.arange(3, 3 - len(tops), -1, np.float32)
    return ModelRows(
        positions=np.array(list(tokens), np.int64),
        token_ids=np.array(list(tokens.values()), np.int32),
        committed=np.ones(count, np.bool_),
        logits=np.full(count, 3.0, np.float32),
        logsumexp=np.full(count, 3.5, np.float32),
        top_ids=np.tile(np.array(tops, np.int32), (count, 1)),
        top_logits=np.tile(falling, (count, 1)),
        hidden=np.arange(count, dtype=np.float16)[:, None].repeat(HIDDEN, 1),
    )
