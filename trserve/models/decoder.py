"""The decoder of Qwen3, Qwen2 and Llama: one class, driven by the spec.

Knows weights and arithmetic; nothing of files, of batches' geometry (``attention`` has that) or of
requests. Weights arrive fused (queries, keys and values; gate and up) and with interleaved rotary
pairs (``rope``); norms and softmax are computed in float32 whatever the weights are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from trserve.models.rope import RotaryTable
from trserve.models.spec import ModelSpec

_COPY_TIED_BELOW = 256 << 20
"""Bytes up to which a tied head gets a copy in the faster layout; larger ones stay shared."""

_KEPT_BUFFERS = 64
"""Steps of up to so many tokens keep their views: steps of decodes, that is."""


class Attention(Protocol):
    """What a decoder needs of attention: see :class:`trserve.models.attention.PagedAttention`."""

    def run(self, layer: int) -> None:
        """Attend in ``layer``, from and to the buffers of the step."""


class Linear:
    """``x @ weight.T + bias`` with the weight laid out for the few rows that a step has.

    In float32 the weight is kept transposed ([in, out]), with which the matrix product takes as
    little as half the time at 4 to 8 rows. In bfloat16 it is packed once into the blocked layout
    of oneDNN, where torch has that, instead of being reordered in every call.


    Args:
        weight: [out, in]; with ``share``, used as it is and not copied into another layout.
        bias: [out], or None.
    """

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, share: bool = False
    ) -> None:
        self._bias = bias
        self._packed = not share and _can_pack(weight)
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        elif weight.dtype == torch.float32 and weight.device.type == "cpu" and not share:
            self._weight = weight.t().contiguous()
        else:
            self._weight = weight.t()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] to a new [T, out]."""
        if self._packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return out
        if self._bias is None:
            return torch.mm(x, self._weight)
        return torch.addmm(self._bias, x, self._weight)

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write ``self(x)`` to ``out``."""
        if self._packed:
            out.copy_(self(x))
        elif self._bias is None:
            torch.mm(x, self._weight, out=out)
        else:
            torch.addmm(self._bias, x, self._weight, out=out)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Add ``self(x)`` to ``residual``, in place."""
        if self._packed or self._bias is not None:
            residual.add_(self(x))
        else:
            residual.addmm_(x, self._weight)


