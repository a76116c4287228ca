"""The decoder's forward on a GPU: the same weights as on the CPU, by fused operations.

Takes the layers of an assembled :class:`trserve.models.decoder.Decoder` (queries, keys and values
fused and ordered by KV head, gate and up fused, rotary pairs side by side) and runs them over
buffers that a graph may have captured. Models with experts choose them on the host, so they cannot
be captured (:attr:`CudaDecoder.capturable`). Where the tensors are on the CPU, the operations'
references run, and everything else is the same.

Knows weights and arithmetic; nothing of steps, graphs, requests or files. Unproven on a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trserve.models.cuda import ops
from trserve.models.cuda.attention import AttentionBackend
from trserve.models.decoder import Decoder, DecoderLayer
from trserve.models.layers import RMSNorm
from trserve.models.mlp import DenseMlp, SparseMlp


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """What a forward reads of T tokens, integer [T] each.

    Slots are ``block * block_size + offset``; a negative one stores nothing.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


@dataclass(slots=True)
class _Norms:
    """The norms' weights of one layer, as the operations take them.

    ``tap`` is the whole norm before the last layer's MLP, wherever its factor usually goes.
    """

    input: torch.Tensor
    q: torch.Tensor | None
    k: torch.Tensor | None
    mlp: torch.Tensor
    tap: torch.Tensor


class CudaDecoder:
    """Runs the layers of ``decoder`` on the device where its tensors are.

    Args:
        max_positions: no token lies at this position or beyond.

    Attributes:
        capturable: whether :meth:`forward` may be part of a CUDA graph.
        keeps_tap: whether :meth:`forward` returns the tap as well.
    """

    def __init__(self, decoder: Decoder, *, max_positions: int) -> None:
        self.source = decoder
        self.spec = decoder.spec
        self.dtype = decoder.dtype
        self.embedding = decoder.embedding
        self.keeps_tap = False
        self.capturable = all(isinstance(each.mlp, DenseMlp) for each in decoder.layers)
        self._norms = [_norms(layer) for layer in decoder.layers]
        self._final_norm = _weight(decoder.norm)
        table = decoder.rotary.reaching(max_positions)
        self._rotations = torch.view_as_real(table)[:, 0, 0].contiguous()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    def forward(
        self,
        tokens: TokenInputs,
        caches: Sequence[torch.Tensor],
        attention: AttentionBackend,
        last: torch.Tensor | None,
        on_layer: Callable[[], None],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Store the keys and values of ``tokens``, and compute hidden states of some of them.

        Args:
            caches: of each layer, [blocks, 2, kv_heads, block_size, head_dim].
            attention: planned for the step.
            last: integer [B], the tokens whose hidden state is wanted; None for all, B = T.
            on_layer: called before each layer is launched.

        Returns:
            The hidden states after the final norm, float32 [B, hidden_size]; and, if kept, what
            the last layer's MLP read there, of the same shape.
        """
        x = self.embedding.index_select(0, tokens.ids)
        tap = None
        count, spec = len(tokens.ids), self.spec
        queries = x.new_empty(count, spec.num_heads, spec.head_dim)
        attended = torch.empty_like(queries)
        final = len(self._norms) - 1
        for index, (layer, norms) in enumerate(zip(self.source.layers, self._norms, strict=True)):
            on_layer()
            self._queries(index, x, tokens, caches[index], queries)
            attention.run(index, queries, attended)
            flat = attended.view(count, -1)
            if last is not None and index == final:
                # Nothing reads the other tokens any more: their keys and values are stored.
                flat, x = flat.index_select(0, last), x.index_select(0, last)
            layer.output.add_to(x, flat)
            if self.keeps_tap and index == final:
                tap = self._norm(x, norms.tap, torch.float32)
            self._add_mlp(layer.mlp, norms, x)
        if not self._norms and last is not None:
            x = x.index_select(0, last)
        return self._norm(x, self._final_norm, torch.float32), tap

    def _queries(
        self,
        index: int,
        x: torch.Tensor,
        tokens: TokenInputs,
        cache: torch.Tensor,
        queries: torch.Tensor,
    ) -> None:
        """Project ``x``; queries go to ``queries``, keys and values to ``cache``."""
        layer, norms, spec = self.source.layers[index], self._norms[index], self.spec
        projected = layer.qkv(self._norm(x, norms.input))
        group = spec.num_heads // spec.num_kv_heads
        ops.rope_and_store(
            projected.view(len(x), spec.num_kv_heads, group + 2, spec.head_dim),
            tokens.positions,
            tokens.slots,
            self._rotations,
            cache,
            queries,
            q_norm=norms.q,
            k_norm=norms.k,
            eps=spec.rms_norm_eps,
        )

    def _add_mlp(self, mlp: DenseMlp | SparseMlp, norms: _Norms, x: torch.Tensor) -> None:
        if isinstance(mlp, DenseMlp):
            mlp.down.add_to(x, ops.silu_mul(mlp.gate_up(self._norm(x, norms.mlp))))
        else:
            mlp.add_to(x, self.source.buffers(len(x)))

    def _norm(
        self, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        out = None if dtype is None else torch.empty_like(x, dtype=dtype)
        return ops.rms_norm(x, weight, self.spec.rms_norm_eps, out)


def _norms(layer: DecoderLayer) -> _Norms:
    heads = None if layer.qk_norm is None else _weight(layer.qk_norm)
    return _Norms(
        input=_weight(layer.input_norm),
        q=None if heads is None else heads[0].contiguous(),
        k=None if heads is None else heads[-1].contiguous(),
        mlp=_weight(layer.mlp.norm),
        tap=_scale(layer.mlp.norm),
    )


def _weight(norm: RMSNorm) -> torch.Tensor:
    """The factor that the norm itself applies; what the next projection has is taken out of it."""
    if norm.scaled:
        return _scale(norm)
    return torch.full_like(norm.scale, norm.scale.shape[-1] ** -0.5)


def _scale(norm: RMSNorm) -> torch.Tensor:
    """The checkpoint's weight; ``RMSNorm`` keeps it times the root of its size."""
    return norm.scale / math.sqrt(norm.scale.shape[-1])
