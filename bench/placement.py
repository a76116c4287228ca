"""Which cores the two processes of a measurement run on; a wake costs differently by that.

On one core the sleeper runs as soon as the other goes to sleep. On two, the sleeper's core has
halted by then, and must be woken first, which on a virtual machine the hypervisor does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum


class Placement(StrEnum):
    """Where two processes are pinned, as rows say it."""

    ANY = "any"  # wherever the scheduler puts them
    SAME_CORE = "same-core"
    TWO_CORES = "two-cores"

    def pin(self, process: int) -> None:
        """Keep the calling process, number 0 or 1 of the two, on its core."""
        if self is not Placement.ANY:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[process if self is Placement.TWO_CORES else 0]})

    @contextmanager
    def pinned(self, process: int) -> Iterator[None]:
        """:meth:`pin` for a while."""
        before = os.sched_getaffinity(0)
        self.pin(process)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def placements() -> tuple[Placement, ...]:
    """Those that this machine has."""
    both = len(os.sched_getaffinity(0)) > 1
    return (Placement.SAME_CORE, Placement.TWO_CORES) if both else (Placement.SAME_CORE,)
