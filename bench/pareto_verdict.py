"""What the settings say together: what a share of tokens buys, with token- and query-level routing.

Between two thresholds of one router the accuracy is interpolated over the share of LLM tokens; a
share that no threshold reaches is not judged. Knows rows alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from bench.common import Row

SHARES: Final = (0.04, 0.05, 0.1, 0.2, 0.3, 0.5)
QUERY_LEVEL: Final = "query-level"
_ALONE: Final = ("slm-alone", "llm-alone")


def accuracy_at(share: float, rows: Sequence[Row]) -> float | None:
    """Of one router's ``rows``, interpolated; None outside of the shares they have.

    Beyond the largest share a token-level router can only replace more tokens by the LLM's, but
    that is not measured, so it is not claimed.
    """
    points = sorted((float(row["llm_share"]), float(row["accuracy"])) for row in rows)
    if not points or not points[0][0] <= share <= points[-1][0]:
        return None
    shares, accuracies = np.array(points).T
    return float(np.interp(share, shares, accuracies))


def verdict(rows: Sequence[Row], problems: int) -> list[Row]:
    """One row a share: the best token-level router beside the query-level one.

    ``lead`` is the difference in standard errors of a difference between two accuracies.
    """
    slm, llm = (next(r for r in rows if r["router"] == name) for name in _ALONE)
    gap = llm["accuracy"] - slm["accuracy"]
    names = sorted({row["router"] for row in rows} - {*_ALONE, QUERY_LEVEL})
    query = [row for row in rows if row["router"] == QUERY_LEVEL]
    found: list[Row] = []
    for share in SHARES:
        reached = {
            name: accuracy
            for name in names
            if (accuracy := accuracy_at(share, [slm, *(r for r in rows if r["router"] == name)]))
            is not None
        }
        if not reached:
            continue
        best = max(reached, key=lambda name: reached[name])
        beside = accuracy_at(share, query)
        found.append(
            {
                "llm_share": share,
                "best": best,
                "accuracy": reached[best],
                "gap_recovered": (reached[best] - slm["accuracy"]) / gap if gap else None,
                "query_level": beside,
                "lead": None if beside is None else _lead(reached[best], beside, problems),
            }
        )
    return found


def _lead(ours: float, theirs: float, problems: int) -> float:
    variance = (ours * (1 - ours) + theirs * (1 - theirs)) / problems
    return (ours - theirs) / math.sqrt(max(variance, 1.0 / problems**2))
