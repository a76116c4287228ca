"""Triton kernels that find the lowest weight that top_k, top_p and min_p keep, without sorting.

What top_k and top_p ask for is the largest logit t such that F(t), the count or the weight of all
logits from t on, reaches a target; and a logit's bits, as an integer that orders like the number,
are found four at a time from the top (radix selection). A row's columns are shared by several
programs. Every pass sums a digit's sixteen values by part; the next pass, in every program of the
row alike, picks the digit. All sums run in a fixed order, so a replay repeats them.

Imported only where a kernel is to run. Knows no requests, and draws nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from trserve.models.cuda import kernels_logits
from trserve.models.cuda.ops_rows import Filters
from trserve.params import GREEDY_BELOW

WARPS: Final = 8
"""Of programs over columns of logits."""

_PASSES: Final = 8
_LATER: Final = 2
"""The first pass that differs from the next by its number alone."""

_GREEDY_BELOW: tl.constexpr = tl.constexpr(GREEDY_BELOW)
_DIGITS: tl.constexpr = tl.constexpr(16)
_DIGIT_BITS: tl.constexpr = tl.constexpr(4)
_STATE: tl.constexpr = tl.constexpr(3)
_LOWEST_KEY: tl.constexpr = tl.constexpr(0x007FFFFF)
"""The key of minus infinity."""


@triton.jit
def weights_of(z: tl.tensor, largest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """exp((z - largest) / temperature), float64."""
    return tl.exp((z.to(tl.float64) - largest.to(tl.float64)) / temperature)


@triton.jit
def temperature_of(temperatures: tl.tensor, row: tl.tensor) -> tl.tensor:
    """A row's temperature, 1 for greedy rows: they are computed along and not used."""
    temperature = tl.load(temperatures + row)
    return tl.where(temperature < _GREEDY_BELOW, 1.0, temperature)


@triton.jit
def key_of(z: tl.tensor) -> tl.tensor:
    """A number below 2^32, int64, that orders as the float32 ``z`` does."""
    bits = z.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, -1 - bits, bits + 2147483648)


