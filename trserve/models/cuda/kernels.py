"""Triton kernels of a layer's small operations: norms, rotation and storing, the gated unit.

Each launcher takes what the function of the same name in ``ops`` takes and is documented there. A
program computes in float32 and rounds once, as it stores. Imported only where a kernel is to run.
Knows tensors and launches; nothing of layers.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

_COLUMNS: Final = 1024
"""Columns of the gated unit that one program computes."""

_IDS: Final = 128
"""Tokens whose ids one program takes."""


@triton.jit
def normed(x: tl.tensor, weight: tl.tensor, size: tl.constexpr, eps: tl.tensor) -> tl.tensor:
    """The norm of one row ``x`` float32, zero past ``size``."""
    mean = tl.sum(x * x, 0) / size
    return x / tl.sqrt_rn(mean + eps) * weight


@triton.jit
def rms_norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program a row."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    real = column < SIZE
    wide = tl.load(x + row + column, mask=real, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    result = normed(wide, scale, SIZE, eps)
    tl.store(out + row + column, result.to(out.dtype.element_ty), mask=real)


@triton.jit
def silu_mul_kernel(
    gate_up: tl.tensor, out: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """One program a row and ``BLOCK`` columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, mask=real, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * SIZE + column, result.to(out.dtype.element_ty), mask=real)


@triton.jit
def norm_weights(
    q_norm: tl.tensor, k_norm: tl.tensor, is_query: tl.tensor, is_key: tl.tensor
) -> tl.tensor:
    """The queries' weights in their lines, the key's in its own, zero elsewhere."""
    of_queries = tl.load(q_norm + is_query.to(tl.int32) * 0, mask=is_query, other=0.0)
    of_keys = tl.load(k_norm + is_key.to(tl.int32) * 0, mask=is_key, other=0.0)
    return of_queries.to(tl.float32) + of_keys.to(tl.float32)


@triton.jit
def rope_and_store_kernel(
    qkv: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    rotations: tl.tensor,
    kv: tl.tensor,
    q: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    eps: tl.tensor,
    block_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORMED: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HALF_PADDED: tl.constexpr,
) -> None:
    """One program a token and KV head: its queries, its key, its value, as rows of pairs."""
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    half: tl.constexpr = DIM // 2
    head = tl.arange(0, HEADS_PADDED)[:, None]
    pair = tl.arange(0, HALF_PADDED)[None, :]
    real = (head < GROUP + 2) & (pair < half)
    place = qkv + (token * KV_HEADS + kv_head) * (GROUP + 2) * DIM + head * DIM + 2 * pair
    even = tl.load(place, mask=real, other=0.0).to(tl.float32)
    odd = tl.load(place + 1, mask=real, other=0.0).to(tl.float32)
    rotated = real & (head <= GROUP)
    out_even, out_odd = even, odd
    if NORMED:
        mean = tl.sum(even * even + odd * odd, 1)[:, None] / DIM
        root = tl.sqrt_rn(mean + eps)
        is_query = real & (head < GROUP)
        is_key = real & (head == GROUP)
        weight_even = norm_weights(q_norm + 2 * pair, k_norm + 2 * pair, is_query, is_key)
        weight_odd = norm_weights(q_norm + 2 * pair + 1, k_norm + 2 * pair + 1, is_query, is_key)
        out_even = even / root * weight_even
        out_odd = odd / root * weight_odd
    turn = rotations + (tl.load(positions + token).to(tl.int64) * half + pair) * 2
    cosine = tl.load(turn, mask=pair < half, other=0.0)
    sine = tl.load(turn + 1, mask=pair < half, other=0.0)
    turned_even = out_even * cosine - out_odd * sine
    turned_odd = out_even * sine + out_odd * cosine
    even = tl.where(rotated, turned_even, even)
    odd = tl.where(rotated, turned_odd, odd)

    is_query = real & (head < GROUP)
    to = q + ((token * KV_HEADS + kv_head) * GROUP + head) * DIM + 2 * pair
    tl.store(to, even.to(q.dtype.element_ty), mask=is_query)
    tl.store(to + 1, odd.to(q.dtype.element_ty), mask=is_query)

    slot = tl.load(slots + token).to(tl.int64)
    stored = real & (head >= GROUP) & (slot >= 0)
    # Keys and values of a block lie KV_HEADS * BLOCK_SIZE * DIM apart.
    part = (head - GROUP) * KV_HEADS + kv_head
    within = (part * BLOCK_SIZE + slot % BLOCK_SIZE) * DIM + 2 * pair
    to = kv + slot // BLOCK_SIZE * block_stride + within
    tl.store(to, even.to(kv.dtype.element_ty), mask=stored)
    tl.store(to + 1, odd.to(kv.dtype.element_ty), mask=stored)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """See :func:`trserve.models.cuda.ops.rms_norm`."""
    assert x.is_contiguous() and out.is_contiguous()
    rows, size = x.shape
    block = triton.next_power_of_2(size)
    rms_norm_kernel[(rows,)](x, weight, out, eps, size, block, num_warps=_warps(block))


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """See :func:`trserve.models.cuda.ops.silu_mul`."""
    assert gate_up.is_contiguous() and out.is_contiguous()
    rows, size = out.shape
    silu_mul_kernel[(rows, triton.cdiv(size, _COLUMNS))](gate_up, out, size, _COLUMNS)


def rope_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rotations: torch.Tensor,
    kv: torch.Tensor,
    q: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> None:
    """See :func:`trserve.models.cuda.ops.rope_and_store`."""
    assert qkv.is_contiguous() and q.is_contiguous() and rotations.is_contiguous()
    tokens, kv_heads, heads, dim = qkv.shape
    rope_and_store_kernel[(tokens, kv_heads)](
        qkv,
        positions,
        slots,
        rotations,
        kv,
        q,
        # Without norms the kernel never reads these.
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        eps,
        kv.stride(0),
        kv_heads,
        heads - 2,
        dim,
        kv.shape[3],
        q_norm is not None,
        triton.next_power_of_2(heads),
        triton.next_power_of_2(dim // 2),
    )


# One of any number of ids, odd ones too, lest it be compiled in mid-step.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["sources"])
def take_ids_kernel(
    ids: tl.tensor, sources: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """One program ``BLOCK`` tokens.

    Sources lie in an inbox that another process's device wrote, or in mapped host memory: a
    volatile load is one of system scope, which no cache of this device answers from what it had.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + token, mask=token < count, other=0)
    given = source != 0
    found = tl.load(source.to(tl.pointer_type(tl.int32)), mask=given, other=0, volatile=True)
    tl.store(ids + token, found.to(tl.int64), mask=given)


def take_ids(ids: torch.Tensor, sources: torch.Tensor) -> None:
    """See :func:`trserve.models.cuda.ops.take_ids`."""
    count = len(ids)
    grid = (triton.cdiv(count, _IDS),)
    take_ids_kernel[grid](ids, sources, count, _IDS, num_warps=4)


def _warps(block: int) -> int:
    """Warps of a program over ``block`` columns: 8 elements a thread, within bounds."""
    return min(16, max(1, block // 256))
