"""What a threshold does: the share of tokens that it routes, and how many of the right ones.

Scores are on the router's own scale, and a row is *routed* where the router would route it. The
share is that of the held-out rows, prefixes of the large model's answers; while serving it may be
a little larger, after the small model's mistakes. Knows no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

SHARES: Final = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.05, 0.07, 0.1)
LARGE_SHARES: Final = (0.2, 0.3, 0.5, 0.7)
GRID: Final = 100


class Point(NamedTuple):
    """One threshold; shares from 0 to 1."""

    threshold: float
    llm_share: float
    precision: float
    recall: float
    false_positive_rate: float


class Held:
    """Scores and labels of the held-out rows.

    Args:
        scores: float32 [N].
        differs: [N], 1 where the small model's token is to be replaced.
        above: whether a router routes at and above its threshold (else below it).
    """

    def __init__(self, scores: torch.Tensor, differs: torch.Tensor, *, above: bool) -> None:
        self._scores, self._differs, self._above = scores, differs.bool(), above

    def at(self, threshold: float) -> Point:
        """What ``threshold`` does."""
        routed = self._scores >= threshold if self._above else self._scores < threshold
        hits = int((routed & self._differs).sum())
        count, positive, total = int(routed.sum()), int(self._differs.sum()), len(routed)
        return Point(
            threshold,
            count / total,
            hits / count if count else 1.0,
            hits / positive if positive else 1.0,
            (count - hits) / max(1, total - positive),
        )

    def curve(self, shares: Sequence[float] = (*SHARES, *LARGE_SHARES)) -> list[Point]:
        """Thresholds that route about these shares, in their order."""
        falling = self._scores.sort(descending=self._above).values
        cuts = [falling[min(len(falling) - 1, round(share * len(falling)))] for share in shares]
        return [self.at(float(cut)) for cut in cuts]

    def for_recall(self, recall: float) -> Point:
        """Of ``GRID`` thresholds from 0.01 to 0.99, the fewest false alarms at that recall.

        Where no threshold of the grid recalls as much, the one that recalls most.
        """
        grid = torch.linspace(0.01, 0.99, GRID, dtype=torch.float64).tolist()
        points = [self.at(threshold) for threshold in grid]
        enough = [point for point in points if point.recall >= recall]
        if enough:
            return min(enough, key=lambda p: (p.false_positive_rate, -p.threshold))
        return max(points, key=lambda p: (p.recall, -p.false_positive_rate))

    def by_youden(self) -> Point:
        """Of thresholds that route 1 to 99 %, the one with the largest recall less false alarms.

        Cuts between scores instead of a grid: what the marginal likelihood trains is near 1.
        """
        points = self.curve([percent / GRID for percent in range(1, GRID)])
        return max(points, key=lambda p: p.recall - p.false_positive_rate)

    def average_precision(self) -> float:
        """Mean of the precision at every routed positive; 1 is a perfect order."""
        order = self._scores.argsort(descending=self._above, stable=True)
        hits = self._differs[order].double()
        if not bool(hits.any()):
            return 1.0
        precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
        return float((precision * hits).sum() / hits.sum())
