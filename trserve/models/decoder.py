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


class Attention(Protocol):
    """What a decoder needs of attention: see :class:`trserve.models.attention.PagedAttention`."""

    def run(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Attention output [T, heads * head_dim] of ``layer`` for the rotated ``qkv``."""


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
        """[T, in] to [T, out]."""
        if self._packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return out
        if self._bias is None:
            return torch.mm(x, self._weight)
        return torch.addmm(self._bias, x, self._weight)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``residual + self(x)``; ``residual`` may be overwritten."""
        if self._packed or self._bias is not None:
            return residual.add_(self(x))
        return residual.addmm_(x, self._weight)


class RMSNorm:
    """Root mean square norm (Zhang and Sennrich, 2019) in float32.

    ``x / sqrt(mean(x^2) + eps) * w`` equals ``x / hypot(|x|, sqrt(n * eps)) * (w * sqrt(n))``,
    which is half the operations.
    """

    __slots__ = ("_floor", "_weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self._weight = weight.float() * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * eps), device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The norm over the last dimension, in float32."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / torch.hypot(length, self._floor)).mul_(self._weight)


@dataclass(slots=True)
class DecoderLayer:
    """The weights of one layer; ``qk_norm`` covers query and key heads, [heads + kv_heads, dim]."""

    input_norm: RMSNorm
    qkv: Linear
    qk_norm: RMSNorm | None
    output: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


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
        self.rotary = RotaryTable(spec, embedding.device)
        self.layers = layers
        self._embedding = embedding
        self._norm = norm
        self._head = head
        self._rotated_heads = spec.num_heads + spec.num_kv_heads

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and of the residual stream."""
        return self._embedding.dtype

    @property
    def embedding(self) -> torch.Tensor:
        """Input embeddings, [vocab_size, hidden_size] (learned routers read them)."""
        return self._embedding

    def lm_head(self, tokenizer_size: int) -> Linear:
        """The output projection; columns from ``tokenizer_size`` on come out at minus infinity.

        They are rows of padding in the checkpoint, without tokens. A bias of minus infinity costs
        nothing, where filling the columns afterwards would cost two operations a step.
        """
        bias = None
        if tokenizer_size < self.spec.vocab_size:
            bias = self._head.new_zeros(self.spec.vocab_size)
            bias[tokenizer_size:] = -torch.inf
        tied = self._head.data_ptr() == self._embedding.data_ptr()
        return Linear(self._head, bias, share=tied and self._head.nbytes > _COPY_TIED_BELOW)

    def forward(
        self,
        token_ids: torch.Tensor,
        rotations: torch.Tensor,
        attention: Attention,
        last: torch.Tensor | None,
    ) -> torch.Tensor:
        """Final hidden states, after the norm, of the tokens ``last``.

        Args:
            token_ids: int64 [T].
            rotations: complex64 [T, 1, head_dim / 2], from :attr:`rotary`.
            last: [B], indices of the tokens whose hidden state is wanted; None for all.

        Returns:
            float32 [B, hidden_size].
        """
        if last is not None and not self.layers:
            token_ids = token_ids.index_select(0, last)
        x = self._embedding.index_select(0, token_ids)
        final = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(layer.input_norm(x).to(x.dtype))
            self._rotate(layer, qkv, rotations)
            attended = attention.run(index, qkv)
            if last is not None and index == final:
                # Nothing reads the other tokens any more: their keys and values are stored.
                attended = attended.index_select(0, last)
                x = x.index_select(0, last)
            x = layer.output.add_to(x, attended)
            x = _mlp(layer, x)
        return self._norm(x)

    def _rotate(self, layer: DecoderLayer, qkv: torch.Tensor, rotations: torch.Tensor) -> None:
        """Normalise (Qwen3) and rotate the queries and keys of ``qkv``, in place."""
        pairs = qkv.view(len(qkv), -1, self.spec.head_dim // 2, 2)[:, : self._rotated_heads]
        source = pairs
        if layer.qk_norm is not None:
            source = layer.qk_norm(pairs.flatten(-2)).view(pairs.shape)
        if qkv.dtype == torch.float32:
            turned = torch.view_as_complex(source)
            torch.mul(turned, rotations, out=torch.view_as_complex(pairs))
        else:
            pairs.copy_(torch.view_as_real(torch.view_as_complex(source.float()) * rotations))


def _mlp(layer: DecoderLayer, x: torch.Tensor) -> torch.Tensor:
    gate, up = layer.gate_up(layer.mlp_norm(x).to(x.dtype)).chunk(2, -1)
    return layer.down.add_to(x, functional.silu(gate).mul_(up))


def _can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
