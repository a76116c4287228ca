"""How a plan looks: JSON, a table, a plot. Knows nothing of flags, files or how it was made."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import orjson

from trserve.errors import ConfigError
from trserve.planning.quality import Point
from trserve.planning.recorded import Replays
from trserve.sched.diagnose import Fit
from trserve.sched.search import EXACT, SIMULATION, Solution
from trserve.sched.simulator import Outcome


@dataclass(frozen=True)
class Row:
    """One concurrency; ``replays`` with a trace, ``point`` with a target quality."""

    solution: Solution
    replays: Replays | None
    point: Point | None


@dataclass(frozen=True)
class Arrivals:
    """The trace at its recorded arrival times, with at most ``most`` of ``requests`` live."""

    requests: int
    most: int
    planned: Outcome
    eager: Outcome


@dataclass(frozen=True)
class Plan:
    """All rows; ``fits`` and ``arrivals`` with a trace that has them."""

    rows: list[Row]
    fits: list[Fit] | None
    arrivals: Arrivals | None


def print_json(plan: Plan) -> None:
    told: dict[str, Any] = {"results": [_json_row(row) for row in plan.rows]}
    if plan.fits is not None:
        fits = [asdict(fit) | {"findings": fit.findings()} for fit in plan.fits]
        told["trace"] = {"fit": fits, "arrivals": _json_arrivals(plan.arrivals)}
    click.echo(orjson.dumps(told, option=orjson.OPT_INDENT_2))


def _json_row(row: Row) -> dict[str, Any]:
    solution = row.solution
    told: dict[str, Any] = {
        "concurrency": solution.concurrency,
        "batch_threshold": list(solution.vector),
        "tokens_per_s": solution.tokens_per_s,
        "eager_tokens_per_s": solution.eager_tokens_per_s,
        "gain": solution.gain,
        "method": solution.method,
        "standard_error_tokens_per_s": solution.standard_error,
    }
    if row.point is not None:
        told |= {
            "router_threshold": row.point.threshold,
            "routing": row.point.routing,
            "quality": row.point.quality,
        }
    if row.replays is not None:
        told["replay"] = [
            {
                "batch_threshold": list(vector),
                "tokens_per_s": outcome.tokens_per_s,
                "low": outcome.low,
                "high": outcome.high,
                "predicted_tokens_per_s": solution.values.get(vector),
                "model_error": _error(solution, vector, outcome),
            }
            for vector, outcome in row.replays.by_vector.items()
        ]
        told["best_replayed_batch_threshold"] = list(row.replays.best)
    return told


def _error(solution: Solution, vector: tuple[int, ...], outcome: Outcome) -> float | None:
    """How much more the model promises than the replay gave, as a share of that."""
    if vector not in solution.values or not outcome.tokens_per_s:
        return None
    return solution.values[vector] / outcome.tokens_per_s - 1


def _json_arrivals(arrivals: Arrivals | None) -> dict[str, Any] | None:
    if arrivals is None:
        return None
    return {
        "requests": arrivals.requests,
        "concurrency": arrivals.most,
        **{
            name: {
                "tokens_per_s": outcome.tokens_per_s,
                "latency_ms": outcome.latency_ms,
                "mean_live": outcome.mean_live,
            }
            for name, outcome in (("planned", arrivals.planned), ("eager", arrivals.eager))
        },
    }


def print_table(plan: Plan) -> None:
    """Tables and sentences on standard output."""
    from rich.console import Console

    console = Console(highlight=False)
    names = ["N", "B", "tokens/s", "eager", "gain", "method"]
    if plan.rows[0].point is not None:
        names += ["router at", "quality"]
    console.print(_table(names, [_cells(row) for row in plan.rows]))
    if any(row.replays for row in plan.rows):
        names = ["N", "B", "", "model", "replayed", "model off by"]
        console.print(_table(names, [cells for row in plan.rows for cells in _replayed(row)]))
    for line in _notes(plan):
        console.print(line, soft_wrap=True)


def _table(names: list[str], rows: list[list[str]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for name in names:
        table.add_column(name, justify="right")
    for cells in rows:
        table.add_row(*cells)
    return table


def _vector(vector: tuple[int, ...]) -> str:
    return ",".join(map(str, vector))


def _cells(row: Row) -> list[str]:
    solution = row.solution
    cells = [
        str(solution.concurrency),
        _vector(solution.vector),
        f"{solution.tokens_per_s:.2f}",
        f"{solution.eager_tokens_per_s:.2f}",
        f"{solution.gain:+.1%}",
        solution.method,
    ]
    if row.point is not None:
        cells += [f"{row.point.threshold:g}", f"{row.point.quality:.3f}"]
    return cells


def _replayed(row: Row) -> list[list[str]]:
    """The planned vector, eager execution, and whatever did best in the replay."""
    if row.replays is None:
        return []
    solution, played = row.solution, row.replays.by_vector
    eager = (1,) * len(solution.vector)
    roles = {solution.vector: ["planned"]}
    roles.setdefault(eager, []).append("eager")
    roles.setdefault(row.replays.best, []).append("best")
    return [
        [
            str(solution.concurrency),
            _vector(vector),
            ", ".join(names),
            f"{solution.values[vector]:.2f}" if vector in solution.values else "-",
            f"{played[vector].tokens_per_s:.2f} ± {played[vector].half_width:.2f}",
            _percent(_error(solution, vector, played[vector])),
        ]
        for vector, names in roles.items()
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:+.1%}"


def _notes(plan: Plan) -> list[str]:
    lines = []
    methods = {row.solution.method for row in plan.rows} - {EXACT}
    if methods:
        lines.append(
            f"{' and '.join(sorted(methods))}: the exact search did not fit --time-budget-s"
            + ("; simulated values carry an error" if SIMULATION in methods else "")
        )
    for fit in plan.fits or []:
        head = f"model {fit.model}: {fit.visits} visits of {fit.mean_steps:.2f} steps"
        found = fit.findings()
        lines += [f"{head}; {finding}" for finding in found] or [f"{head}, as the model assumes"]
    if plan.arrivals is not None:
        lines += _arrival_notes(plan.arrivals)
    return lines


def _arrival_notes(arrivals: Arrivals) -> list[str]:
    lines = []
    for name, outcome in (("planned B", arrivals.planned), ("eager", arrivals.eager)):
        latency = "-" if outcome.latency_ms is None else f"{outcome.latency_ms:.0f} ms"
        lines.append(
            f"{arrivals.requests} requests as they came, at most {arrivals.most} live, {name}: "
            f"{outcome.tokens_per_s:.1f} tokens/s, {outcome.mean_live:.1f} live, {latency} each"
        )
    return lines


def check_plot() -> None:
    """Raise ConfigError unless a plot can be drawn: better now than after the solving."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'trserve[plot]'")


def draw(plan: Plan, path: Path) -> None:
    """Throughput over N, and of every B that was evaluated over the sum of its entries."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(10, 4.5))
    left, right = figure.subplots(1, 2)
    counts = [row.solution.concurrency for row in plan.rows]
    left.plot(counts, [row.solution.tokens_per_s for row in plan.rows], "o-", label="planned B")
    left.plot(counts, [row.solution.eager_tokens_per_s for row in plan.rows], "s--", label="eager")
    for row in plan.rows:
        point = (row.solution.concurrency, row.solution.tokens_per_s)
        left.annotate(_vector(row.solution.vector), point)
        right.plot(*_sweep(row.solution), ".-", label=f"N = {row.solution.concurrency}")
    left.set(xlabel="requests in flight", ylabel="tokens/s")
    right.set(xlabel="sum of B", ylabel="best tokens/s at that sum, eager = 1")
    for axes in (left, right):
        axes.legend()
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from None


def _sweep(solution: Solution) -> tuple[list[int], list[float]]:
    best: dict[int, float] = {}
    for vector, value in solution.values.items():
        total = sum(vector)
        best[total] = max(best.get(total, 0.0), value / solution.eager_tokens_per_s)
    totals = sorted(best)
    return totals, [best[total] for total in totals]
