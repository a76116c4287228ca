"""From logits to tokens, with random numbers that depend on the request alone.

Knows logits and per-row parameters; nothing of requests, penalties, stop conditions or routing.

A token is the inverse of the cumulative distribution at a uniform number, and the uniform number
is a function of (request seed, position, model, purpose): Philox4x32-10 (Salmon, Moraes, Dror and
Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011). The same request therefore draws the
same tokens in any batch, after any preemption, handoff or restart.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trserve.params import GREEDY_BELOW

PURPOSE_SAMPLE = 0
PURPOSE_ROUTER = 1
PURPOSE_ADMIT = 2

NO_TOKEN = -1
"""Returned for a row whose logits are not finite: the caller ends it with an error."""

_Float64Array = npt.NDArray[np.float64]
_Int64Array = npt.NDArray[np.int64]
_UInt32Array = npt.NDArray[np.uint32]
_UInt64Array = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint32)
# What is added to the key before round r, [rounds, 2, 1]; sums wrap at 32 bits, as they should.
_KEY_SCHEDULE = np.arange(_ROUNDS, dtype=np.uint32)[:, None, None] * _KEY_STEPS
_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)


def philox(counters: _UInt32Array, keys: _UInt32Array) -> _UInt32Array:
    """Philox4x32-10, vectorised.

    Args:
        counters: uint32 [4, B].
        keys: uint32 [2, B].

    Returns:
        uint32 [4, B].
    """
    # Words 0 and 2 are multiplied in every round, words 1 and 3 are mixed in; the halves of the
    # products then change places.
    multiplied, mixed = counters[0::2], counters[1::2]
    round_keys = keys + _KEY_SCHEDULE
    for key in round_keys:
        products = np.multiply(multiplied, _MULTIPLIERS, order="C")
        words = products.view(np.uint32).reshape(2, -1, 2)[::-1]
        multiplied = words[..., _HIGH] ^ mixed ^ key
        mixed = words[..., _LOW]
    return np.stack((multiplied[0], mixed[0], multiplied[1], mixed[1]))


def uniforms(
    seeds: _UInt64Array, positions: npt.NDArray[np.integer], model: int, purpose: int
) -> _Float64Array:
    """One number in [0, 1) per row, float64 with 53 random bits.

    Args:
        seeds: uint64 [B], of the requests.
        positions: [B], of the token that the number is for.
        model: index of the model that draws.
        purpose: ``PURPOSE_SAMPLE``, ``PURPOSE_ROUTER`` or ``PURPOSE_ADMIT``.
    """
    seeds = np.ascontiguousarray(seeds, np.uint64)
    keys = np.empty((2, len(seeds)), np.uint32)
    keys[0] = seeds & np.uint64(0xFFFFFFFF)
    keys[1] = seeds >> np.uint64(32)
    counters = np.zeros((4, len(seeds)), np.uint32)
    counters[0] = positions
    counters[1] = model
    counters[2] = purpose
    high, low, _, _ = philox(counters, keys)
    bits = (high.astype(np.uint64) << np.uint64(32)) | low
    numbers: _Float64Array = np.ldexp((bits >> np.uint64(11)).astype(np.float64), -53)
    return numbers


@dataclass(slots=True)
class RowSampling:
    """How each row of a step chooses its token: arrays of at least B entries, one per row.

    ``top_k`` 0 and ``top_p`` 1 and ``min_p`` 0 mean off; ``positions`` are those of the tokens
    to be drawn. ``banned`` lists (row, token ids) that must not be chosen: end tokens before
    ``min_tokens``.
    """

    temperatures: npt.NDArray[np.floating]
    top_k: npt.NDArray[np.integer]
    top_p: npt.NDArray[np.floating]
    min_p: npt.NDArray[np.floating]
    seeds: _UInt64Array
    positions: npt.NDArray[np.integer]
    banned: Sequence[tuple[int, Sequence[int]]] = ()


class Sampler:
    """Chooses tokens for the model with the index ``model``."""

    def __init__(self, model: int = 0) -> None:
        self.model = model

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: RowSampling) -> _Int64Array:
        """One token per row, int64 [B]; ``logits`` (float32 [B, V]) stays as it is.

        Greedy rows take the arg max, the lowest index where several are equal. Other rows take
        the first index at which the cumulative sum, in vocabulary order and float64, of the
        filtered softmax exceeds uniform times its total. The filters are applied in the order
        ``top_k``, ``top_p``, ``min_p``, each to what the one before has left; a token whose
        probability equals the last one kept is kept too.

        A row that holds a NaN or plus infinity, or nothing but minus infinity, gets ``NO_TOKEN``.
        """
        count = len(logits)
        if rows.banned:
            logits = _ban(logits, rows.banned)
        tokens, largest = _arg_max(logits)
        sampled = np.flatnonzero(rows.temperatures[:count] >= GREEDY_BELOW)
        if len(sampled):
            if len(sampled) < count:
                logits = logits[torch.from_numpy(sampled)]
            tokens[sampled] = self._draw(logits, rows, sampled)
        # The arg max finds a NaN before any number, so its value tells whether the row is sound.
        finite = np.isfinite(largest)
        if not finite.all():
            tokens[~finite] = NO_TOKEN
        return tokens

    def _draw(self, logits: torch.Tensor, rows: RowSampling, index: _Int64Array) -> _Int64Array:
        """Tokens of the rows ``index``, whose logits are given."""
        temperatures = _column(rows.temperatures[index], logits.device)
        probabilities = torch.softmax(logits.double().div_(temperatures), -1)
        probabilities = _filter(
            probabilities, rows.top_k[index], rows.top_p[index], rows.min_p[index]
        )
        cumulative = probabilities.cumsum(-1)
        draws = uniforms(rows.seeds[index], rows.positions[index], self.model, PURPOSE_SAMPLE)
        targets = cumulative[:, -1:] * _column(draws, logits.device)
        chosen: _Int64Array = torch.searchsorted(cumulative, targets, right=True).cpu().numpy()
        return chosen[:, 0]


def _arg_max(logits: torch.Tensor) -> tuple[_Int64Array, npt.NDArray[np.float32]]:
    """Index and value of each row's largest entry; numpy's arg max is vectorised, torch's not."""
    if logits.device.type == "cpu":
        array = logits.numpy()
        tokens = array.argmax(-1)
        return tokens, array[np.arange(len(array)), tokens]
    indices = logits.argmax(-1, keepdim=True)
    return indices[:, 0].cpu().numpy(), logits.gather(1, indices)[:, 0].cpu().numpy()


