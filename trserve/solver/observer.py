"""What happened between two looks at the slab, as the estimator takes it.

Knows the workers' sums and the batons' states; nothing of clocks, estimates or thresholds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from trserve.ipc.slab import Slab, WorkerStatus, count_live
from trserve.ipc.tally import Tally, read_tally
from trserve.sched.estimator import StepEvent

_SETTLED: Final = (WorkerStatus.UP, WorkerStatus.LOST)
_TRIES: Final = 4
_NS_PER_MS: Final = 1e6


class Look(NamedTuple):
    """One look.

    Attributes:
        live: N, the requests that are published and not finished.
        tokens: how many were committed since the last look.
        moved: whether any worker did anything since.
        complete: whether all workers are up, but for those that are lost.
        events: their steps since: where requests went, and how long steps took by width.
    """

    live: int
    tokens: int
    moved: bool
    complete: bool
    events: list[StepEvent]


class Observer:
    """Looks at the slab; the first look says what happened since it was made."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._workers = range(slab.layout.workers)
        self._sums = [_read(slab, worker) for worker in self._workers]

    def look(self) -> Look:
        """What is, and what happened since the last call. O(slots)."""
        slab = self._slab
        events: list[StepEvent] = []
        tokens = 0
        for worker in self._workers:
            now = _read(slab, worker)
            since, self._sums[worker] = now - self._sums[worker], now
            if _went_on(since):
                events += _events(worker, since)
                tokens += int(since.committed.sum())
        return Look(
            live=count_live(slab.baton_vector),
            tokens=tokens,
            moved=bool(events),
            complete=all(words.get("status") in _SETTLED for words in slab.workers),
            events=events,
        )


def _read(slab: Slab, worker: int) -> Tally:
    """The sums of one worker, not in the midst of a step's: the same twice in a row."""
    sums = read_tally(slab, worker)
    for _ in range(_TRIES):
        before, sums = sums, read_tally(slab, worker)
        if _same(before, sums):
            break
    return sums


def _same(one: Tally, other: Tally) -> bool:
    return all(np.array_equal(vars(one)[name], words) for name, words in vars(other).items())


def _went_on(since: Tally) -> bool:
    """Sums only grow; what shrank is nobody's report."""
    return all((words >= 0).all() for words in vars(since).values())


def _events(worker: int, since: Tally) -> Iterator[StepEvent]:
    if since.moved.any():
        yield StepEvent(worker, 0.0, 0, since.moved.tolist(), since.committed.tolist())
    nothing = (0,) * len(since.moved)
    for width in np.flatnonzero(since.steps).tolist():
        steps = int(since.steps[width])
        mean_ms = int(since.nanoseconds[width]) / steps / _NS_PER_MS
        yield StepEvent(worker, mean_ms, width, nothing, nothing, steps=steps)