@triton.jit
def logit_of(key: tl.tensor) -> tl.tensor:
    """The inverse of :func:`key_of`."""
    bits = tl.where(key < 2147483648, -1 - key, key - 2147483648)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def picked(
    histogram: tl.tensor,
    states: tl.tensor,
    wanted: tl.tensor,
    row: tl.tensor,
    BY_WEIGHT: tl.constexpr,
    FIRST: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The state after the pass that left ``histogram`` float64 [B, PARTS, 16].

    The state is the key's digits so far, F above them, and the target; ``states`` float64 [B, 3] is
    the one before. ``wanted`` is the target, or, by weight, the share of the total.
    """
    part = tl.arange(0, PADDED)[:, None]
    digit = tl.arange(0, _DIGITS)
    at = histogram + (row * PARTS + part) * _DIGITS + digit[None, :]
    values = tl.sum(tl.load(at, mask=part < PARTS, other=0.0), 0)
    from_on = tl.cumsum(values, 0, reverse=True)
    if FIRST:
        prefix = row.to(tl.int64) * 0
        above = wanted * 0.0
        target = wanted
        if BY_WEIGHT:
            target = wanted * tl.sum(values, 0)
    else:
        prefix = tl.load(states + row * _STATE).to(tl.int64)
        above = tl.load(states + row * _STATE + 1)
        target = tl.load(states + row * _STATE + 2)
    reached = above + from_on >= target
    chosen = tl.max(tl.where(reached, digit, 0), 0)
    # From the digits above the chosen one, not by difference: that would round once more.
    above += tl.sum(tl.where(digit == chosen + 1, from_on, 0.0), 0)
    return prefix * _DIGITS + chosen, above, target


@triton.jit
def select_kernel(
    logits: tl.tensor,
    largest: tl.tensor,
    temperatures: tl.tensor,
    weights: tl.tensor,
    lowest: tl.tensor,
    wanted: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    states_before: tl.tensor,
    states_after: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    number: tl.tensor,
    PASS: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Pass ``number`` over the columns of one program: sums by the next digit of the keys that
    match. ``PASS`` is the number, or 2 for all later ones, which so are compiled once.

    By count every column weighs 1; by weight ``weights`` float64 [B, PARTS * BLOCK] is filled in
    the first pass, zero below ``lowest`` [B], and read by the others.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    real = column < size
    z = tl.load(logits + row * stride + column, mask=real, other=-float("inf")).to(tl.float32)
    key = key_of(z)
    values = tl.where(real, 1.0, 0.0).to(tl.float64)
    if BY_WEIGHT:
        kept = weights + row * PARTS * BLOCK + column
        if PASS == 0:
            values = weights_of(z, tl.load(largest + row), temperature_of(temperatures, row))
            values = tl.where(values < tl.load(lowest + row), 0.0, values)
            tl.store(kept, values)
        else:
            values = tl.load(kept)
    if PASS > 0:
        target = tl.load(wanted + row).to(tl.float64)
        prefix, above, target = picked(
            before, states_before, target, row, BY_WEIGHT, PASS == 1, PARTS, PADDED
        )
        # A mask and no branch: what sums over a program's threads must not move behind one.
        first = part == 0
        tl.store(states_after + row * _STATE, prefix.to(tl.float64), mask=first)
        tl.store(states_after + row * _STATE + 1, above, mask=first)
        tl.store(states_after + row * _STATE + 2, target, mask=first)
        values = tl.where(key >> (32 - _DIGIT_BITS * number) == prefix, values, 0.0)
    digit = (key >> (28 - _DIGIT_BITS * number)) & 15
    to = after + (row * PARTS + part) * _DIGITS
    for value in tl.static_range(_DIGITS):
        tl.store(to + value, tl.sum(tl.where(digit == value, values, 0.0), 0))


@triton.jit
def threshold_kernel(
    histogram: tl.tensor,
    states: tl.tensor,
    wanted: tl.tensor,
    largest: tl.tensor,
    temperatures: tl.tensor,
    lowest: tl.tensor,
    out: tl.tensor,
    BY_WEIGHT: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """One program a row: the weight of the logit that the passes found.

    ``out`` [B] takes it, or ``lowest`` [B] where that is more or the filter is off.
    """
    row = tl.program_id(0)
    asked = tl.load(wanted + row).to(tl.float64)
    key, _, _ = picked(histogram, states, asked, row, BY_WEIGHT, False, PARTS, PADDED)
    if BY_WEIGHT:
        on = asked < 1.0
    else:
        on = asked > 0.0
    # Where rounding leaves the target out of reach, the key is the lowest: all are kept.
    on = on & (key > _LOWEST_KEY)
    weight = weights_of(logit_of(key), tl.load(largest + row), temperature_of(temperatures, row))
    floor = tl.load(lowest + row)
    tl.store(out + row, tl.where(on & (weight > floor), weight, floor))


@dataclass(frozen=True, slots=True)
class Rows:
    """What every launch needs to know of the logits: ``parts`` programs a row, ``padded`` to a
    power of two, of ``block`` columns each."""

    logits: torch.Tensor
    size: int
    largest: torch.Tensor
    temperatures: torch.Tensor
    parts: int
    padded: int
    block: int

    @classmethod
    def of(
        cls, logits: torch.Tensor, size: int, largest: torch.Tensor, temperatures: torch.Tensor
    ) -> Rows:
        """The first ``size`` columns of ``logits``, shared out."""
        block = kernels_logits.COLUMNS
        parts = triton.cdiv(size, block)
        padded = triton.next_power_of_2(parts)
        return cls(logits, size, largest, temperatures, parts, padded, block)

    def empty(self, *shape: int) -> torch.Tensor:
        """float64 [B, *shape]."""
        return torch.empty(len(self.logits), *shape, dtype=torch.float64, device=self.logits.device)


def thresholds(rows: Rows, filters: Filters) -> torch.Tensor:
    """The lowest weight to keep, float64 [B], of exp((z - largest) / temperature)."""
    kth = _select(rows, filters.top_k, torch.zeros_like(filters.min_p), by_weight=False)
    nucleus = _select(rows, filters.top_p, kth, by_weight=True)
    return torch.maximum(nucleus, filters.min_p)


def _select(
    rows: Rows, wanted: torch.Tensor, lowest: torch.Tensor, *, by_weight: bool
) -> torch.Tensor:
    """``lowest`` raised to the threshold of one filter; by weight it is about what is left."""
    count = len(rows.logits)
    histograms = [rows.empty(rows.parts, _DIGITS.value) for _ in range(2)]
    states = [rows.empty(_STATE.value) for _ in range(2)]
    weights = rows.empty(rows.parts * rows.block) if by_weight else histograms[0]
    for index in range(_PASSES):
        odd = index % 2
        select_kernel[(count, rows.parts)](
            rows.logits,
            rows.largest,
            rows.temperatures,
            weights,
            lowest,
            wanted,
            histograms[1 - odd],
            histograms[odd],
            states[1 - odd],
            states[odd],
            rows.logits.stride(0),
            rows.size,
            index,
            min(index, _LATER),
            by_weight,
            rows.parts,
            rows.padded,
            rows.block,
            num_warps=WARPS,
        )
    out = torch.empty_like(lowest)
    threshold_kernel[(count,)](
        histograms[1],
        states[1],
        wanted,
        rows.largest,
        rows.temperatures,
        lowest,
        out,
        by_weight,
        rows.parts,
        rows.padded,
        num_warps=1,
    )
    return out
