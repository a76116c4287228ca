"""Which requests may have ended a worker: noted before a step, tried alone after a death.

A worker lists the slots of its batch in the slab while a step runs. The launcher reads the list of
a worker that ended, and marks who was on it; the successor, before anything else, runs each of
these by itself until it is one token further, so that one that ends workers ends the next one alone
and is found out. Knows the slab's words and who may run; nothing of what a step does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trserve.ipc.fence import store_fence
from trserve.ipc.slab import Slab
from trserve.workers.request import Request


class StepGuard:
    """The list of worker ``index``, and the suspects among its requests."""

    def __init__(self, slab: Slab, index: int) -> None:
        self._suspect = slab.suspect
        self._slots = slab.in_step[index][1:]
        self._count = memoryview(slab.in_step[index]).cast("B").cast("q")
        self._list: Sequence[int] = ()
        self._suspects: list[tuple[Request, int]] = []

    def enter(self, slots: Sequence[int]) -> None:
        """A step with ``slots`` begins."""
        if slots != self._list:
            self._list = slots
            if len(slots) == 1:  # of a slice, it takes eight times as long
                self._slots[0] = slots[0]
            else:
                self._slots[: len(slots)] = slots
        self.enter_again()

    def enter_again(self) -> None:
        """A step with the slots of the one before begins."""
        store_fence()
        self._count[0] = len(self._list)

    def leave(self) -> None:
        """The step is over, and this process still runs."""
        self._count[0] = 0

    def look(self, runnable: Mapping[int, Request]) -> None:
        """Find the suspects among ``runnable``: at the start, and when a worker has ended.

        There is no other time at which a request becomes one.
        """
        suspect = self._suspect
        self._suspects = [(r, r.length) for r in runnable.values() if suspect[r.slot] == r.gen]

    def next_suspect(self, runnable: Mapping[int, Request]) -> list[Request]:
        """One that has to run alone, or nobody."""
        while self._suspects:
            request, length = self._suspects[-1]
            if runnable.get(request.slot) is request and request.length == length:
                return [request]
            self._suspects.pop()  # it came further, or went away, and nobody died
        return []
