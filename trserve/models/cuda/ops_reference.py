"""What the kernels must compute, in plain torch operations on tensors of any device.

Slow and plain on purpose: tests hold the kernels against these, and these against formulas and the
CPU engine. Signatures and shapes are those of ``ops``, where every one is documented. Knows no
triton.
"""

from __future__ import annotations

from ctypes import c_int32
from typing import Final

import torch
from torch.nn import functional

from trserve.models.cuda.ops_rows import NO_TOKEN, Epilogue, Filters
from trserve.params import GREEDY_BELOW

_WORD: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """See :func:`trserve.models.cuda.ops.rms_norm`."""
    out.copy_(_normed(x, weight, eps))


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """See :func:`trserve.models.cuda.ops.silu_mul`."""
    gate, up = gate_up.float().chunk(2, -1)
    out.copy_(functional.silu(gate) * up)


def take_ids(ids: torch.Tensor, sources: torch.Tensor) -> None:
    """See :func:`trserve.models.cuda.ops.take_ids`; on the CPU only, token by token."""
    wide = ids.numpy()
    for index, source in enumerate(sources.numpy().tolist()):
        if source:
            wide[index] = c_int32.from_address(source).value


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
    group = qkv.shape[2] - 2
    queries, keys, values = qkv[:, :, :group], qkv[:, :, group], qkv[:, :, group + 1]
    turns = rotations[positions.long()][:, None, None]
    q.copy_(_rotated(queries, q_norm, eps, turns).flatten(1, 2))
    new = torch.stack((_rotated(keys, k_norm, eps, turns[:, 0]), values.float()), 1)
    # Where nothing is to be stored, what is there is stored again: no shape depends on the slots.
    block_size = kv.shape[3]
    stored = (slots >= 0)[:, None, None, None]
    # The last slot is the dummy block's, which no real token has.
    real = torch.where(slots >= 0, slots, kv.shape[0] * block_size - 1).long()
    blocks, offsets = real // block_size, real % block_size
    kv[blocks, :, :, offsets] = torch.where(stored, new.to(kv.dtype), kv[blocks, :, :, offsets])


def epilogue(logits: torch.Tensor, tokenizer_size: int, out: Epilogue) -> None:
    """See :func:`trserve.models.cuda.ops.epilogue`."""
    z = logits[:, :tokenizer_size].float()
    largest, index = z.max(-1)
    # The lowest index of the largest: torch's arg max leaves open which.
    index = (z == largest[:, None]).int().argmax(-1)
    shifted = z - largest[:, None]
    weights = shifted.exp()
    total = weights.sum(-1)
    # A weight of 0 times minus infinity is to be 0.
    mean = torch.where(weights > 0, weights * shifted, 0.0).sum(-1) / total
    others = shifted.scatter(-1, index[:, None], -torch.inf)
    finite = largest.isfinite()
    nan = torch.full_like(largest, torch.nan)
    out.tokens.copy_(torch.where(finite, index, NO_TOKEN))
    out.finite.copy_(finite)
    out.largest.copy_(torch.where(finite, largest, nan))
    out.logsumexp.copy_(torch.where(finite, largest + total.log(), nan))
    out.entropy.copy_(torch.where(finite, total.log() - mean, nan))
    out.top_probability.copy_(torch.where(finite, 1.0 / total, nan))
    out.margin.copy_(torch.where(finite, (1.0 - others.amax(-1).exp()) / total, nan))


def uniform(
    seeds: torch.Tensor, positions: torch.Tensor, model: int, purpose: int, out: torch.Tensor
) -> None:
    """See :func:`trserve.models.cuda.ops.uniform`: Philox4x32-10 in signed 64-bit integers.

    A product of two 32-bit words may wrap, but its bits are those of the unsigned one.
    """
    key = [seeds & _WORD, (seeds >> 32) & _WORD]
    zero = torch.zeros_like(seeds)
    words = [positions.long() & _WORD, zero + model, zero + purpose, zero]
    for _ in range(_ROUNDS):
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            ((second >> 32) & _WORD) ^ words[1] ^ key[0],
            second & _WORD,
            ((first >> 32) & _WORD) ^ words[3] ^ key[1],
            first & _WORD,
        ]
        key = [(word + step) & _WORD for word, step in zip(key, _KEY_STEPS, strict=True)]
    bits = (words[0] << 21) | (words[1] >> 11)
    out.copy_(bits.double() * 2.0**-53)


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
    finite = best.finite > 0
    drawn = finite & (temperatures >= GREEDY_BELOW)
    # Rows that do not draw go along as if they had sound logits: no shape depends on data.
    z = logits[:, :tokenizer_size].double() - best.largest.double()[:, None]
    z = torch.where(drawn[:, None], z / temperatures[:, None], 0.0)
    weights = z.exp()
    if filters is not None:
        weights = torch.where(weights < thresholds(weights, filters)[:, None], 0.0, weights)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, numbers[:, None] * total, right=True)
    # The first index that reaches the total is the last of positive weight.
    last = torch.searchsorted(cumulative, total.contiguous())
    chosen = torch.minimum(chosen, last)[:, 0]
    out.copy_(torch.where(drawn, chosen, best.tokens.long()))


def thresholds(weights: torch.Tensor, filters: Filters) -> torch.Tensor:
    """The lowest weight that top_k, then top_p, then min_p keep in each row, float64 [B].

    The largest weight of a row is 1, so ``min_p`` is a threshold itself.
    """
    ordered = weights.sort(-1, descending=True).values
    top_k = filters.top_k.long()
    kth = ordered.gather(-1, (top_k.clamp(1, weights.shape[1]) - 1)[:, None])
    kth = torch.where(top_k[:, None] > 0, kth, 0.0)
    left = torch.where(weights >= kth, weights, 0.0).sum(-1, keepdim=True)
    before = ordered.cumsum(-1) - ordered
    top_p = filters.top_p[:, None]
    kept = (before < top_p * left).sum(-1, keepdim=True).clamp(min=1)
    nucleus = torch.where(top_p < 1.0, ordered.gather(-1, kept - 1), 0.0)
    return torch.maximum(torch.maximum(kth, nucleus)[:, 0], filters.min_p)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of ``x`` over its last dimension, float32."""
    wide = x.float()
    mean = wide.square().mean(-1, keepdim=True)
    return wide / (mean + eps).sqrt() * weight.float()


def _rotated(
    heads: torch.Tensor, norm: torch.Tensor | None, eps: float, turns: torch.Tensor
) -> torch.Tensor:
    """Normalised and rotated ``heads`` [T, ..., dim], float32."""
    wide = heads.float() if norm is None else _normed(heads, norm, eps)
    even, odd = wide[..., 0::2], wide[..., 1::2]
    cosine, sine = turns.unbind(-1)
    pairs = (even * cosine - odd * sine, even * sine + odd * cosine)
    return torch.stack(pairs, -1).flatten(-2)
