"""Rotary position embedding (Su et al., 2021) as one complex multiplication.

Knows frequencies and positions; nothing of heads, weights or caches.

Published checkpoints rotate the pairs ``(i, i + head_dim / 2)``. Attention sees queries and keys
only through their inner product, so the rows of both projections may be permuted alike: loading
puts the two members of a pair side by side (:func:`interleave`), and a rotation becomes the
product of a complex view with ``exp(i * position * frequency)``, one operation instead of three.
"""

from __future__ import annotations

import math

import torch

from trserve.models.spec import ModelSpec, RopeScaling


def inverse_frequencies(spec: ModelSpec) -> torch.Tensor:
    """Angular frequency of each pair, float32 ``[head_dim / 2]``.

    Computed in float32 throughout: the checkpoints were trained with these roundings.
    """
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    frequencies = 1.0 / (spec.rope_theta**exponents)
    return frequencies if spec.rope_scaling is None else _llama3(frequencies, spec.rope_scaling)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """The Llama 3.1 rule: see :class:`RopeScaling`; the blend is linear in the frequency."""
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    kept = (context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def interleave(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Put the members ``i`` and ``i + head_dim / 2`` of each head side by side.

    Args:
        rows: ``[heads * head_dim, ...]``: a projection's weight or bias, or a head's norm weight.
    """
    heads = rows.shape[0] // head_dim
    halves = rows.reshape(heads, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


class RotaryTable:
    """``exp(i * position * frequency)`` for the positions seen so far, complex64."""

    __slots__ = ("_frequencies", "_table")

    def __init__(self, spec: ModelSpec, device: torch.device | None = None) -> None:
        self._frequencies = inverse_frequencies(spec).to(device)
        self._table = self._rotations(256)

    def rows(self, positions: torch.Tensor, length: int) -> torch.Tensor:
        """Rotations of ``positions`` (int64 [T], below ``length``), ``[T, 1, 1, head_dim / 2]``.

        The table grows in powers of two, so a long context pays for itself only when it comes.
        """
        if length > len(self._table):
            self._table = self._rotations(1 << (length - 1).bit_length())
        return self._table.index_select(0, positions)

    def _rotations(self, length: int) -> torch.Tensor:
        positions = torch.arange(length, dtype=torch.float32, device=self._frequencies.device)
        angles = torch.outer(positions, self._frequencies)
        return torch.polar(torch.ones_like(angles), angles)[:, None, None]
