"""What a link process has for NCCL once: its device, the messages' memory, and who looks after it.

Knows no frames and no connections.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Final

from trserve.ipc.device.api import GRANULE, DeviceApi
from trserve.ipc.device.communicator import MESSAGE_BYTES, Communicators, Guarded, Watchdog
from trserve.ipc.doorbell import create_doorbell, ring, silence

TIMEOUT_S: Final = 5.0
"""How long one message may be under way. Joining has no such bound; it blocks a thread only."""

LOOK_S: Final = 0.25
"""How soon an operation of a connection that is gone is aborted."""

MAX_BUFFERS: Final = 128


class NcclSide:
    """One device of this process.

    Args:
        name: what to call it to people; both sides' must be the same.

    Attributes:
        fd: readable when a thread has something to say.
        timeout_s: see :data:`TIMEOUT_S`.
    """

    def __init__(
        self,
        api: DeviceApi,
        communicators: Communicators,
        *,
        name: str,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.fd = create_doorbell()
        # Not by ``close``, nor at the process's end: threads of directions may outlive both.
        weakref.finalize(self, os.close, self.fd).atexit = False
        self._api = api
        self._communicators = communicators
        base = api.allocate(GRANULE)
        self._free = [base + MESSAGE_BYTES * n for n in range(MAX_BUFFERS)]
        self._watchdog = Watchdog(min(LOOK_S, timeout_s / 4))
        self._lock = threading.Lock()

    def take_buffers(self) -> tuple[int, int] | None:
        """Memory for a message each way; None if there is none left."""
        with self._lock:
            return (self._free.pop(), self._free.pop()) if len(self._free) > 1 else None

    def give_back(self, buffer: int) -> None:
        """Nothing is written there any more."""
        with self._lock:
            self._free.append(buffer)

    def unique_id(self) -> bytes:
        """Of a new communicator."""
        return self._communicators.unique_id()

    def join(
        self, unique_id: bytes, rank: int, buffer: int, is_alive: Callable[[], bool]
    ) -> Guarded:
        """Blocks until the other rank joins; operations end with ``is_alive`` or the timeout."""
        made = self._communicators.join(unique_id, rank, buffer)
        guarded = Guarded(made, is_alive, self.timeout_s)
        with self._lock:  # threads of several directions come here
            self._watchdog.add(guarded)
        return guarded

    def read(self, buffer: int) -> bytes:
        """The message there."""
        return self._api.read(buffer, MESSAGE_BYTES)

    def tell(self) -> None:
        """Make ``fd`` readable; from any thread."""
        ring(self.fd)

    def close(self) -> None:
        """What connections have under way is aborted: they were closed, and have had time."""
        self._watchdog.close()

    def quiet(self) -> None:
        """``fd`` is readable no longer, but for what comes from now on."""
        silence(self.fd)
