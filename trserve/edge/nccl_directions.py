"""The two directions of one connection by NCCL: a communicator each, and a thread that uses it.

Each has a thread of its own, for joining blocks and cannot be given up, and two directions in one
thread would wait for each other's. Header first: a message is announced over the connection; its
receive is posted, and only then granted; the send is begun when the grant is there. So no kernel
waits for a message that nobody announced, and at most one operation is under way on a communicator.
Nothing is taken from a transfer that was aborted. The thread of the connection never waits here.
Knows frames only as bytes to be sent.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Final

from trserve.edge import frames, nccl_frames
from trserve.edge.nccl_frames import Parted
from trserve.edge.nccl_side import NcclSide
from trserve.edge.wire import FrameError, FrameType
from trserve.ipc.device.communicator import MESSAGE_BYTES, Guarded

log = logging.getLogger(__name__)
_BELT_S: Final = 1.0
_WARM_UP: Final = bytes(MESSAGE_BYTES)


class TransferError(Exception):
    """A message did not arrive; says why."""


class _Direction(ABC):
    """A thread that joins a communicator, warms it up and then works when it is woken.

    Attributes:
        is_up: whether messages can be moved.
        is_over: whether they never can again; ``failure`` says why, empty if it was closed.
    """

    def __init__(self, side: NcclSide, buffer: int) -> None:
        self.is_up = self.is_over = False
        self.failure = ""
        self._side = side
        self._buffer = buffer
        self._closed = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def has_begun(self) -> bool:
        """Whether there is a thread."""
        return self._thread is not None

    def close(self) -> None:
        """End it soon: what is under way is aborted by the watchdog, never by the caller."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        if self._thread is None:
            self._side.give_back(self._buffer)

    def wait(self, timeout_s: float) -> None:
        """Until the thread has ended, or has had its time."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="nccl-hosts", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            guarded = self._connect()
            try:
                self._serve(guarded)
            finally:
                self.is_up = False
                guarded.abort()
        except Exception as error:  # also KeyError: CuPy knows not all of NCCL's codes
            if not self._closed:
                self.failure = str(error) or type(error).__name__
        self.is_over = True
        self._side.give_back(self._buffer)
        self._side.tell()

    def _serve(self, guarded: Guarded) -> None:
        if not guarded.run(lambda: self._warm_up(guarded)):
            raise TransferError(f"the first message took longer than {self._side.timeout_s:g} s")
        self.is_up = True
        self._side.tell()
        while not self._closed:
            self._wake.wait(_BELT_S)
            self._wake.clear()
            self._work(guarded)

    def _is_open(self) -> bool:
        return not self._closed

    @abstractmethod
    def _connect(self) -> Guarded:
        """Join, which may take as long as the other side does."""

    @abstractmethod
    def _warm_up(self, guarded: Guarded) -> None:
        """The first message takes most of a second: one for nothing."""

    @abstractmethod
    def _work(self, guarded: Guarded) -> None:
        """Move what there is to move. TransferError if it did not arrive."""


class Sending(_Direction):
    """Rank 0 of what the other side receives by.

    Attributes:
        sent: messages that went.
    """

    def __init__(self, side: NcclSide, buffer: int) -> None:
        super().__init__(side, buffer)
        self.sent = 0
        self._unique_id = b""
        self._number = 0
        self._message: bytes | None = None
        self._granted = threading.Event()

    @property
    def is_busy(self) -> bool:
        """Whether a message is under way."""
        return self._message is not None

    def join(self, unique_id: bytes) -> None:
        """Begin. FrameError if it has begun."""
        if self.has_begun:
            raise FrameError("a second communicator for one connection")
        self._unique_id = unique_id
        self._begin()

    def send(self, number: int, message: bytes) -> None:
        """Send it once it is granted; only where it :attr:`is_up` and not busy."""
        self._granted.clear()
        self._number, self._message = number, message
        self._wake.set()

    def grant(self, number: int) -> None:
        """Its receive is posted. FrameError for what was not announced."""
        if self._message is None or number != self._number:
            raise FrameError(f"message {number}, which was not announced, may be sent")
        self._granted.set()

    def close(self) -> None:
        """See the base."""
        super().close()
        self._granted.set()

    def _connect(self) -> Guarded:
        return self._side.join(self._unique_id, 0, self._buffer, self._is_open)

    def _warm_up(self, guarded: Guarded) -> None:
        guarded.communicator.send(_WARM_UP)

    def _work(self, guarded: Guarded) -> None:
        message = self._message
        if message is None or self._closed:
            return
        if not self._granted.wait(self._side.timeout_s):
            raise TransferError(
                f"message {self._number} was not received within {self._side.timeout_s:g} s"
            )
        if not self._is_open():  # it was woken by that, not by a grant
            return
        if not guarded.run(lambda: guarded.communicator.send(message)):
            raise TransferError(f"sending message {self._number} was aborted")
        self.sent += 1
        self._message = None


class Receiving(_Direction):
    """Rank 1; makes the communicator.

    Attributes:
        to_say: frames for the other side, which the thread of the connection sends in this order.
        received: messages that came whole.
    """

    def __init__(self, side: NcclSide, buffer: int) -> None:
        super().__init__(side, buffer)
        self.to_say: deque[bytes] = deque()
        self.received = 0
        self._expected: Parted | None = None
        self._whole: bytes | None = None

    def begin(self) -> None:
        """Make a communicator and offer it."""
        self._begin()

    def expect(self, parted: Parted) -> None:
        """Receive its ids; only one at a time."""
        self._expected = parted
        self._wake.set()

    def take(self) -> bytes | None:
        """The frame that was expected, if it is whole."""
        found = self._whole
        if found is not None:  # else the thread may put one there this moment
            self._whole = None
        return found

    def _say(self, frame: bytes) -> None:
        self.to_say.append(frame)
        self._side.tell()

    def _connect(self) -> Guarded:
        unique_id = self._side.unique_id()
        self._say(nccl_frames.encode_offer(unique_id))
        return self._side.join(unique_id, 1, self._buffer, self._is_open)

    def _warm_up(self, guarded: Guarded) -> None:
        guarded.communicator.receive()

    def _work(self, guarded: Guarded) -> None:
        parted = self._expected
        if parted is None or self._closed:
            return

        def post() -> None:
            guarded.communicator.receive()
            self._say(frames.encode_number(FrameType.NCCL_GRANT, parted.number))

        if not guarded.run(post):
            raise TransferError(
                f"message {parted.number} was not there within {self._side.timeout_s:g} s"
            )
        found = nccl_frames.whole(parted, self._side.read(self._buffer))
        self.received += 1
        self._expected = None
        self._whole = found
        self._side.tell()
