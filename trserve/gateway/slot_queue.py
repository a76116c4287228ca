"""Who waits for a slot: first come first served, bounded, and not beyond its time.

Back-pressure exists once, here: requests beyond the slots wait in one queue, and beyond that are
refused. Knows how much room is free, and nothing of requests but how much each wants.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final, NamedTuple

from trserve.errors import RequestError
from trserve.gateway.answer import TIMED_OUT
from trserve.gateway.slots import SlotTable

MAX_WAITING: Final = 1024
_RETRY_AFTER_S: Final = 1


class Room(NamedTuple):
    """What somebody takes: slots, and annotation pages if they are waited for as well."""

    slots: int
    pages: int = 0


class SlotQueue:
    """The queue of a server's slots. ``len()``: how many requests wait.

    Args:
        max_waiting: how many may.
    """

    def __init__(self, slots: SlotTable, max_waiting: int) -> None:
        self._slots = slots
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[asyncio.Future[None], Room]] = deque()
        self._granted = Room(0)
        self._closed: RequestError | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    async def turn(self, room: Room, deadline_ns: int) -> None:
        """Return when ``room`` is free for the caller, who takes it before it awaits again.

        ``deadline_ns``: when to give up (``time.monotonic_ns``), 0 for never; what has a slot is
        ended by its worker.

        Raises:
            RequestError: 429, too many wait; 504, the deadline is over; or what :meth:`close` said.
            asyncio.CancelledError: the caller gave up.
        """
        if self._closed is not None:
            raise self._closed
        if not self._waiting and self._is_free(room):
            return
        seconds = (deadline_ns - time.monotonic_ns()) / 1e9 if deadline_ns else None
        try:
            async with asyncio.timeout(seconds):
                await self._wait(room)
        except TimeoutError:
            raise RequestError(
                "trserve.timeout_s was over before the server had room for the request; allow "
                "more time, or try again later",
                status=504,
                param="trserve.timeout_s",
                code=TIMED_OUT,
            ) from None

    def _is_free(self, room: Room) -> bool:
        """Whether as much is free, and granted to nobody."""
        slots, granted = self._slots, self._granted
        return (
            slots.num_free - granted.slots >= room.slots
            and slots.num_free_pages - granted.pages >= room.pages
        )

    def _grant(self, room: Room, sign: int = 1) -> None:
        slots, pages = self._granted
        self._granted = Room(slots + sign * room.slots, pages + sign * room.pages)

    async def _wait(self, room: Room) -> None:
        if len(self._waiting) >= self._max_waiting:
            raise RequestError(
                f"{len(self._waiting)} requests are waiting already; try again later",
                status=429,
                code="queue_full",
                retry_after=_RETRY_AFTER_S,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, room))
        try:
            await turn
        except asyncio.CancelledError:
            if (turn, room) in self._waiting:
                self._waiting.remove((turn, room))
            elif turn.done() and not turn.cancelled() and turn.exception() is None:
                self._grant(room, -1)
            # Whoever stands behind may need less than the one that left.
            self.admit()
            raise
        self._grant(room, -1)

    def admit(self) -> None:
        """Grant what is free and not granted yet to those who wait longest."""
        while self._waiting:
            turn, room = self._waiting[0]
            if turn.done():
                self._waiting.popleft()
            elif self._is_free(room):
                self._waiting.popleft()
                turn.set_result(None)
                self._grant(room)
            else:
                return

    def close(self, error: RequestError) -> None:
        """Nobody gets a slot any more: whoever waits, or comes, gets ``error``."""
        self._closed = error
        for turn, _ in tuple(self._waiting):
            if not turn.done():
                turn.set_exception(error)
        self._waiting.clear()
