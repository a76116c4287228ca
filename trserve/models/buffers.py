"""Where a forward leaves its intermediate results: one memory for all steps and all layers.

Knows shapes only. Everything that can be sliced or reshaped is, once per number of tokens: in a
small model a view costs as much as the arithmetic.
"""

from __future__ import annotations

import torch

from trserve.models.layers import RMSNorm
from trserve.models.spec import ModelSpec

_KEPT_VIEWS = 64
"""Steps of up to so many tokens keep their views: steps of decodes, that is."""


class StepBuffers:
    """The buffers of a forward over T tokens.

    ``qkv`` is [T, kv_heads, group + 2, head_dim] and ``attended``
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

    def norm_of(self, norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
        """The norm of ``x`` in the dtype of the weights; overwritten by the next one."""
        normed = norm.into(x, self.length, self.normed)
        return normed if x.dtype == torch.float32 else self.rounded.copy_(normed)


def _pairs(heads: torch.Tensor) -> torch.Tensor:
    return heads.view(*heads.shape[:-1], -1, 2)


class _Storage:
    """Memory of :class:`StepBuffers` for up to ``capacity`` tokens."""

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, capacity: int, device: torch.device | None
    ) -> None:
        def buffer(width: int, dtype: torch.dtype = torch.float32, more: int = 0) -> torch.Tensor:
            return torch.empty(capacity + more, width, dtype=dtype, device=device)

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
        self.attended = buffer(spec.q_size, dtype, more=1)
        self.gate_up = buffer(2 * spec.intermediate_size, dtype)


class BufferPool:
    """Buffers for steps of any number of tokens, all in the same memory."""

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        self._spec, self._dtype, self._device = spec, dtype, device
        self._storage = _Storage(spec, dtype, _KEPT_VIEWS, device)
        self._views: dict[int, StepBuffers] = {}

    def of(self, tokens: int) -> StepBuffers:
        """The buffers of a step of ``tokens`` tokens."""
        if tokens > self._storage.capacity:
            capacity = 1 << (tokens - 1).bit_length()
            self._storage = _Storage(self._spec, self._dtype, capacity, self._device)
            self._views.clear()
        buffers = self._views.get(tokens)
        if buffers is None:
            buffers = StepBuffers(self._spec, self._storage, tokens)
            if tokens <= _KEPT_VIEWS:
                self._views[tokens] = buffers
        return buffers
