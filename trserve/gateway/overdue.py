"""Answers that should have ended and have not: what reminds the gateway to cut them itself.

Whoever holds the baton ends an answer whose time is over, or that somebody aborted, at a step's
boundary. Its process may be starting instead, for minutes, or be at a long step. Knows no slab.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from trserve.gateway.generation import Generation

GRACE_S: Final = 1.0
"""For the holder to end it."""


class Overdue:
    """One timer for each answer that has a time to end at.

    Args:
        cut: what ends an answer that still has not.
    """

    def __init__(self, cut: Callable[[Generation], None]) -> None:
        self._cut = cut
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def from_then(self, generation: Generation, when_ns: int) -> None:
        """It should end at ``when_ns`` (``time.monotonic_ns``), whatever was said before."""
        self.forget(generation)
        seconds = GRACE_S + max(0, when_ns - time.monotonic_ns()) / 1e9
        loop = asyncio.get_running_loop()
        self._timers[generation.slot.index] = loop.call_later(seconds, self._cut, generation)

    def forget(self, generation: Generation) -> None:
        """It has ended."""
        timer = self._timers.pop(generation.slot.index, None)
        if timer is not None:
            timer.cancel()
