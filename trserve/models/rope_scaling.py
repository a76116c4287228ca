"""How a model stretches its rotary frequencies to contexts longer than it was pretrained on.

Knows what configurations say about it, in the spelling of either transformers age; the arithmetic
is in ``rope``. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trserve.errors import ModelUnavailableError


@dataclass(frozen=True)
class LinearScaling:
    """Every frequency divided by ``factor``: position interpolation (Chen et al., 2023)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """The rule of Llama 3.1 and later.

    Wavelengths above ``original_max_position_embeddings / low_freq_factor`` are stretched by
    ``factor``, those below ``original_max_position_embeddings / high_freq_factor`` are kept, and
    the ones between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., 2023), as the long contexts of Qwen2.5 and Qwen3 use it.

    Pairs that turn more than ``beta_fast`` times within the original context are kept, those that
    turn less than ``beta_slow`` times are stretched by ``factor``, with a linear ramp over the
    pairs between; ``truncate`` widens the ramp to whole pairs. Queries and keys are both
    multiplied by ``attention_factor``.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class FrequencyDivisors:
    """One divisor for each pair's frequency: a rule that was worked out when a file was written."""

    divisors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyDivisors

SUPPORTED_TYPES = ("default", "linear", "llama3", "yarn")


def rope_from_config(config: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary embedding.

    What stands in ``rope_scaling`` wins over ``rope_parameters``, as in transformers: it is what
    people add to a checkpoint, by its model card, for longer contexts.

    Raises:
        ModelUnavailableError: the scaling is none of :data:`SUPPORTED_TYPES` or no object, or only
            a part of each head is rotated.
        KeyError: a number is missing that the scaling needs.
    """
    saved = _object("rope_parameters", config, source)
    rope = _object("rope_scaling", config, source) or saved
    bases = (each.get("rope_theta") for each in (rope, config, saved))
    theta = float(next(filter(None, bases), 10_000.0))
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if float(share) != 1.0:
        raise ModelUnavailableError(
            f"{source} rotates only a part of each head (partial_rotary_factor {share}), which is "
            "not supported"
        )
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    return theta, _scaling(kind, rope, config, source)


def _object(key: str, config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    found = config.get(key) or {}
    if not isinstance(found, Mapping):
        raise ModelUnavailableError(f"{source}: {key} is {found!r}, and must be an object")
    return found


def _scaling(
    kind: str, rope: Mapping[str, Any], config: Mapping[str, Any], source: str
) -> RopeScaling | None:
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(float(rope["factor"]))
    if kind == "llama3":
        return Llama3Scaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=int(original),
        )
    if kind == "yarn":
        return _yarn(rope, int(original), int(config["max_position_embeddings"]))
    raise ModelUnavailableError(
        f"{source} asks for the rotary scaling {kind!r}, which is not supported; supported are "
        f"{', '.join(SUPPORTED_TYPES)}"
    )


def _yarn(rope: Mapping[str, Any], original: int, longest: int) -> YarnScaling:
    factor = float(rope.get("factor") or longest / original)
    attention = rope.get("attention_factor")
    if attention is None:
        attention = _attention_factor(factor, rope.get("mscale"), rope.get("mscale_all_dim"))
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=float(attention),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
    )


def _attention_factor(factor: float, scale: float | None, scale_all: float | None) -> float:
    """``0.1 ln(factor) + 1`` (YaRN, section 3.4); a ratio of two where both scales are given."""
    if scale and scale_all:
        return yarn_temperature(factor, scale) / yarn_temperature(factor, scale_all)
    return yarn_temperature(factor)


def yarn_temperature(factor: float, scale: float = 1.0) -> float:
    """By what YaRN multiplies queries and keys where nothing else is said."""
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def longest_position(scaling: RopeScaling | None, stated: int) -> int:
    """Positions that a model has, given what its configuration states.

    Configurations that ask for YaRN usually still state the length before the scaling.
    """
    if isinstance(scaling, YarnScaling):
        return max(stated, round(scaling.factor * scaling.original_max_position_embeddings))
    return stated
