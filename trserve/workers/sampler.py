"""From logits to tokens, with random numbers that depend on the request alone.

Knows logits and per-row parameters; nothing of requests, stop conditions or routing.

A token is the inverse of the cumulative distribution at a uniform number, which is a function of
the request's seed, the position, the model and the purpose (``random_numbers``). The same request
therefore draws the same tokens in any batch, after any preemption, handoff or restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trserve.params import GREEDY_BELOW
from trserve.workers.adjustments import Adjustment, add_biases, penalise
from trserve.workers.random_numbers import Numbers

NO_TOKEN = -1
"""Returned for a row whose logits are not finite: the caller ends it with an error."""

_Float64Array = npt.NDArray[np.float64]
_Int64Array = npt.NDArray[np.int64]
_UInt64Array = npt.NDArray[np.uint64]

_FEW_ROWS = 8
"""Below this, calls cost more than arithmetic."""


@dataclass(slots=True)
class RowSampling:
    """How each row of a step chooses its token: arrays of at least B entries, one per row.

    ``top_k`` 0 and ``top_p`` 1 and ``min_p`` 0 mean off; ``positions`` are those of the tokens
    to be drawn. ``banned`` lists (row, token ids) that must not be chosen: end tokens before
    ``min_tokens``. ``forbidden`` lists (row, which ids its grammar does not let follow, bool [K]);
    what is beyond K is forbidden too. ``adjustments`` lists (row, biases and penalties), up to date
    with the row.
    ``drawn`` are the rows that are not greedy, in order, where somebody has worked them out.
    """

    temperatures: npt.NDArray[np.floating]
    top_k: npt.NDArray[np.integer]
    top_p: npt.NDArray[np.floating]
    min_p: npt.NDArray[np.floating]
    seeds: _UInt64Array
    positions: npt.NDArray[np.integer]
    banned: Sequence[tuple[int, Sequence[int]]] = ()
    adjustments: Sequence[tuple[int, Adjustment]] = ()
    forbidden: Sequence[tuple[int, npt.NDArray[np.bool_]]] = ()
    drawn: _Int64Array | None = None


def drawn_rows(temperatures: npt.NDArray[np.floating]) -> _Int64Array:
    """The rows with these temperatures that draw at random."""
    return np.flatnonzero(temperatures >= GREEDY_BELOW)


class Sampler:
    """Chooses tokens for the model with the index ``model``."""

    def __init__(self, model: int = 0) -> None:
        self.model = model
        self._numbers = Numbers(model)
        self._rows = np.arange(0)

    def sample(self, logits: torch.Tensor, rows: RowSampling) -> _Int64Array:
        """One token per row, int64 [B]; ``logits`` (float32 [B, V]) stays as it is.

        Biases and penalties come first, the bans of tokens and of grammars between them. Greedy
        rows take the arg max, the lowest index where several are equal. Other rows take the first
        index at which the cumulative sum, in vocabulary order and float64, of the filtered
        ``softmax(logits / temperature)`` exceeds uniform times its total. The filters
        are applied in the order ``top_k``, ``top_p``, ``min_p``, each to what the one before has
        left; a token whose probability equals the last one kept is kept too.

        A row that holds a NaN or plus infinity, or nothing but minus infinity, gets ``NO_TOKEN``.
        """
        # numpy, because on the CPU it shares the memory and its small operations cost a third.
        array: npt.NDArray[np.float32] = logits.numpy(force=True)
        if rows.banned or rows.adjustments or rows.forbidden:
            array = _adjusted(array, rows)
        tokens = self.largest(array)
        count = len(tokens)
        if len(self._rows) != count:
            self._rows = np.arange(count)
        largest = array[self._rows, tokens]
        # The arg max finds a NaN before any number, so its value tells whether the row is sound.
        finite = np.isfinite(largest)
        sound = np.count_nonzero(finite) == count
        drawn = drawn_rows(rows.temperatures[:count]) if rows.drawn is None else rows.drawn
        if not sound:
            drawn = drawn[finite[drawn]]
        if len(drawn) == count:
            return self._draw(array, largest, rows, drawn)
        if len(drawn):
            tokens[drawn] = self._draw(array[drawn], largest[drawn], rows, drawn)
        if not sound:
            tokens[~finite] = NO_TOKEN
        return tokens

    def _draw(
        self,
        logits: npt.NDArray[np.float32],
        largest: npt.NDArray[np.float32],
        rows: RowSampling,
        index: _Int64Array,
    ) -> _Int64Array:
        """Tokens of the rows ``index``, whose logits and largest logits are given."""
        cumulative = self.cumulate(logits, largest, rows, index)
        numbers = self._numbers.at(rows.seeds[index], rows.positions[index])
        return self.find(cumulative, numbers)

    @staticmethod
    def largest(logits: npt.NDArray[np.float32]) -> _Int64Array:
        """The arg max of each row of ``logits`` [B, V]."""
        tokens: _Int64Array = logits.argmax(-1)
        return tokens

    @staticmethod
    def cumulate(
        logits: npt.NDArray[np.float32],
        largest: npt.NDArray[np.float32],
        rows: RowSampling,
        index: _Int64Array,
    ) -> _Float64Array:
        """The cumulative weights [R, V] of the rows ``index``, filtered."""
        # Not normalised: the filters compare ratios, and the draw scales by the total.
        if len(logits) < _FEW_ROWS:
            weights = np.subtract(logits, largest[:, None], dtype=np.float64)
        else:  # the same differences in a third of the time
            doubles = torch.from_numpy(logits).double()
            weights = doubles.sub_(torch.from_numpy(largest)[:, None]).numpy()
        temperatures = rows.temperatures[index]
        if np.count_nonzero(temperatures != 1.0):
            weights /= temperatures[:, None]
        np.exp(weights, out=weights)
        _filter(weights, rows.top_k[index], rows.top_p[index], rows.min_p[index])
        # The same sums in the same order as numpy's, six times as fast over many rows.
        return torch.from_numpy(weights).cumsum(-1).numpy()

    @staticmethod
    def find(cumulative: _Float64Array, numbers: _Float64Array) -> _Int64Array:
        """The first index of each row at which ``cumulative`` exceeds its number of the total."""
        targets = (numbers * cumulative[:, -1])[:, None]
        chosen: _Int64Array
        if len(targets) < _FEW_ROWS:
            chosen = (cumulative > targets).argmax(-1)
        else:
            sums, wanted = torch.from_numpy(cumulative), torch.from_numpy(targets)
            chosen = torch.searchsorted(sums, wanted, right=True)[:, 0].numpy()
            # Where rounding took the target up to the total: the first, as the arg max has it.
            chosen %= cumulative.shape[-1]
        return chosen


def _adjusted(logits: npt.NDArray[np.float32], rows: RowSampling) -> npt.NDArray[np.float32]:
    """A copy of ``logits`` with biases, then the bans of tokens, then penalties applied."""
    logits = logits.copy()
    add_biases(logits, rows.adjustments)
    for row, ids in rows.banned:
        logits[row, list(ids)] = -np.inf
    for row, forbidden in rows.forbidden:
        known = min(len(forbidden), logits.shape[1])
        np.copyto(logits[row, :known], -np.inf, where=forbidden[:known])
        logits[row, known:] = -np.inf
    penalise(logits, rows.adjustments)
    return logits


def _filter(
    weights: _Float64Array,
    top_k: npt.NDArray[np.integer],
    top_p: npt.NDArray[np.floating],
    min_p: npt.NDArray[np.floating],
) -> None:
    """Set to zero, in ``weights`` [R, V], the tokens that the filters remove.

    Every filter is a lowest weight to keep, so their combination is the highest of these. The
    largest weight of a row is 1, so ``min_p`` is its own threshold.
    """
    thresholds: _Float64Array = np.asarray(min_p, np.float64)
    if np.count_nonzero(top_k > 0) or np.count_nonzero(top_p < 1.0):
        thresholds = np.maximum(thresholds, _top_thresholds(weights, top_k, top_p))
    if np.count_nonzero(thresholds):
        np.copyto(weights, 0.0, where=weights < thresholds[:, None])


def _top_thresholds(
    weights: _Float64Array, top_k: npt.NDArray[np.integer], top_p: npt.NDArray[np.floating]
) -> _Float64Array:
    """The lowest weight that top_k, then top_p, keep in each row, [R]; 0 where both are off."""
    vocab = weights.shape[-1]
    limits = np.where(top_k > 0, np.minimum(top_k, vocab), 1)
    nucleus = top_p < 1.0
    if nucleus.any():
        # All weights up to (1 - top_p) of the mean weight together are less than what top_p may
        # leave out. So only those above it need to be put in order.
        bound = (1.0 - top_p) * weights.mean(-1)
        needed = np.maximum((weights > bound[:, None]).sum(-1), 1)
        limits = np.where(nucleus & (top_k <= 0), needed, limits)
    ordered = _largest(weights, int(limits.max()))
    row = np.arange(len(weights))
    thresholds = np.where(top_k > 0, ordered[row, limits - 1], 0.0)
    if not nucleus.any():
        return thresholds
    # A token is in the nucleus if those before it, in falling order, have less than top_p of all
    # that top_k has left: its ties included, which is why the total is not that of `ordered`.
    total = np.where(weights >= thresholds[:, None], weights, 0.0).sum(-1)
    before = ordered.cumsum(-1) - ordered
    kept = (before < (top_p * total)[:, None]).sum(-1)
    last = ordered[row, np.maximum(kept, 1) - 1]
    return np.where(nucleus, np.maximum(thresholds, last), thresholds)


def _largest(weights: _Float64Array, count: int) -> _Float64Array:
    """The ``count`` largest of each row, in falling order."""
    vocab = weights.shape[-1]
    if count < vocab:
        weights = np.partition(weights, vocab - count, -1)[:, vocab - count :]
    return np.sort(weights, -1)[:, ::-1]
