"""Which gate a worker has. Knows the plan and the kinds of gates; not how any of them decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trserve.ipc.slab import Slab
from trserve.plan import ServerPlan
from trserve.sched.table import ThresholdTable
from trserve.workers.gating import WorkerGate
from trserve.workers.lockstep import LockstepGate
from trserve.workers.tracing import WorkerTrace


class Gate(Protocol):
    """What a worker's loop asks before its steps and tells after them.

    Attributes:
        draining: nothing new will come, so nothing is worth waiting for.
    """

    draining: bool

    def use(self, thresholds: ThresholdTable) -> None:
        """Put ``thresholds`` in force."""

    def wait_s(self, buffered: int, now_ns: int) -> float:
        """How long the ``buffered`` requests (1 or more) may wait for others; 0: start now."""

    def goes_on(self, rows: int) -> None:
        """A step begins that needs no opening, over ``rows`` requests."""

    def rest(self, buffered: int) -> None:
        """No step runs here, and ``buffered`` requests may run."""

    def note_step(self, nanoseconds: int) -> None:
        """A step without prompts took so long."""


def create_gate(
    plan: ServerPlan, slab: Slab, index: int, bells: Sequence[int], trace: WorkerTrace | None
) -> Gate:
    """The gate of worker ``index``; ``bells`` are those of all workers, in order."""
    if plan.schedule != "delayed":
        return LockstepGate(slab, index, bells, steps=plan.schedule == "step-sync", trace=trace)
    return WorkerGate(
        slab,
        index,
        bells,
        thresholds=plan.thresholds,
        max_rows=plan.max_rows,
        max_wait_s=plan.max_wait_s,
        trace=trace,
    )
