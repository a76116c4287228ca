"""Finding the threshold at which a monotone share is as wanted, in few evaluations.

The share is a step function of the threshold and costs a run over all prompts, but follows the
share of *scores* beyond the threshold closely, because that is what is handed on at least. So the
search moves along quantiles of scores, where the share is nearly a straight line, and keeps a
bracket. Knows no engine and no router.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

DIGITS: Final = 8
"""Of a threshold: what is reported is exactly what was tried. A float32 just below 1 needs them."""
MAX_EVALUATIONS: Final = 12


@dataclass(frozen=True)
class Scale:
    """Thresholds from where nothing is handed on (0) to where everything is (1).

    ``least`` and ``most`` are these two; between them thresholds follow the quantiles of
    ``scores``, sorted in that direction, or lie evenly where there are none.
    """

    least: float
    most: float
    scores: NDArray[np.float64]

    @classmethod
    def of(cls, least: float, most: float, scores: Sequence[float]) -> Scale:
        """Scores beyond the ends are left out."""
        low, high = min(least, most), max(least, most)
        kept = np.array([score for score in scores if low < score < high], np.float64)
        kept.sort()
        return cls(least, most, kept[::-1] if least > most else kept)

    def at(self, share: float) -> float:
        """The threshold beyond which this share of the scores lies, or a tie of them."""
        points = np.array([self.least, *self.scores, self.most])
        where = np.linspace(0.0, 1.0, len(points))
        return rounded(float(np.interp(share, where, points)))


@dataclass(frozen=True)
class Found:
    """The best threshold that was tried, and its share."""

    threshold: float
    share: float


def find_threshold(
    measure: Callable[[float], float], scale: Scale, target: float, tolerance: float
) -> Found:
    """The threshold whose share is nearest to ``target`` of those tried.

    Args:
        measure: the share at a threshold; monotone along ``scale``, but for noise.
        tolerance: a difference that is good enough to stop.
    """
    low, high = _End(0.0, -target), _End(1.0, 1.0 - target)
    at = target
    best = Found(math.nan, math.inf)
    tried: set[float] = set()
    for _ in range(MAX_EVALUATIONS):
        threshold = scale.at(at)
        if threshold in tried:  # a tie of scores: the middle may lie beyond it
            threshold = scale.at(at := (low.at + high.at) / 2)
        if threshold in tried:
            break
        tried.add(threshold)
        share = measure(threshold)
        if abs(share - target) < abs(best.share - target):
            best = Found(threshold, share)
        if abs(share - target) <= tolerance:
            break
        own, other = (low, high) if share < target else (high, low)
        own.move(at, share - target)
        other.stay()
        at = low.at + (high.at - low.at) * low.off / (low.off - high.off)
    return best


@dataclass
class _End:
    """An end of the bracket, and by how much the share there is off; the Illinois method's.

    An end that stays twice counts half each time, so that the line through both soon crosses on
    its side and the bracket shrinks from both.
    """

    at: float
    off: float
    _stayed: bool = False

    def move(self, at: float, off: float) -> None:
        self.at, self.off, self._stayed = at, off, False

    def stay(self) -> None:
        if self._stayed:
            self.off /= 2
        self._stayed = True


def rounded(value: float) -> float:
    """To so many significant digits as are reported."""
    return float(text(value))


def text(threshold: float) -> str:
    """As it is reported."""
    return f"{threshold:.{DIGITS}g}"
