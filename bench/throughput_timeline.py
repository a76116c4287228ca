"""Steps of a running server, from its trace: who computed when, and with how many requests.

``bench.throughput --timeline`` draws them for one system after the other, at one number of users.
Knows the trace's document and nothing of how it came to be.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson
import uvloop

from bench.closed_loop import Until
from bench.common import Row, track
from bench.endpoint import NotAvailableError
from bench.prediction import missing_row, warmed
from bench.systems import Endpoint, Setup, Vector, running
from bench.workloads import Workload
from trserve.trace.command import trace

WARM_UP_S: Final = 8.0
"""Until thresholds that follow the load have found it."""

_WORKER: Final = "worker "


class Step(NamedTuple):
    """One step: milliseconds from the trace's begin, and how many requests it took."""

    begin_ms: float
    length_ms: float
    batch: int


def steps_of(document: dict[str, Any]) -> list[list[Step]]:
    """Each model's steps in a trace's document, oldest first."""
    entries = document["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    found: list[list[Step]] = [[] for name in names.values() if name.startswith(_WORKER)]
    for each in entries:
        if each.get("cat") == "step":
            worker = int(names[each["tid"]].removeprefix(_WORKER))
            step = Step(each["ts"] / 1e3, each["dur"] / 1e3, each["args"]["batch"])
            found[worker].append(step)
    return found


def traced(pid: int, seconds: float) -> list[list[Step]]:
    """What the server whose launcher is ``pid`` computes in the next ``seconds``."""
    with tempfile.TemporaryDirectory(prefix="trs-bench-") as folder:
        file = Path(folder) / "trace.json"
        trace(file, seconds=seconds, pid=pid, port=None)
        return steps_of(orjson.loads(file.read_bytes()))


def timelines(
    setup: Setup,
    workload: Workload,
    systems: Sequence[tuple[str, Vector | None]],
    count: int,
    seconds: float,
) -> list[Row]:
    """A row for each system and model; ``steps`` has [begin, length, batch] of each step."""
    rows = []
    for system, vector in track(systems, "systems"):
        try:
            with running(system, setup, vector) as up:
                assert isinstance(up, Endpoint), f"{system} is no single server"
                steps = uvloop.run(_while_serving(up, setup, workload, count, seconds))
        except NotAvailableError as error:
            rows.append(missing_row(system, setup, workload, str(error)))
            continue
        rows += [
            _row(system, setup, workload, (count, seconds), model, found)
            for model, found in zip(setup.models, steps, strict=True)
        ]
    return rows


async def _while_serving(
    up: Endpoint, setup: Setup, workload: Workload, count: int, seconds: float
) -> list[list[Step]]:
    until = warmed(Until(warm_up_s=WARM_UP_S), setup, workload, count)
    least = Until(least_s=seconds + 1.0, most_s=seconds + 1.0, warm_up_s=until.warm_up_s)
    async with asyncio.TaskGroup() as group:
        group.create_task(up.measure(count, workload, least))
        await asyncio.sleep(until.warm_up_s)
        return await asyncio.to_thread(traced, up.address.pid, seconds)


def _row(
    system: str,
    setup: Setup,
    workload: Workload,
    shape: tuple[int, float],
    model: str,
    steps: Sequence[Step],
) -> Row:
    count, seconds = shape
    return {
        "algorithm": setup.algorithm.shown,
        "workload": workload.name,
        "system": system,
        "concurrency": count,
        "model": model,
        "num_steps": len(steps),
        "mean_batch": statistics.fmean(s.batch for s in steps) if steps else None,
        "busy_share": sum(s.length_ms for s in steps) / (1e3 * seconds),
        "steps": [list(step) for step in steps],
    }


def shown(row: Row) -> Row:
    """A row without its steps."""
    return {key: value for key, value in row.items() if key != "steps"}


def plot(axes: Any, rows: Sequence[Row]) -> None:
    """A lane for each system and model, a bar for each step with its batch in it."""
    lanes = [row for row in rows if "steps" in row]
    for lane, row in enumerate(lanes):
        steps = [Step(*step) for step in row["steps"]]
        models = [each["model"] for each in lanes if each["system"] == row["system"]]
        spans = [(step.begin_ms, step.length_ms) for step in steps]
        colour = f"C{models.index(row['model'])}"
        axes.broken_barh(spans, (lane - 0.4, 0.8), facecolors=colour, edgecolors="white")
        for step in steps:
            middle = step.begin_ms + step.length_ms / 2
            axes.text(middle, lane, str(step.batch), ha="center", va="center", fontsize=5)
    labels = [f"{row['system']} {row['model']}" for row in lanes]
    axes.set_yticks(range(len(lanes)), labels)
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds (in a bar: the requests of a step)")
