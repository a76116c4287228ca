"""What ``trserve plan`` does: read the flags, solve each concurrency, show the result.

Knows nothing of how the model is solved, nor of how a result looks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trserve.errors import ConfigError
from trserve.planning import inputs, quality, recorded, report
from trserve.planning.report import Arrivals, Plan, Row
from trserve.sched.diagnose import fits
from trserve.sched.search import Solution, evaluate, search
from trserve.sched.system import InvalidSystem, System
from trserve.sched.table import ThresholdTable
from trserve.sched.vectors import Vector


@dataclass(frozen=True)
class _Wanted:
    """The flags, checked."""

    system: System
    algorithm: str
    counts: list[int]
    vector: Vector | None
    budget_s: float
    trace: recorded.Trace | None
    points: list[quality.Point] | None


def plan(*, json: bool, plot: Path | None, **flags: Any) -> None:
    """Print the plan. Raises ConfigError, which names the flag that is wrong."""
    if plot is not None:
        report.check_plot()
    made = _solve(_read(**flags))
    if json:
        report.print_json(made)
    else:
        report.print_table(made)
    if plot is not None:
        report.draw(made, plot)


def _read(
    *,
    latency: str | None,
    algorithm: str | None,
    routing: str | None,
    system: Path | None,
    concurrency: str,
    batch_threshold: str | None,
    delta_ms: float | None,
    time_budget_s: float,
    trace: Path | None,
    target_quality: float | None,
    quality_table: Path | None,
) -> _Wanted:
    if (target_quality is None) != (quality_table is None):
        raise ConfigError("--target-quality and --quality-table go together; one is missing")
    if system is not None:
        others = {"latency": latency, "algorithm": algorithm, "routing": routing}
        _exclude("--system", **others, target_quality=target_quality)
    if target_quality is not None:
        _exclude("--target-quality", trace=trace, batch_threshold=batch_threshold)
    used = algorithm or "r2r"
    if system is not None:
        known = inputs.system_from_file(system, delta_ms)
    elif routing is None and trace is None and target_quality is None:
        raise ConfigError("--routing is missing: how often requests move between the models")
    else:
        known = inputs.system_from_flags(latency, used, routing, delta_ms)
    points = None
    if target_quality is not None and quality_table is not None:
        values = [] if routing is None else inputs.numbers("--routing", routing)
        points = quality.good_enough(
            quality.read_points(quality_table, used, values), target_quality
        )
    played = None if trace is None else recorded.read_trace(trace, known.tokens)
    if played is not None and routing is None and system is None:
        known = recorded.follow(known, played)
    counts = inputs.concurrencies(concurrency)
    vector = None
    if batch_threshold is not None:
        vector = inputs.fixed_vector(batch_threshold, known.models, counts)
    return _Wanted(known, used, counts, vector, time_budget_s, played, points)


def _exclude(flag: str, **others: Any) -> None:
    for name, value in others.items():
        if value is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')}: {flag} excludes it; leave one of them out"
            )


def _solve(wanted: _Wanted) -> Plan:
    try:
        rows = [_row(wanted, count) for count in wanted.counts]
    except InvalidSystem as error:
        flag = {"delta_ms": "--delta-ms"}.get(error.parameter, error.parameter)
        raise ConfigError(f"{flag}: {error.problem}") from None
    if wanted.trace is None:
        return Plan(rows, None, None)
    return Plan(rows, fits(wanted.trace.requests, wanted.system.models), _arrivals(wanted, rows))


def _row(wanted: _Wanted, count: int) -> Row:
    point = None
    if wanted.points is not None:
        point, solution = quality.fastest(
            wanted.system, wanted.algorithm, wanted.points, count, wanted.budget_s
        )
    else:
        solution = _solution(wanted, count)
    replays = None
    if wanted.trace is not None:
        replays = recorded.replay(wanted.system, count, wanted.trace, solution)
    return Row(solution, replays, point)


def _solution(wanted: _Wanted, count: int) -> Solution:
    if wanted.vector is None:
        return search(wanted.system, count, budget_s=wanted.budget_s)
    return evaluate(wanted.system, count, wanted.vector, budget_s=wanted.budget_s)


def _arrivals(wanted: _Wanted, rows: list[Row]) -> Arrivals | None:
    """The recorded arrivals, under the thresholds found and under eager execution."""
    if wanted.trace is None or wanted.trace.arrivals_ms is None:
        return None
    table = ThresholdTable(
        wanted.system.models, {row.solution.concurrency: row.solution.vector for row in rows}
    )
    most = max(wanted.counts)
    return Arrivals(
        len(wanted.trace.requests),
        most,
        recorded.replay_arrivals(wanted.system, most, wanted.trace, table),
        recorded.replay_arrivals(
            wanted.system, most, wanted.trace, ThresholdTable.eager(wanted.system.models)
        ),
    )
