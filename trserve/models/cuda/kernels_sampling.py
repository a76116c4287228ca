"""Triton kernels that draw tokens: ``ops.sample`` is documented there.

A row's columns are shared by several programs. Two kernels suffice: sums of the parts, then the
part and the column where the number falls. What filters remove, ``kernels_filters`` has found
before. Imported only where a kernel is to run. Knows no requests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trserve.models.cuda.kernels_filters import (
    WARPS,
    Rows,
    temperature_of,
    thresholds,
    weights_of,
)
from trserve.models.cuda.ops_rows import Epilogue, Filters
from trserve.params import GREEDY_BELOW

_GREEDY_BELOW: tl.constexpr = tl.constexpr(GREEDY_BELOW)


@triton.jit
def kept_weights(
    logits: tl.tensor,
    largest: tl.tensor,
    temperatures: tl.tensor,
    lowest: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    FILTERED: tl.constexpr,
) -> tl.tensor:
    """The weights of the row's columns, zero for those that the filters remove."""
    real = column < size
    z = tl.load(logits + row * stride + column, mask=real, other=-float("inf")).to(tl.float32)
    weights = weights_of(z, tl.load(largest + row), temperature_of(temperatures, row))
    if FILTERED:
        weights = tl.where(weights < tl.load(lowest + row), 0.0, weights)
    return tl.where(real, weights, 0.0)


@triton.jit
def part_sums_kernel(
    logits: tl.tensor,
    largest: tl.tensor,
    temperatures: tl.tensor,
    lowest: tl.tensor,
    sums: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    FILTERED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a row and part; ``sums`` float64 [B, PARTS] takes the weight of the part."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    weights = kept_weights(
        logits, largest, temperatures, lowest, row, column, stride, size, FILTERED
    )
    tl.store(sums + row * PARTS + part, tl.sum(weights, 0))


@triton.jit
def draw_kernel(
    logits: tl.tensor,
    largest: tl.tensor,
    temperatures: tl.tensor,
    lowest: tl.tensor,
    sums: tl.tensor,
    numbers: tl.tensor,
    best: tl.tensor,
    finite: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    FILTERED: tl.constexpr,
    PARTS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a row: the part in which its number falls, then the column."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PADDED)
    part_sums = tl.load(sums + row * PARTS + part, mask=part < PARTS, other=0.0)
    cumulative = tl.cumsum(part_sums, 0)
    target = tl.load(numbers + row) * tl.sum(tl.where(part == PARTS - 1, cumulative, 0.0), 0)
    # Where rounding takes the target up to the total: the last part that weighs anything.
    weighing = tl.max(tl.where(part_sums > 0.0, part, 0), 0)
    passed = tl.sum((cumulative <= target).to(tl.int32), 0)
    chosen = tl.minimum(passed, weighing)
    before = tl.sum(tl.where(part == chosen - 1, cumulative, 0.0), 0)
    column = chosen * BLOCK + tl.arange(0, BLOCK)
    weights = kept_weights(
        logits, largest, temperatures, lowest, row, column, stride, size, FILTERED
    )
    reached = (before + tl.cumsum(weights, 0) > target) & (weights > 0.0)
    last = tl.max(tl.where(weights > 0.0, column, 0), 0)
    drawn = tl.minimum(tl.min(tl.where(reached, column, 2147483647), 0), last)
    draws = (tl.load(finite + row) > 0) & (tl.load(temperatures + row) >= _GREEDY_BELOW)
    token = tl.where(draws, drawn, tl.load(best + row))
    tl.store(out + row, token.to(out.dtype.element_ty))


def sample(
    logits: torch.Tensor,
    tokenizer_size: int,
    best: Epilogue,
    temperatures: torch.Tensor,
    numbers: torch.Tensor,
    out: torch.Tensor,
    filters: Filters | None,
) -> None:
    """See :func:`trserve.models.cuda.ops.sample`."""
    assert logits.stride(1) == 1
    rows = Rows.of(logits, tokenizer_size, best.largest, temperatures)
    filtered = filters is not None
    lowest = temperatures if filters is None else thresholds(rows, filters)
    sums = rows.empty(rows.parts)
    common = (logits, best.largest, temperatures, lowest, sums)
    part_sums_kernel[(len(logits), rows.parts)](
        *common,
        logits.stride(0),
        tokenizer_size,
        filtered,
        rows.parts,
        rows.block,
        num_warps=WARPS,
    )
    draw_kernel[(len(logits),)](
        *common,
        numbers,
        best.tokens,
        best.finite,
        out,
        logits.stride(0),
        tokenizer_size,
        filtered,
        rows.parts,
        rows.padded,
        rows.block,
        num_warps=WARPS,
    )
