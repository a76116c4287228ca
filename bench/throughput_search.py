"""What the solver's search takes beside a busy server, and what it takes from the server's steps.

Sixteen requests, two models, thresholds held. The step times of a while are seen by the server's
trace, then those of as long a while in which a process like the solver's (its priority, one thread)
searches all the time: the exact search of every feasible vector, the chain of one vector (eager's,
which is the largest), and the table that the solver works out after a change. As ``python -m
bench.throughput_search SECONDS`` this is that process. Knows no tables.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import uvloop

from bench.closed_loop import Until
from bench.common import Row, print_table
from bench.prediction import best, warmed
from bench.systems import Endpoint, running
from bench.throughput_pair import LONG, MODELS, Verdict, pair_at, setup_at
from bench.throughput_timeline import Step, traced
from trserve.ipc.process import thread_environment
from trserve.sched.estimator import Estimate
from trserve.sched.markov import throughput
from trserve.sched.policy import ThresholdPolicy
from trserve.sched.search import search
from trserve.solver.main import NICENESS

P: Final = 0.35
N: Final = 16
LONGEST_SEARCH_S: Final = 5.0
LONGEST_VECTOR_S: Final = 0.5
LONG_STEP: Final = 1.1
"""Of the median, from where on a step counts as long."""
MORE_LONG_STEPS: Final = 0.01
WATCHED_S: Final = 30.0
"""With the search as long as without it."""
ROUNDS: Final = 3
_DECISIONS: Final = 2000
_GRACE_S: Final = 60.0
"""For the searcher's start and the search that has begun when its time is over."""


def search_beside_serving(quick: bool) -> tuple[list[Row], list[Verdict]]:
    """Part 6; prints its tables, for no other part's rows are like them."""
    seconds = (WATCHED_S / 5 if quick else WATCHED_S) / ROUNDS
    setup, vector = setup_at(P), best(pair_at(P), N).vector
    until = warmed(Until(warm_up_s=3.0), setup, LONG, N)
    with running("delayed-fixed", setup, vector) as up:
        assert isinstance(up, Endpoint)
        without, beside, took = uvloop.run(_serve(up, until, seconds))
    searched = {name: max(values) for name, values in took.items()}
    pairs = [step_rows(*each) for each in zip(MODELS, without, beside, strict=True)]
    search_row: Row = {"concurrency": N, "nice": NICENESS, **searched}
    rows = [row for pair in pairs for row in pair]
    print_table("the longest of its parts, in seconds", [search_row])
    print_table("steps without the search, and beside it", rows)
    verdicts = [*search_verdicts(searched), *(step_verdict(*pair) for pair in pairs)]
    return [search_row, *rows], verdicts


async def _serve(
    up: Endpoint, until: Until, seconds: float
) -> tuple[list[list[Step]], list[list[Step]], dict[str, list[float]]]:
    """Both models' steps without the search and beside it, and what its parts took.

    They alternate, so that both see the same machine.
    """
    endless = Until(least_s=1e9, most_s=1e9, warm_up_s=0.0)
    load = asyncio.create_task(up.measure(N, LONG, endless))
    without: list[list[Step]] = [[] for _ in MODELS]
    beside: list[list[Step]] = [[] for _ in MODELS]
    took: dict[str, list[float]] = {}
    try:
        await asyncio.sleep(until.warm_up_s)
        for _ in range(ROUNDS):
            _extend(without, await asyncio.to_thread(traced, up.address.pid, seconds))
            steps, parts = await _beside_search(up.address.pid, seconds)
            _extend(beside, steps)
            for name, values in parts.items():
                took.setdefault(name, []).extend(values)
    finally:
        load.cancel()
        with suppress(asyncio.CancelledError):
            await load
    return without, beside, took


def _extend(known: list[list[Step]], more: list[list[Step]]) -> None:
    for steps, later in zip(known, more, strict=True):
        steps += later


async def _beside_search(
    pid: int, seconds: float
) -> tuple[list[list[Step]], dict[str, list[float]]]:
    """The steps of ``seconds`` in which a process searches, and its times."""
    searcher = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, str(seconds)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **thread_environment(1)},
    )
    assert searcher.stdout is not None
    try:
        async with asyncio.timeout(seconds + _GRACE_S):
            await searcher.stdout.readline()  # it has imported what it needs
            steps = await asyncio.to_thread(traced, pid, seconds)
            took, _ = await searcher.communicate()
    finally:
        with suppress(ProcessLookupError):
            searcher.kill()
    return steps, json.loads(took)


def step_rows(model: str, without: Sequence[Step], beside: Sequence[Step]) -> list[Row]:
    """The lengths of a model's steps without the search, and beside it."""
    usual = statistics.median(step.length_ms for step in without)
    rows = []
    for name, steps in (("without", without), ("beside", beside)):
        lengths = sorted(step.length_ms for step in steps)
        row = {
            "model": model,
            "search": name,
            "steps": len(lengths),
            "p50_ms": statistics.median(lengths),
            "p99_ms": lengths[len(lengths) * 99 // 100],
            "max_ms": lengths[-1],
            "long_share": sum(ms > LONG_STEP * usual for ms in lengths) / len(lengths),
        }
        rows.append(row)
    return rows


def search_verdicts(searched: Row) -> list[Verdict]:
    """Whether the search and one vector's chain were fast enough."""
    limits = {"search_s": LONGEST_SEARCH_S, "vector_s": LONGEST_VECTOR_S}
    return [
        Verdict(f"N={N}, beside serving: {name}", searched[name], f"at most {most:g}", ok)
        for name, most in limits.items()
        for ok in [searched[name] <= most]
    ]


def step_verdict(without: Row, beside: Row) -> Verdict:
    """Whether no more of a model's steps are long beside the search."""
    more = beside["long_share"] - without["long_share"]
    return Verdict(
        f"{beside['model']}: more steps over {LONG_STEP:g} of the median beside the search",
        more,
        f"at most {MORE_LONG_STEPS:g}",
        more <= MORE_LONG_STEPS,
    )


# -- the process that searches ---------------------------------------------------------------


def _timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _table() -> None:
    """What the solver does after a change, without its estimator."""
    known = Estimate(pair_at(P), (_DECISIONS,) * 2, float(N), 0)
    ThresholdPolicy(2, 2 * N).update(known)


def searches(seconds: float) -> dict[str, list[float]]:
    """Wall seconds of each part, over and over for ``seconds``; each at least once."""
    system = pair_at(P)
    parts: dict[str, Callable[[], object]] = {
        "search_s": lambda: search(system, N),
        "vector_s": lambda: throughput(system, N, [(1, 1)]),
        "table_s": _table,
    }
    found: dict[str, list[float]] = {name: [] for name in parts}
    until = time.monotonic() + seconds
    while time.monotonic() < until or not all(found.values()):
        for name, work in parts.items():
            found[name].append(_timed(work))
    return found


if __name__ == "__main__":
    os.nice(NICENESS)
    throughput(pair_at(P), 2, [(1, 1)])  # imports what it needs
    print(flush=True)
    print(json.dumps(searches(float(sys.argv[1]))))
