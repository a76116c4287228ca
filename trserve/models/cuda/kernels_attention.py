"""Triton kernels of paged attention: one for decodes, suffixes and prompt chunks, and the merge.

A program takes one row, one KV head, a tile of the row's tokens with all query heads that share the
KV head, and one of several shares of the keys (split KV, as in Flash-Decoding; the online softmax
is that of Milakov and Gimelshein, 2018, and FlashAttention). Lengths, first tokens and blocks are
read from device memory, so a captured launch serves any lengths; programs beyond a row's tokens or
keys do nothing. Scores and sums are float32; products of float32 caches are exact (no TF32).

Imported only where a kernel is to run. Knows arrays; nothing of steps or graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

LOG2_E: Final = 1.4426950408889634

_SMALLEST_TILE: Final = 16
_LARGEST_TILE: Final = 64
"""Rows of queries, heads times tokens, that a program takes: what tensor cores want at least, and
what registers hold. In float32, without tensor cores, registers hold no more than the least."""


# Steps of other widths have other numbers of tiles: compiled anew for each kind, in mid-step.
@triton.jit(do_not_specialize=["tiles"])
def attention_kernel(
    q: tl.tensor,
    kv: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    stats: tl.tensor,
    query_start: tl.tensor,
    kv_len: tl.tensor,
    block_start: tl.tensor,
    blocks: tl.tensor,
    scale: tl.tensor,
    tiles: tl.tensor,
    block_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """``scale`` includes log2(e). With ``SPLITS`` above 1, ``partial`` float32
    [T, heads, SPLITS, DIM] takes the unnormalised sums and ``stats`` float32 [T, heads, SPLITS, 2]
    their largest scores, base 2, and totals; else ``out`` takes the result."""
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    kv_head, split = tl.program_id(1), tl.program_id(2)
    per_tile: tl.constexpr = TILE // GROUP
    first = tl.load(query_start + row)
    width = tl.load(query_start + row + 1) - first
    if tile * per_tile >= width:
        return
    length = tl.load(kv_len + row)
    table = blocks + tl.load(block_start + row)

    line = tl.arange(0, TILE)
    query = tile * per_tile + line // GROUP
    real = (line < per_tile * GROUP) & (query < width)
    position = length - width + query
    head = kv_head * GROUP + line % GROUP
    place = (first + query).to(tl.int64) * (KV_HEADS * GROUP) + head
    feature = tl.arange(0, DIM_PADDED)
    within = feature < DIM
    queries = tl.load(
        q + place[:, None] * DIM + feature[None, :],
        mask=real[:, None] & within[None, :],
        other=0.0,
    )

    # The keys that the tile's last token sees, in equal shares of whole steps.
    seen = length - width + tl.minimum((tile + 1) * per_tile, width)
    share = tl.cdiv(tl.cdiv(seen, SPLITS), KEYS) * KEYS
    begin = split * share
    end = tl.minimum(begin + share, seen)
    top = tl.full((TILE,), -float("inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    sums = tl.zeros((TILE, DIM_PADDED), tl.float32)
    head_base = kv + kv_head * BLOCK_SIZE * DIM
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        # What is past the end may be another row's, or a NaN: it is never read.
        there = key < end
        block = tl.load(table + key // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        base = block * block_stride + (key % BLOCK_SIZE) * DIM
        keys = tl.load(
            head_base + base[None, :] + feature[:, None],
            mask=there[None, :] & within[:, None],
            other=0.0,
        )
        scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
        visible = there[None, :] & (key[None, :] <= position[:, None])
        scores = tl.where(visible, scores, -float("inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        # Before a line has seen any key, minus infinity would be subtracted from itself.
        shift = tl.where(highest == -float("inf"), 0.0, highest)
        weights = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(top - shift)
        values = tl.load(
            head_base + KV_HEADS * BLOCK_SIZE * DIM + base[:, None] + feature[None, :],
            mask=there[:, None] & within[None, :],
            other=0.0,
        )
        sums *= fade[:, None]
        sums += tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        total = total * fade + tl.sum(weights, 1)
        top = highest

    written = real[:, None] & within[None, :]
    if SPLITS == 1:
        result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
        to = out + place[:, None] * DIM + feature[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=written)
    else:
        share_of = place * SPLITS + split
        tl.store(partial + share_of[:, None] * DIM + feature[None, :], sums, mask=written)
        tl.store(stats + share_of * 2, top, mask=real)
        tl.store(stats + share_of * 2 + 1, total, mask=real)


@triton.jit
def merge_kernel(
    partial: tl.tensor,
    stats: tl.tensor,
    out: tl.tensor,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
) -> None:
    """One program a token and head: the shares' sums, each by its largest score, over their total.

    ``SPLITS`` is a power of two.
    """
    place = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    feature = tl.arange(0, DIM_PADDED)
    tops = tl.load(stats + (place * SPLITS + split) * 2)
    totals = tl.load(stats + (place * SPLITS + split) * 2 + 1)
    highest = tl.max(tops, 0)
    fades = tl.exp2(tops - tl.where(highest == -float("inf"), 0.0, highest))
    # Shares without keys are not worth reading. A NaN is: it is the row's own.
    useful = (tops > -float("inf")) | (totals != 0.0)
    sums = tl.load(
        partial + (place * SPLITS + split)[:, None] * DIM + feature[None, :],
        mask=useful[:, None] & (feature < DIM)[None, :],
        other=0.0,
    )
    total = tl.sum(totals * fades, 0)
    result = tl.sum(sums * fades[:, None], 0) / tl.where(total != 0.0, total, 1.0)
    tl.store(out + place * DIM + feature, result.to(out.dtype.element_ty), mask=feature < DIM)


@dataclass(frozen=True, slots=True)
class Launch:
    """How attention is launched: fixed for a graph, whatever the lengths.

    Attributes:
        rows: rows, padding included.
        tiles: programs that share the tokens of a row.
        tile: lines of queries a program takes.
        splits: shares of the keys, a power of two.
    """

    rows: int
    tiles: int
    tile: int
    splits: int


def plan_launch(
    rows: int,
    width: int,
    group: int,
    kv_heads: int,
    *,
    exact: bool,
    processors: int,
    most_splits: int,
) -> Launch:
    """The launch for ``rows`` rows of up to ``width`` tokens.

    Keys are split until there are about two programs for each of ``processors``, or ``most_splits``
    shares.

    Args:
        exact: the caches hold float32.
    """
    most = _SMALLEST_TILE if exact else _LARGEST_TILE
    tile = _power_of_two(max(_SMALLEST_TILE, group, min(width * group, most)))
    tiles = -(-width // (tile // group))
    programs = rows * tiles * kv_heads
    wanted = min(most_splits, 2 * processors // programs)
    return Launch(rows, tiles, tile, 1 << max(0, wanted.bit_length() - 1))


def attend(
    launch: Launch,
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    arrays: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
) -> None:
    """Attention of ``q`` over one layer's cache; see ``attention.AttentionBackend.run``.

    Args:
        arrays: ``query_start``, ``kv_len``, ``block_start`` and ``blocks`` on the device.
        scale: factor of the scores.
    """
    assert q.is_contiguous() and out.is_contiguous() and kv[0].is_contiguous()
    tokens, heads, dim = q.shape
    _, _, kv_heads, block_size, _ = kv.shape
    padded = max(_SMALLEST_TILE, triton.next_power_of_2(dim))
    splits = launch.splits
    exact = kv.dtype == torch.float32
    if splits > 1:
        # In a capture these come from the graph's own pool, so no plan has to keep them.
        partial = torch.empty(tokens, heads, splits, dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(tokens, heads, splits, 2, dtype=torch.float32, device=q.device)
    else:
        partial = stats = out
    attention_kernel[(launch.rows * launch.tiles, kv_heads, splits)](
        q,
        kv,
        out,
        partial,
        stats,
        *arrays,
        scale * LOG2_E,
        launch.tiles,
        kv.stride(0),
        kv_heads,
        heads // kv_heads,
        dim,
        block_size,
        splits,
        launch.tile,
        keys_at_a_time(dim, exact=exact),
        padded,
        "ieee" if exact else "tf32",
        num_warps=4,
        num_stages=1 if exact else 2,
    )
    if splits > 1:
        merge_kernel[(tokens * heads,)](partial, stats, out, splits, dim, padded, num_warps=4)


def keys_at_a_time(dim: int, *, exact: bool) -> int:
    """Keys that a program takes per step of its loop: what shared memory holds twice over."""
    return 32 if exact or dim > 128 else 64


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
