"""What NCCL carries of one connection: ids of frames, where it is free; everything else as before.

Nothing waits for it: a frame that finds it busy, or not up, goes whole. Frames of other sessions
pass one whose ids are under way; those of its own session are held until it is whole. A transfer
that fails takes the connection with it, because a frame was lost: ``failure`` says so, whoever
dialled dials again, and both go on from what was acknowledged. Knows no sockets and no slots.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from trserve.edge import frames, nccl_frames
from trserve.edge.nccl_directions import Receiving, Sending
from trserve.edge.nccl_frames import Parted
from trserve.edge.nccl_side import NcclSide
from trserve.edge.wire import FrameError, FrameType

log = logging.getLogger(__name__)
MAX_HELD: Final = 256
"""Frames of one session that wait for one whose ids are under way."""

OVERDUE: Final = 2
"""Timeouts of a message after which an announced one is given up, though nobody aborted it."""

CLOSE_S: Final = 1.0
KINDS: Final = (FrameType.NCCL_OFFER, FrameType.NCCL_GRANT, FrameType.NCCL_PARTED)

Send = Callable[[bytes], bool]


class Exchange:
    """Of one connection; made by :meth:`open`.

    Args:
        name: what to call the other side.

    Attributes:
        failure: why the connection must end; empty while it need not.
    """

    def __init__(self, side: NcclSide, buffers: tuple[int, int], name: str) -> None:
        self.failure = ""
        self._side = side
        self._name = name
        self._sending = Sending(side, buffers[0])
        self._receiving = Receiving(side, buffers[1])
        self._number = self._announced = 0
        self._sessions: list[int | None] = []  # whose ids are awaited, and those that come next
        self._held: list[bytes | Parted] = []
        self._overdue_at = 0.0
        self._said = ""
        self._passing = False

    @classmethod
    def open(cls, side: NcclSide, name: str) -> Exchange | None:
        """One for a connection; None if too many are there, or have not ended yet."""
        buffers = side.take_buffers()
        return None if buffers is None else cls(side, buffers, name)

    @property
    def is_up(self) -> bool:
        """Whether ids can go both ways."""
        return self._sending.is_up and self._receiving.is_up

    @property
    def sent(self) -> int:
        """Frames whose ids went."""
        return self._sending.sent

    @property
    def received(self) -> int:
        """Frames whose ids came."""
        return self._receiving.received

    @property
    def has_to_say(self) -> bool:
        """Whether :meth:`collect` could not send something for want of room."""
        return bool(self._receiving.to_say)

    def begin(self) -> None:
        """Offer a communicator; the other side's offer makes it begin, too."""
        if not self._receiving.has_begun:
            self._receiving.begin()

    def send(self, frame: bytes, send: Send) -> bool:
        """Send ``frame``, without its ids if they can go by NCCL; False if it cannot be sent."""
        sending = self._sending
        if not sending.is_up or sending.is_busy or self.failure:
            return send(frame)
        parts = nccl_frames.part(self._number + 1, frame)
        if parts is None:
            return send(frame)
        if not send(parts[0]):
            return False
        self._number += 1
        sending.send(self._number, parts[1])
        return True

    def takes(self, kind: FrameType, frame: bytes) -> bool:
        """Whether ``frame`` is for this, or must wait here. FrameError for one that is none."""
        if self._passing:
            return False
        if kind is FrameType.NCCL_OFFER:
            self._sending.join(nccl_frames.decode_offer(frame))
            self.begin()
        elif kind is FrameType.NCCL_GRANT:
            self._sending.grant(frames.decode_number(frame))
        elif kind is FrameType.NCCL_PARTED:
            self._announce(frame)
        else:
            session = nccl_frames.session_of(frame)
            if session is None or session not in self._sessions:
                return False
            self._hold(frame)
        return True

    def _announce(self, frame: bytes) -> None:
        parted = nccl_frames.decode_parted(frame)
        if not self._receiving.has_begun:
            raise FrameError("ids are announced before any can be received")
        if parted.number != self._announced + 1 or len(self._sessions) > 1:
            raise FrameError(f"message {parted.number} is announced after {self._announced}")
        self._announced = parted.number
        if self._sessions:  # the last one's end is known to the other side already
            self._hold(parted)
        else:
            self._expect(parted)
        self._sessions.append(nccl_frames.session_of(parted.rest))

    def _expect(self, parted: Parted) -> None:
        self._overdue_at = time.monotonic() + OVERDUE * self._side.timeout_s
        self._receiving.expect(parted)

    def _hold(self, frame: bytes | Parted) -> None:
        if len(self._held) >= MAX_HELD:
            self.failure = f"{MAX_HELD} frames wait for one whose ids do not come"
        else:
            self._held.append(frame)

    def _release(self) -> list[bytes]:
        """Of those that are held, all that wait for nothing any more."""
        held, self._held = self._held, []
        self._sessions.pop(0)
        found: list[bytes] = []
        expected = False
        for frame in held:
            if isinstance(frame, Parted):
                self._expect(frame)
                expected = True
            elif expected and nccl_frames.session_of(frame) in self._sessions:
                self._held.append(frame)
            else:
                found.append(frame)
        return found

    def collect(self, send: Send, handle: Callable[[bytes], None]) -> None:
        """``handle`` the frame that became whole, and those that waited for it, in their order.

        Also sends what the threads have to say, and finds out whether they failed.
        """
        to_say = self._receiving.to_say
        while to_say and send(to_say[0]):
            to_say.popleft()
        receiving_is_over = self._receiving.is_over  # before what it left is taken
        found = self._receiving.take()
        if found is not None:
            self._passing = True
            for frame in (found, *self._release()):
                handle(frame)
            self._passing = False
        if receiving_is_over:
            self._ended(self._receiving.failure, lost=bool(self._sessions))
        if self._sessions and time.monotonic() > self._overdue_at:
            # An abort that blocks within the library holds up the watchdog, but not this.
            self._ended("an announced message is overdue", lost=True)
        if self._sending.is_over:
            self._ended(self._sending.failure, lost=self._sending.is_busy)
        if self.is_up and not self._said:
            self._said = "up"
            log.info("%s: ids of tokens travel by %s, not encrypted", self._name, self._side.name)

    def _ended(self, why: str, *, lost: bool) -> None:
        if lost and not self.failure:
            self.failure = f"{self._side.name}: {why or 'a direction ended'}"
        elif why and self._said != "down":
            self._said = "down"
            log.warning(
                "%s: %s cannot be used on this connection (%s); ids travel by tcp",
                *(self._name, self._side.name, why),
            )

    def close(self, wait_s: float = 0.0) -> None:
        """The connection is over: its threads end by themselves, soon; ``wait_s`` bounds a wait."""
        directions = (self._sending, self._receiving)
        for direction in directions:
            direction.close()
        for direction in directions:
            if wait_s:
                direction.wait(wait_s / len(directions))
