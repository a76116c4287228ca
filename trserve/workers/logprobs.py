"""Log probabilities of a step's raw logits, written where the gateway finds them.

Knows logits, tokens and annotation books; nothing of requests, sampling or JSON. What is reported
is the raw distribution, before biases, penalties, temperature and filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trserve.ipc.annotations import AnnotationBook

FLOOR: Final = -9999.0
"""Reported for a probability of zero, as vLLM does: JSON has no infinity."""


class Wanted(NamedTuple):
    """One record to write: where, of which token, with how many most probable ones."""

    book: AnnotationBook
    position: int
    token: int
    tops: int


def write_logprobs(logits: NDArray[np.float32], wanted: Sequence[Wanted]) -> None:
    """Write the record of each of ``wanted``, whose logits are the rows of ``logits`` [B, V].

    A token that is among the most probable has the same float in both places.
    """
    normalisers = _log_sum_exp(logits)[:, None]
    tokens = np.array([[each.token] for each in wanted])
    own = _logprobs(np.take_along_axis(logits, tokens, -1), normalisers)[:, 0].tolist()
    ids = _top_ids(logits, max(each.tops for each in wanted))
    values = _logprobs(np.take_along_axis(logits, ids, -1), normalisers)
    for row, each in enumerate(wanted):
        each.book.write(each.position, own[row], ids[row, : each.tops], values[row, : each.tops])


def _log_sum_exp(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    largest = logits.max(-1).astype(np.float64)
    with np.errstate(all="ignore"):  # a row that is not finite is clamped, its request fails
        found: NDArray[np.float64] = largest + np.log(
            np.exp(logits.astype(np.float64) - largest[:, None]).sum(-1)
        )
    return found


def _logprobs(logits: NDArray[np.float32], normalisers: NDArray[np.float64]) -> NDArray[np.float32]:
    """float32 of the same shape, finite and not above 0."""
    with np.errstate(invalid="ignore"):
        values = np.nan_to_num(logits - normalisers, nan=FLOOR, neginf=FLOOR, posinf=0.0)
    return np.clip(values, FLOOR, 0.0).astype(np.float32)


def _top_ids(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ids [B, count] of the largest logits of each row, falling; the lower of equal ones first."""
    vocab = logits.shape[-1]
    ids = np.argpartition(logits, vocab - count, axis=-1)[:, vocab - count :] if count else None
    if ids is None:
        return np.empty((len(logits), 0), np.int64)
    values = np.take_along_axis(logits, ids, -1)
    order = np.lexsort((ids, -values), axis=-1)
    return np.take_along_axis(ids, order, -1)
