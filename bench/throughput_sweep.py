"""``bench.throughput --sweep``: several batch thresholds of one N, beside the predicted curve T(B).

Measured values stand beside T(B) at the realised probabilities, and count on the curve, which is
drawn at the asked ones, by how much of that they reached. Needs a profile: the step latencies
have to be known. Measures one server a vector.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, Final

import uvloop

from bench.closed_loop import Until
from bench.common import Row, track
from bench.prediction import best, latencies, row_of, system_at, warmed
from bench.systems import Setup, Vector, running
from bench.workloads import Workload
from trserve.sched.markov import throughput
from trserve.sched.vectors import is_feasible

DEFAULT_N: Final = 4


def sweep(
    setup: Setup, workload: Workload, count: int, asked: Sequence[str], until: Until
) -> list[Row]:
    """A row for every vector of the curve; ``tokens_per_s`` where it was ``asked`` for.

    The curve has the last model's thresholds with the others at 1, the vectors asked for and the
    predicted best; nothing asked for means all of them. Exits where no curve can be drawn.
    """
    curves = latencies(setup, setup.algorithm.values)
    if curves is None or not setup.algorithm.values:
        sys.exit("--sweep needs known latencies and probabilities: --device emulated --routing ...")
    system = system_at(setup.algorithm.name, setup.algorithm.values, curves)
    given = [_vector(text, system.models, count) for text in asked]
    star = best(system, count).vector
    ones = (1,) * (system.models - 1)
    vectors = sorted({*((*ones, b) for b in range(1, count + 1)), *given, star})
    expected = throughput(system, count, vectors)
    rows = []
    for vector, value in track([*zip(vectors, expected, strict=True)], "thresholds"):
        row: Row = {
            "system": "delayed-fixed",
            "concurrency": count,
            "batch_threshold": list(vector),
        }
        if not given or vector in given:
            row = _measured(setup, workload, count, vector, until)
            row["at_p_tokens_per_s"] = value * row["ratio"]
            print(f"B={_text(vector)}: done", file=sys.stderr)
        rows.append(row | {"curve_tokens_per_s": value, "is_predicted_best": vector == star})
    return rows


def _measured(setup: Setup, workload: Workload, count: int, vector: Vector, until: Until) -> Row:
    with running("delayed-fixed", setup, vector) as up:
        window = uvloop.run(up.measure(count, workload, warmed(until, setup, workload, count)))
    row = row_of("delayed-fixed", setup, workload, window, vector)
    return row | {"ratio": row["tokens_per_s"] / row["predicted_tokens_per_s"]}


def _vector(text: str, models: int, count: int) -> Vector:
    """Exits where it is none for so many models and requests."""
    try:
        vector = tuple(int(part) for part in text.split(","))
    except ValueError:
        sys.exit(f"--sweep {text}: write vectors as 1,1 1,3")
    if len(vector) != models or not is_feasible(vector, count):
        sys.exit(f"--sweep {text}: not feasible for {models} models and {count} requests")
    return vector


def _text(vector: Sequence[int]) -> str:
    return ",".join(map(str, vector))


def shown(row: Row) -> Row:
    """A row as the printed table has it."""
    columns = {
        "concurrency": "N",
        "batch_threshold": "B",
        "tokens_per_s": "tok/s",
        "predicted_tokens_per_s": "pred.",
        "ratio": "ratio",
        "p": "p",
        "at_p_tokens_per_s": "at asked p",
        "curve_tokens_per_s": "curve",
        "is_predicted_best": "best",
        "relative_error": "error",
        "seconds": "s",
    }
    return {name: row.get(key) for key, name in columns.items()}


def plot(axes: Any, rows: Sequence[Row]) -> None:
    """The predicted curve, and what was measured with its standard error."""
    places = range(len(rows))
    curve = [row["curve_tokens_per_s"] for row in rows]
    axes.plot(places, curve, "-", color="grey", label="predicted, at the asked p")
    measured = [(place, row) for place, row in enumerate(rows) if "at_p_tokens_per_s" in row]
    values = [row["at_p_tokens_per_s"] for _, row in measured]
    # Too short a window has no finite error, and gets no bar.
    shares = [row["relative_error"] for _, row in measured]
    errors = [v * e if math.isfinite(e) else 0.0 for v, e in zip(values, shares, strict=True)]
    axes.errorbar([place for place, _ in measured], values, errors, fmt="o", label="measured")
    axes.set_xticks(places, [_text(row["batch_threshold"]) for row in rows])
    axes.set(xlabel=f"batch thresholds (N = {rows[0]['concurrency']})", ylabel="tokens/s")
    axes.legend()
