"""One operation at a time between two ranks, and its end if the other rank does not answer.

What NCCL does is what is assumed here: an operation occupies its communicator until the other side
has posted its own; a peer that died leaves the survivor blocked with no error; ``abort`` from
another thread releases it; **the aborted operation returns without raising, and the buffer holds
partial data**. So whether a transfer counts is decided by a flag that is set before the abort, and
by nothing that the operation itself says. Knows no slots and no CUDA.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

log = logging.getLogger(__name__)
MESSAGE_BYTES: Final = 4096
"""Every message has this size, so that counts always match."""

UNIQUE_ID_BYTES: Final = 128
_NAP_S: Final = 20e-6


class Communicator(Protocol):
    """One of two ranks. At most one operation is under way.

    Attributes:
        buffer: device pointer of the message.
    """

    buffer: int

    def send(self, message: bytes) -> None:
        """Begin to send :data:`MESSAGE_BYTES`."""

    def receive(self) -> None:
        """Begin to receive into ``buffer``."""

    def finished(self) -> bool:
        """Whether what was begun is over, for whatever reason."""

    def abort(self) -> None:
        """End what is under way, and this communicator; from any thread."""


class Communicators(Protocol):
    """Makes them."""

    def unique_id(self) -> bytes:
        """What both ranks must know: :data:`UNIQUE_ID_BYTES` bytes."""

    def join(self, unique_id: bytes, rank: int, buffer: int) -> Communicator:
        """Blocks until the other rank has joined; ``buffer`` is for its messages alone."""


class Guarded:
    """A communicator whose operations end: done, or aborted by :meth:`watch`.

    Args:
        is_alive: whether the peer is.
        timeout_s: how long an operation may take, the other side's part included.
    """

    def __init__(
        self, communicator: Communicator, is_alive: Callable[[], bool], timeout_s: float
    ) -> None:
        self.communicator = communicator
        self._is_alive = is_alive
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._deadline: float | None = None  # of what is under way
        self._aborted = False

    @property
    def is_aborted(self) -> bool:
        """Whether nothing can be sent or received any more."""
        return self._aborted

    def run(self, start: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> bool:
        """Wait until ``ready``, start an operation and wait for it; False if it was aborted.

        If this returns True, the operation was over before any abort began: the flag is set first,
        under the lock that is taken here last.
        """
        with self._lock:
            if self._aborted:
                return False
            self._deadline = time.monotonic() + self._timeout_s
        try:
            if self._await(ready):
                start()
                self._await(self.communicator.finished)
        except Exception:
            self.abort()
            raise
        with self._lock:
            self._deadline = None
            return not self._aborted

    def _await(self, condition: Callable[[], bool]) -> bool:
        while not condition():
            if self._aborted:  # by the watchdog, whose patience bounds this loop
                return False
            time.sleep(_NAP_S)
        return True

    def watch(self) -> bool:
        """To be called now and then by a watchdog; True if it aborted an operation now."""
        with self._lock:
            if self._deadline is None or self._aborted:
                return False
            if time.monotonic() <= self._deadline and self._is_alive():
                return False
        return self.abort()

    def abort(self) -> bool:
        """End it; False if that was done already."""
        with self._lock:
            if self._aborted:
                return False
            self._aborted = True
        self.communicator.abort()
        return True


class Watchdog:
    """A thread that looks after guarded communicators, every ``interval_s``."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._lock = threading.Lock()  # of those who add; what is looked through is never changed
        self._guarded: list[Guarded] = []
        self._is_over = False
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="link-watchdog", daemon=True).start()

    def add(self, guarded: Guarded) -> None:
        """Look after one more, and no longer after those that are over; from any thread.

        Once this is closed, one whose join comes late is aborted at once: nobody else would.
        """
        with self._lock:
            self._guarded = [*(g for g in self._guarded if not g.is_aborted), guarded]
            is_over = self._is_over
        if is_over:
            guarded.abort()

    def close(self) -> None:
        """Have all communicators aborted, and end the thread; does not wait."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            self._each(Guarded.watch)
        with self._lock:
            self._is_over = True
        # An operation without a watchdog would be waited for without a bound.
        self._each(Guarded.abort)

    def _each(self, act: Callable[[Guarded], object]) -> None:
        for guarded in self._guarded:
            try:
                act(guarded)
            except Exception:  # the library's; it has the flag, and the others need this thread
                log.exception("a communicator could not be aborted")
