"""Requests of one worker that may take only so long. Knows no slab and no step.

Most requests have no time limit, and cost nothing here. One that is written elsewhere when its
time is over is ended by whoever writes it.
"""

from __future__ import annotations

import time
from collections.abc import Container

from trserve.workers.request import Request


class Deadlines:
    """Resident requests that have a deadline."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        """Watch ``request``, if it has one."""
        if request.params.deadline_ns:
            self._requests[request.slot] = request

    def forget(self, slot: int) -> None:
        """The request of ``slot`` is over."""
        self._requests.pop(slot, None)

    def late(self, runnable: Container[int]) -> list[Request]:
        """Those whose slot is ``runnable`` and whose time is over."""
        if not self._requests:
            return []
        now = time.monotonic_ns()
        return [
            request
            for slot, request in self._requests.items()
            if request.params.deadline_ns <= now and slot in runnable
        ]
