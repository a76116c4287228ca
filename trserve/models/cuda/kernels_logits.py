"""Triton kernels over logits: what routers and greedy rows need, and the random numbers.

A row's columns are shared by several programs, since a step has few rows and a vocabulary is long;
a second, small kernel merges what they found. The launchers are documented in ``ops``. Imported
only where a kernel is to run. Knows no requests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trserve.models.cuda.ops_rows import Epilogue

COLUMNS = 4096
"""Columns of logits that one program takes."""

_ROWS = 128
"""Rows of random numbers that one program computes."""

_FIELDS: tl.constexpr = tl.constexpr(5)


@triton.jit
def part_of_epilogue_kernel(
    logits: tl.tensor,
    found: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a row and ``BLOCK`` columns.

    ``found`` float32 [B, 5, PARTS] takes the largest logit, its column (below 2^24: exact), the
    second largest, the sum of w = exp(z - largest) and the sum of w (z - largest); the sum is NaN
    where a logit is NaN or plus infinity.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * stride + column, mask=column < size, other=-float("inf"))
    z = z.to(tl.float32)
    unsound = tl.max(((z != z) | (z == float("inf"))).to(tl.int32), 0)
    z = tl.where(z != z, -float("inf"), z)
    largest = tl.max(z, 0)
    index = tl.min(tl.where(z == largest, column, 2147483647), 0)
    second = tl.max(tl.where(column == index, -float("inf"), z), 0)
    # A part of minus infinity alone weighs nothing, and must not be subtracted from itself.
    shifted = z - tl.where(largest == -float("inf"), 0.0, largest)
    weights = tl.exp(shifted)
    total = tl.sum(weights, 0)
    moment = tl.sum(tl.where(weights > 0.0, weights * shifted, 0.0), 0)
    to = found + row * _FIELDS * PARTS + part
    tl.store(to, largest)
    tl.store(to + PARTS, index.to(tl.float32))
    tl.store(to + 2 * PARTS, second)
    tl.store(to + 3 * PARTS, tl.where(unsound > 0, float("nan"), total))
    tl.store(to + 4 * PARTS, moment)


@triton.jit
def epilogue_kernel(
    found: tl.tensor,
    tokens: tl.tensor,
    finite: tl.tensor,
    largest_out: tl.tensor,
    logsumexp: tl.tensor,
    entropy: tl.tensor,
    top_probability: tl.tensor,
    margin: tl.tensor,
    PARTS: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """One program a row: merge its parts."""
    row = tl.program_id(0)
    part = tl.arange(0, PADDED)
    real = part < PARTS
    at = found + row * _FIELDS * PARTS + part
    tops = tl.load(at, mask=real, other=-float("inf"))
    columns = tl.load(at + PARTS, mask=real, other=float("inf"))
    seconds = tl.load(at + 2 * PARTS, mask=real, other=-float("inf"))
    totals = tl.load(at + 3 * PARTS, mask=real, other=0.0)
    moments = tl.load(at + 4 * PARTS, mask=real, other=0.0)
    largest = tl.max(tops, 0)
    unsound = tl.max((totals != totals).to(tl.int32), 0)
    sound = (unsound == 0) & (largest > -float("inf"))
    column = tl.min(tl.where(tops == largest, columns, float("inf")), 0)
    second = tl.max(tl.where(columns == column, seconds, tops), 0)
    shift = tl.where(sound, largest, 0.0)
    scales = tl.exp(tops - shift)
    total = tl.sum(totals * scales, 0)
    moved = moments + totals * (tops - shift)
    mean = tl.sum(tl.where(scales > 0.0, moved * scales, 0.0), 0) / total
    nan = float("nan")
    tl.store(tokens + row, tl.where(sound, column, -1.0).to(tl.int32))
    tl.store(finite + row, sound.to(tl.int32))
    tl.store(largest_out + row, tl.where(sound, largest, nan))
    tl.store(logsumexp + row, tl.where(sound, largest + tl.log(total), nan))
    tl.store(entropy + row, tl.where(sound, tl.log(total) - mean, nan))
    tl.store(top_probability + row, tl.where(sound, 1.0 / total, nan))
    tl.store(margin + row, tl.where(sound, (1.0 - tl.exp(second - shift)) / total, nan))


@triton.jit
def philox_round(
    first: tl.tensor,
    mixed_a: tl.tensor,
    second: tl.tensor,
    mixed_b: tl.tensor,
    key_a: tl.tensor,
    key_b: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """One round of Philox4x32 on words of 32 bits that lie in 64: products do not overflow."""
    one = first * 0xD2511F53
    two = second * 0xCD9E8D57
    word = 0xFFFFFFFF
    return (two >> 32) ^ mixed_a ^ key_a, two & word, (one >> 32) ^ mixed_b ^ key_b, one & word


@triton.jit
def uniform_kernel(
    seeds: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    MODEL: tl.constexpr,
    PURPOSE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program ``BLOCK`` rows: Philox4x32-10, its first two words as 53 bits of a fraction."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < rows
    seed = tl.load(seeds + row, mask=real, other=0).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row, mask=real, other=0).to(tl.uint64)
    key, low = seed & 0xFFFFFFFF, seed >> 32
    zero = seed * 0
    a, b, c, d = position & 0xFFFFFFFF, zero + MODEL, zero + PURPOSE, zero
    for _ in tl.static_range(10):
        a, b, c, d = philox_round(a, b, c, d, key, low)
        key = (key + 0x9E3779B9) & 0xFFFFFFFF
        low = (low + 0xBB67AE85) & 0xFFFFFFFF
    bits = ((a << 21) | (b >> 11)).to(tl.int64)
    tl.store(out + row, bits.to(tl.float64) * 1.1102230246251565e-16, mask=real)


def epilogue(logits: torch.Tensor, tokenizer_size: int, out: Epilogue) -> None:
    """See :func:`trserve.models.cuda.ops.epilogue`."""
    assert logits.stride(1) == 1
    rows, parts = len(logits), triton.cdiv(tokenizer_size, COLUMNS)
    found = torch.empty(rows, _FIELDS.value, parts, dtype=torch.float32, device=logits.device)
    part_of_epilogue_kernel[(rows, parts)](
        logits, found, logits.stride(0), tokenizer_size, parts, COLUMNS, num_warps=8
    )
    epilogue_kernel[(rows,)](
        found,
        out.tokens,
        out.finite,
        out.largest,
        out.logsumexp,
        out.entropy,
        out.top_probability,
        out.margin,
        parts,
        triton.next_power_of_2(parts),
        num_warps=1,
    )


def uniform(
    seeds: torch.Tensor, positions: torch.Tensor, model: int, purpose: int, out: torch.Tensor
) -> None:
    """See :func:`trserve.models.cuda.ops.uniform`."""
    rows = len(seeds)
    grid = (triton.cdiv(rows, _ROWS),)
    uniform_kernel[grid](seeds, positions, out, rows, model, purpose, _ROWS, num_warps=4)