def _ban(logits: torch.Tensor, banned: Sequence[tuple[int, Sequence[int]]]) -> torch.Tensor:
    """A copy of ``logits`` with the banned tokens at minus infinity."""
    pairs = [(row, token) for row, ids in banned for token in ids]
    if not pairs:
        return logits
    row_index, token_index = torch.tensor(pairs, device=logits.device).unbind(-1)
    logits = logits.clone()
    logits[row_index, token_index] = -torch.inf
    return logits


def _filter(
    probabilities: torch.Tensor,
    top_k: npt.NDArray[np.integer],
    top_p: npt.NDArray[np.floating],
    min_p: npt.NDArray[np.floating],
) -> torch.Tensor:
    """``probabilities`` (float64 [R, V]) with the tokens that the filters remove at zero.

    Every filter is a lowest probability to keep, so their combination is the highest of these.
    Not renormalised: the draw scales by the total.
    """
    device = probabilities.device
    thresholds = None
    if (top_k > 0).any() or (top_p < 1.0).any():
        thresholds = _top_thresholds(probabilities, top_k, top_p)
    if (min_p > 0.0).any():
        relative = probabilities.amax(-1, keepdim=True) * _column(min_p, device)
        thresholds = relative if thresholds is None else torch.maximum(thresholds, relative)
    if thresholds is None:
        return probabilities
    return probabilities.masked_fill(probabilities < thresholds, 0.0)


def _top_thresholds(
    probabilities: torch.Tensor, top_k: npt.NDArray[np.integer], top_p: npt.NDArray[np.floating]
) -> torch.Tensor:
    """The lowest probability that top_k, then top_p, keep in each row, [R, 1]."""
    device, vocab = probabilities.device, probabilities.shape[-1]
    limits = np.where(top_k > 0, np.minimum(top_k, vocab), vocab)
    largest = int(limits.max())
    if largest < vocab:
        ordered = probabilities.topk(largest, -1).values
    else:
        ordered = probabilities.sort(-1, descending=True).values
    last_kept = torch.from_numpy(limits - 1).to(device)[:, None]
    thresholds = ordered.gather(1, last_kept)
    if not (top_p < 1.0).any():
        return thresholds
    # A token is in the nucleus if those before it, in falling order, have less than top_p of all
    # that top_k has left: its ties included, which is why the total is not that of `ordered`.
    total = probabilities.masked_fill(probabilities < thresholds, 0.0).sum(-1, keepdim=True)
    before = ordered.cumsum(-1) - ordered
    kept = (before < total * _column(top_p, device)).sum(-1, keepdim=True)
    nucleus = ordered.gather(1, (kept - 1).clamp_(min=0))
    return torch.where(_column(top_p, device) < 1.0, torch.maximum(thresholds, nucleus), thresholds)


def _column(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.float64)).to(device)[:, None]