class RMSNorm:
    """Root mean square norm (Zhang and Sennrich, 2019) over the last dimension, in float32.

    ``x / sqrt(mean(x^2) + eps) * w`` equals ``x / hypot(|x|, sqrt(n * eps)) * (w * sqrt(n))``,
    which is half the operations. With ``scaled`` false the factor ``w * sqrt(n)`` (:attr:`scale`)
    is left to the caller, who has folded it into the projection that follows.
    """

    __slots__ = ("_floor", "_scaled", "scale")

    def __init__(self, weight: torch.Tensor, eps: float, *, scaled: bool = True) -> None:
        size = weight.shape[-1]
        self.scale = weight.float() * math.sqrt(size)
        self._scaled = scaled
        self._floor = torch.tensor(math.sqrt(size * eps), device=weight.device)

    def into(self, x: torch.Tensor, length: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the norm of ``x`` to ``out``, and return it.

        Args:
            length: float32, as ``x`` but of size 1 in the last dimension; overwritten.
            out: float32, as ``x``.
        """
        torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32, out=length)
        torch.div(x, length.hypot_(self._floor), out=out)
        return out.mul_(self.scale) if self._scaled else out


@dataclass(slots=True)
class DecoderLayer:
    """The weights of one layer.

    The rows of ``qkv`` are ordered by KV head: the queries that share it, its key, its value.
    ``qk_norm`` covers the queries of one KV head and its key, [group + 1, head_dim].
    """

    input_norm: RMSNorm
    qkv: Linear
    qk_norm: RMSNorm | None
    output: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


class StepBuffers:
    """Where a forward over T tokens leaves its intermediate results, layer after layer.

    Everything that can be sliced or reshaped is, once: in a small model a view costs as much as
    the arithmetic. ``qkv`` is [T, kv_heads, group + 2, head_dim] and ``attended``
    [T + 1, kv_heads, group, head_dim], as attention wants them.
    """

    __slots__ = (
        "attended",
        "attended_flat",
        "gate",
        "gate_up",
        "heads",
        "heads_length",
        "heads_normed",
        "length",
        "normed",
        "pairs",
        "pairs_in",
        "pairs_out",
        "qkv",
        "qkv_flat",
        "rounded",
        "up",
    )

    def __init__(self, spec: ModelSpec, storage: _Storage, tokens: int) -> None:
        group = spec.num_heads // spec.num_kv_heads
        dim = spec.head_dim
        self.normed = storage.normed[:tokens]
        self.rounded = storage.rounded[:tokens]
        self.length = storage.length[:tokens]
        self.qkv_flat = storage.qkv[:tokens]
        self.qkv = self.qkv_flat.view(tokens, spec.num_kv_heads, group + 2, dim)
        self.heads = self.qkv[:, :, : group + 1]
        self.heads_normed = storage.heads[:tokens].view(self.heads.shape)
        self.heads_length = storage.heads_length[:tokens].view(*self.heads.shape[:3], 1)
        self.pairs = _pairs(self.heads)
        self.pairs_in = torch.view_as_complex(
            self.pairs if storage.in_place else _pairs(self.heads_normed)
        )
        self.pairs_out = self.pairs_in
        if self.pairs.dtype == torch.float32:
            self.pairs_out = torch.view_as_complex(self.pairs)
        self.attended = storage.attended[: tokens + 1].view(-1, spec.num_kv_heads, group, dim)
        self.attended_flat = storage.attended[:tokens]
        self.gate_up = storage.gate_up[:tokens]
        self.gate, self.up = self.gate_up.chunk(2, -1)


def _pairs(heads: torch.Tensor) -> torch.Tensor:
    return heads.view(*heads.shape[:-1], -1, 2)


class _Storage:
    """Memory of :class:`StepBuffers` for up to ``capacity`` tokens."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, capacity: int) -> None:
        def buffer(width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(capacity, width, dtype=dtype)

        self.capacity = capacity
        rotated = spec.q_size + spec.kv_size
        # Without a norm, float32 queries and keys are rotated where they are.
        self.in_place = not spec.qk_norm and dtype == torch.float32
        self.normed = buffer(spec.hidden_size)
        self.rounded = self.normed if dtype == torch.float32 else buffer(spec.hidden_size, dtype)
        self.length = buffer(1)
        self.qkv = buffer(rotated + spec.kv_size, dtype)
        self.heads = buffer(rotated)
        self.heads_length = buffer(rotated // spec.head_dim)
        self.attended = torch.empty(capacity + 1, spec.q_size, dtype=dtype)
        self.gate_up = buffer(2 * spec.intermediate_size, dtype)


class Decoder:
    """A decoder-only transformer on one device."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        embedding: torch.Tensor,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        head: torch.Tensor,
    ) -> None:
        self.spec = spec
        self.dtype = embedding.dtype
        self.embedding = embedding
        self.layers = layers
        self._rotary = RotaryTable(spec, embedding.device)
        # Queries are divided by sqrt(head_dim) where they are rotated, in float32.
        group = spec.num_heads // spec.num_kv_heads
        scales = torch.ones(group + 1, 1, device=embedding.device)
        scales[:group] = spec.head_dim**-0.5
        self._rotation_scales = scales
        self._norm = norm
        self._head = head
        self._storage = _Storage(spec, self.dtype, _KEPT_BUFFERS)
        self._buffers: dict[int, StepBuffers] = {}

    def lm_head(self, tokenizer_size: int) -> Linear:
        """The output projection; columns from ``tokenizer_size`` on come out at minus infinity.

        They are rows of padding in the checkpoint, without tokens. A bias of minus infinity costs
        nothing, where filling the columns afterwards would cost two operations a step.
        """
        bias = None
        if tokenizer_size < self.spec.vocab_size:
            bias = self._head.new_zeros(self.spec.vocab_size)
            bias[tokenizer_size:] = -torch.inf
        tied = self._head.data_ptr() == self.embedding.data_ptr()
        return Linear(self._head, bias, share=tied and self._head.nbytes > _COPY_TIED_BELOW)

    def buffers(self, tokens: int) -> StepBuffers:
        """The buffers of a step of ``tokens`` tokens; every call shares the same memory."""
        if tokens > self._storage.capacity:
            self._storage = _Storage(self.spec, self.dtype, 1 << (tokens - 1).bit_length())
            self._buffers.clear()
        buffers = self._buffers.get(tokens)
        if buffers is None:
            buffers = StepBuffers(self.spec, self._storage, tokens)
            if tokens <= _KEPT_BUFFERS:
                self._buffers[tokens] = buffers
        return buffers

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        length: int,
        attention: Attention,
        last: torch.Tensor | None,
    ) -> torch.Tensor:
        """Final hidden states, after the norm, of the tokens ``last``.

        Args:
            token_ids: int64 [T].
            positions: int64 [T], all below ``length``.
            attention: planned for ``self.buffers(T)``.
            last: [B], indices of the tokens whose hidden state is wanted; None for all.

        Returns:
            float32 [B, hidden_size], a new tensor.
        """
        if not self.layers:
            return self._embedding_only(token_ids if last is None else token_ids[last])
        buffers = self.buffers(len(token_ids))
        x = self.embedding.index_select(0, token_ids)
        rotations = self._rotary.rows(positions, length) * self._rotation_scales
        final = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            layer.qkv.into(_normed(layer.input_norm, x, buffers), buffers.qkv_flat)
            _rotate(layer.qk_norm, rotations, buffers)
            attention.run(index)
            attended = buffers.attended_flat
            if last is not None and index == final:
                # Nothing reads the other tokens any more: their keys and values are stored.
                attended = attended.index_select(0, last)
                x = x.index_select(0, last)
                buffers = self.buffers(len(last))
            layer.output.add_to(x, attended)
            _add_mlp(layer, x, buffers)
        return self._norm.into(x, buffers.length, torch.empty_like(x, dtype=torch.float32))

    def _embedding_only(self, token_ids: torch.Tensor) -> torch.Tensor:
        """What is left of :meth:`forward` without layers."""
        x = self.embedding.index_select(0, token_ids)
        length = self.buffers(len(token_ids)).length
        return self._norm.into(x, length, torch.empty_like(x, dtype=torch.float32))


def _normed(norm: RMSNorm, x: torch.Tensor, buffers: StepBuffers) -> torch.Tensor:
    """The norm of ``x`` in the dtype of the weights."""
    normed = norm.into(x, buffers.length, buffers.normed)
    return normed if x.dtype == torch.float32 else buffers.rounded.copy_(normed)


def _rotate(norm: RMSNorm | None, rotations: torch.Tensor, buffers: StepBuffers) -> None:
    """Normalise (Qwen3) and rotate the queries and keys, in place."""
    if norm is not None:
        norm.into(buffers.heads, buffers.heads_length, buffers.heads_normed)
    elif buffers.heads.dtype != torch.float32:
        buffers.heads_normed.copy_(buffers.heads)
    if buffers.heads.dtype == torch.float32:
        torch.mul(buffers.pairs_in, rotations, out=buffers.pairs_out)
    else:
        buffers.pairs.copy_(torch.view_as_real(buffers.pairs_in.mul_(rotations)))


def _add_mlp(layer: DecoderLayer, x: torch.Tensor, buffers: StepBuffers) -> None:
    layer.gate_up.into(_normed(layer.mlp_norm, x, buffers), buffers.gate_up)
    layer.down.add_to(x, functional.silu(buffers.gate, inplace=True).mul_(buffers.up))


def _can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
