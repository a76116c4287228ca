"""Vectors of batch thresholds, one number for each model. Knows nothing of what they yield.

Apart, because who only looks a threshold up needs no solver, and no time to import one.
"""

from __future__ import annotations

from collections.abc import Sequence

Vector = tuple[int, ...]
"""One batch threshold for each model."""


def is_feasible(vector: Sequence[int], concurrency: int) -> bool:
    """Whether some model can start whichever way ``concurrency`` requests are spread."""
    return min(vector) >= 1 and sum(vector) - len(vector) <= concurrency - 1
