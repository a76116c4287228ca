"""The decoder of Qwen3 (dense or of experts), Qwen2 and Llama: one class, driven by the spec.

Knows weights and arithmetic; nothing of files, of batches' geometry (``attention`` has that) or of
requests. Weights arrive fused (queries, keys and values; gate and up) and with interleaved rotary
pairs (``rope``); norms and softmax are computed in float32 whatever the weights are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from trserve.models.buffers import BufferPool, StepBuffers
from trserve.models.layers import Linear, RMSNorm
from trserve.models.mlp import DenseMlp, SparseMlp
from trserve.models.quantized import Int8Linear
from trserve.models.rope import RotaryTable
from trserve.models.spec import ModelSpec

_COPY_TIED_BELOW = 256 << 20
"""Bytes up to which a tied head gets a copy in the faster layout; larger ones stay shared."""


class Attention(Protocol):
    """What a decoder needs of attention: see :class:`trserve.models.attention.PagedAttention`."""

    def run(self, layer: int) -> None:
        """Attend in ``layer``, from and to the buffers of the step."""


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
    mlp: DenseMlp | SparseMlp


class Decoder:
    """A decoder-only transformer on one device.

    Args:
        absent: ids that stand for no token of this model.

    Attributes:
        native: whether its weights are laid out for the compiled kernels.
        keeps_tap: whether :meth:`forward` keeps in ``tap``, float32 [B, hidden_size], what the last
            layer's MLP read: the hidden state after attention, normalised.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        embedding: torch.Tensor,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        head: torch.Tensor,
        native: bool = False,
        int8: bool = False,
        absent: Sequence[int] = (),
    ) -> None:
        self.spec = spec
        self._absent = list(absent)
        self.native = native
        self.keeps_tap = False
        self.tap: torch.Tensor | None = None
        self.dtype = embedding.dtype
        self.embedding = embedding
        self.layers = layers
        self.rotary = RotaryTable(spec, embedding.device)
        # Queries are divided by sqrt(head_dim) where they are rotated, in float32.
        group = spec.num_heads // spec.num_kv_heads
        scales = torch.ones(group + 1, 1, device=embedding.device)
        scales[:group] = spec.head_dim**-0.5
        self._rotation_scales = scales
        self.norm = norm
        # A head of its own is let go once it is quantized.
        self._head: torch.Tensor | Int8Linear = Int8Linear(head) if int8 else head
        self._buffers = BufferPool(spec, self.dtype, embedding.device)

    def lm_head(self, tokenizer_size: int) -> Linear:
        """The output projection; columns from ``tokenizer_size`` on come out at minus infinity.

        They are rows of padding in the checkpoint, without tokens. So do columns of ids that stand
        for no token of this model. A bias of minus infinity costs
        nothing, where filling the columns afterwards would cost two operations a step.
        """
        bias = None
        if tokenizer_size < self.spec.vocab_size or self._absent:
            bias = self.embedding.new_zeros(self.spec.vocab_size)
            bias[tokenizer_size:] = -torch.inf
            bias[self._absent] = -torch.inf
        if isinstance(self._head, Int8Linear):
            return self._head.with_bias(bias)
        tied = self._head.data_ptr() == self.embedding.data_ptr()
        share = tied and self._head.nbytes > _COPY_TIED_BELOW
        return Linear(self._head, bias, share=share, native=self.native)

    def buffers(self, tokens: int) -> StepBuffers:
        """The buffers of a step of ``tokens`` tokens; every call shares the same memory."""
        return self._buffers.of(tokens)

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
        rotations = self.rotary.rows(positions, length) * self._rotation_scales
        final = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            layer.qkv.into(buffers.norm_of(layer.input_norm, x), buffers.qkv_flat)
            _rotate(layer.qk_norm, rotations, buffers)
            attention.run(index)
            attended = buffers.attended_flat
            if last is not None and index == final:
                # Nothing reads the other tokens any more: their keys and values are stored.
                attended = attended.index_select(0, last)
                x = x.index_select(0, last)
                buffers = self.buffers(len(last))
            layer.output.add_to(x, attended)
            if self.keeps_tap and index == final:
                self.tap = layer.mlp.norm.exact(x)
            layer.mlp.add_to(x, buffers)
        return self.norm.into(x, buffers.length, torch.empty_like(x, dtype=torch.float32))

    def _embedding_only(self, token_ids: torch.Tensor) -> torch.Tensor:
        """What is left of :meth:`forward` without layers."""
        x = self.embedding.index_select(0, token_ids)
        length = self.buffers(len(token_ids)).length
        return self.norm.into(x, length, torch.empty_like(x, dtype=torch.float32))


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
