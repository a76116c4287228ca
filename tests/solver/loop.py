"""A solver that watches a simulation through a slab: workers that are none, real sums and gates."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from trserve.ipc.baton import Baton, Finish, SlotState
from trserve.ipc.layout import Layout
from trserve.ipc.slab import Slab, WorkerStatus, create_slab_file
from trserve.ipc.tally import TallyWriter
from trserve.sched.estimator import StepEvent
from trserve.sched.journeys import MarkovSource
from trserve.sched.simulator import simulate
from trserve.sched.system import System
from trserve.sched.table import ThresholdTable
from trserve.solver.solver import Solver

NS_PER_MS = 1e6


@contextmanager
def new_slab(models: int = 2, slots: int = 32) -> Iterator[Slab]:
    layout = Layout(slots=slots, row_tokens=16, workers=models)
    fd = create_slab_file(layout)
    slab = Slab(fd, layout, create=True)
    for words in slab.workers:
        words.set("status", WorkerStatus.UP)
    yield slab
    os.close(fd)


def set_live(slab: Slab, count: int) -> None:
    """``count`` requests are published and not finished."""
    for slot in range(slab.layout.slots):
        state = SlotState.LIVE if slot < count else SlotState.FREE
        slab.baton[slot] = Baton(3, 0, state, Finish.NONE, 0, 0).pack()


def write_step(slab: Slab, event: StepEvent) -> None:
    """What a worker's loop writes of one step."""
    writer = TallyWriter(slab, event.model)
    for model, moved in enumerate(event.moved):
        if model == event.model:
            writer.stayed(moved, int(event.committed[model]))
            continue
        for _ in range(moved):
            writer.left(model, int(event.committed[model]) // moved)
    writer.took(event.width, round(event.duration_ms * NS_PER_MS))


class Watched:
    """The control of a simulation: steps go through the slab, tables come from the solver.

    A table is in force once solving it has taken its time on this machine's processor.

    Attributes:
        tokens: [(milliseconds, committed)], of every step.
        tables: [(milliseconds, table)], from when on each is in force.
        cost_s: processor seconds of the solver.
    """

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.solver = Solver(slab)
        self.now_ms = 0.0
        self._base_ms = 0.0
        self._look_at_ms = 0.0
        self._pending: ThresholdTable | None = None
        self.tokens: list[tuple[float, float]] = []
        self.tables = [(0.0, ThresholdTable.eager(slab.layout.workers))]
        self.cost_s = 0.0

    def run(self, system: System, live: int, seconds: float) -> None:
        """So many requests that move as ``system`` says, for so long, from now on."""
        self._base_ms, table = self.now_ms, self.tables[-1][1]
        set_live(self.slab, live)
        source = MarkovSource(system, seed=1)
        simulate(system, live, table, source, seconds=seconds, control=self)
        self.now_ms = self._base_ms + seconds * 1e3

    def step(self, now_ms: float, live: int, event: StepEvent) -> ThresholdTable | None:
        self.now_ms = self._base_ms + now_ms
        write_step(self.slab, event)
        self.tokens.append((self.now_ms, sum(event.committed)))
        if self.now_ms < self._look_at_ms:
            return None
        ready, self._pending = self._pending, None
        if ready is not None:
            self.tables.append((self.now_ms, ready))
        self._look()
        return ready

    def _look(self) -> None:
        began = time.thread_time()
        rows = self.solver.look(self.now_ms / 1e3)
        took_ms = (time.thread_time() - began) * 1e3
        self.cost_s += took_ms / 1e3
        if rows is not None:
            self._pending = ThresholdTable.from_rows(self.slab.layout.workers, rows)
        self._look_at_ms = self.now_ms + took_ms + self.solver.wait_s * 1e3

    def rate(self, begin_s: float, end_s: float) -> float:
        """Tokens per second in between."""
        span = [tokens for at, tokens in self.tokens if begin_s * 1e3 <= at < end_s * 1e3]
        return sum(span) / (end_s - begin_s)

    def row(self, at_s: float, live: int) -> tuple[int, ...]:
        """The thresholds in force then for ``live`` requests."""
        return [table for at, table in self.tables if at <= at_s * 1e3][-1].row(live)
