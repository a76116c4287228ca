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

from trserve.models.rope_scaling import (
    FrequencyDivisors,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)
from trserve.models.spec import ModelSpec


def inverse_frequencies(spec: ModelSpec) -> torch.Tensor:
    """Angular frequency of each pair, float32 ``[head_dim / 2]``.

    Computed in float32 throughout: the checkpoints were trained with these roundings.
    """
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    return _scaled(1.0 / (spec.rope_theta**exponents), spec.rope_scaling, spec.rope_theta)


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling | None, theta: float) -> torch.Tensor:
    match scaling:
        case None:
            return frequencies
        case LinearScaling():
            return frequencies / scaling.factor
        case Llama3Scaling():
            return _llama3(frequencies, scaling)
        case YarnScaling():
            return _yarn(frequencies, scaling, theta)
        case FrequencyDivisors():
            return frequencies / torch.tensor(scaling.divisors)


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """See :class:`Llama3Scaling`; the blend is linear in the frequency."""
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    kept = (context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return _blend(frequencies, scaling.factor, kept.clamp(0.0, 1.0))


def _yarn(frequencies: torch.Tensor, scaling: YarnScaling, theta: float) -> torch.Tensor:
    """See :class:`YarnScaling`; pair ``p`` turns ``context / (2 pi theta^(p / pairs))`` times."""
    pairs = len(frequencies)

    def pair_turning(turns: float) -> float:
        context = scaling.original_max_position_embeddings
        return pairs * math.log(context / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The reference bounds a pair's index by that of the last dimension, not of the last pair.
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    ramp = (torch.arange(pairs, dtype=torch.float32) - first) / ((last - first) or 0.001)
    return _blend(frequencies, scaling.factor, 1.0 - ramp.clamp(0.0, 1.0))


def _blend(frequencies: torch.Tensor, factor: float, kept: torch.Tensor) -> torch.Tensor:
    return kept * frequencies + (1.0 - kept) * frequencies / factor


def interleave(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Put the members ``i`` and ``i + head_dim / 2`` of each head side by side.

    Args:
        rows: ``[heads * head_dim, ...]``: a projection's weight or bias, or a head's norm weight.
    """
    heads = rows.shape[0] // head_dim
    halves = rows.reshape(heads, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def deinterleave(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The inverse of :func:`interleave`."""
    heads = rows.shape[0] // head_dim
    pairs = rows.reshape(heads, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


class RotaryTable:
    """``exp(i * position * frequency)`` for the positions seen so far, complex64.

    With YaRN the entries have the length of its attention factor instead of one.
    """

    __slots__ = ("_frequencies", "_length", "_table")

    def __init__(self, spec: ModelSpec, device: torch.device | None = None) -> None:
        self._frequencies = inverse_frequencies(spec).to(device)
        yarn = spec.rope_scaling
        self._length = yarn.attention_factor if isinstance(yarn, YarnScaling) else 1.0
        self._table = self._rotations(256)

    def rows(self, positions: torch.Tensor, length: int) -> torch.Tensor:
        """Rotations of ``positions`` (int64 [T], below ``length``), ``[T, 1, 1, head_dim / 2]``."""
        return self.reaching(length).index_select(0, positions)

    def reaching(self, length: int) -> torch.Tensor:
        """Rotations of all positions up to ``length``, or further, ``[L, 1, 1, head_dim / 2]``.

        The table grows in powers of two, so a long context pays for itself only when it comes.
        """
        if length > len(self._table):
            self._table = self._rotations(1 << (length - 1).bit_length())
        return self._table

    def _rotations(self, length: int) -> torch.Tensor:
        positions = torch.arange(length, dtype=torch.float32, device=self._frequencies.device)
        angles = torch.outer(positions, self._frequencies)
        return torch.polar(torch.full_like(angles, self._length), angles)[:, None, None]
