"""``--target-quality``: the router's threshold and B together, from a table of measured quality.

Knows nothing of routers; a row says how often requests move at a threshold, and how good the
answers are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trserve.errors import ConfigError
from trserve.planning.inputs import read_json
from trserve.sched.algorithms import behaviour, probability_of_share
from trserve.sched.search import Solution, search
from trserve.sched.system import InvalidSystem, System


@dataclass(frozen=True)
class Point:
    """One threshold of a router: its routing probabilities, and the quality measured there."""

    threshold: float
    routing: list[float]
    quality: float


def read_points(path: Path, algorithm: str, routing: list[float]) -> list[Point]:
    """The rows of ``bench.pareto`` JSON that belong to ``algorithm``.

    A row has ``parameter`` (the threshold; rows without one are single models, and skipped),
    ``accuracy`` or ``quality``, and ``p`` (a number, or for r-stitch [p, q]) or ``llm_share``.
    ``routing``: ``--routing``, whose q completes an ``llm_share`` for r-stitch.
    """
    told = read_json(path, "--quality-table")
    rows = told.get("results") if isinstance(told, dict) else told
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f'--quality-table {path}: {{"results": [rows]}} is expected')
    routed = [row for row in rows if row.get("parameter") is not None]
    mine = [row for row in routed if row.get("router", algorithm) == algorithm]
    if not mine:
        there = ", ".join(sorted({str(row.get("router")) for row in routed})) or "none"
        raise ConfigError(
            f"--quality-table {path}: no threshold of {algorithm} in it (routers: {there}); "
            "name one of them with --algorithm"
        )
    return [_point(row, algorithm, routing, path) for row in mine]


def _point(row: dict[str, Any], algorithm: str, routing: list[float], path: Path) -> Point:
    quality: Any = row.get("accuracy", row.get("quality"))
    numbers = (row["parameter"], quality, row.get("llm_share", 0))
    if not all(isinstance(value, int | float) for value in numbers):
        raise ConfigError(
            f"--quality-table {path}: parameter, accuracy and llm_share are numbers in every row"
        )
    try:
        if "p" in row:
            values = row["p"] if isinstance(row["p"], list) else [row["p"]]
        elif "llm_share" in row:
            values = probability_of_share(algorithm, row["llm_share"], routing)
        else:
            raise ConfigError(f"--quality-table {path}: a row needs p or llm_share")
        behaviour(algorithm, values)
    except InvalidSystem as error:
        raise ConfigError(f"--{error.parameter}: {error.problem}") from None
    except TypeError:
        raise ConfigError(f"--quality-table {path}: p is a number or a list of them") from None
    return Point(float(row["parameter"]), values, float(quality))


def good_enough(points: list[Point], target: float) -> list[Point]:
    """Those of at least the target; ConfigError with the best there is if none is."""
    found = [point for point in points if point.quality >= target]
    if not found:
        best = max(points, key=lambda point: point.quality)
        raise ConfigError(
            f"--target-quality {target:g}: no threshold in the table reaches it; the best is "
            f"{best.quality:g}, at {best.threshold:g}"
        )
    return found


def fastest(
    system: System, algorithm: str, points: list[Point], concurrency: int, budget_s: float
) -> tuple[Point, Solution]:
    """The point, with its B*, that yields the most tokens; each gets a share of the budget."""
    solved = []
    for point in points:
        routing, tokens = behaviour(algorithm, point.routing)
        there = replace(system, routing=routing, tokens=tokens)
        solved.append((point, search(there, concurrency, budget_s=budget_s / len(points))))
    return max(solved, key=lambda pair: pair[1].tokens_per_s)
