"""Two-rank communicators that are none: memory of two processes, and a thread for what NCCL's
kernel does. Named emulated; what it shows is the order of operations, and what an abort leaves.

As with NCCL: joining blocks until both have; an operation waits for the other side's for as long as
it takes; an abort ends it without an error, with half of the message in the buffer. And it notes
what must never happen: a send before its receive was posted, or two operations at once. Both ranks
are processes of one user on one host. Knows no slots, and not how long anything takes.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from typing import Final

from trserve.ipc.device.communicator import MESSAGE_BYTES, UNIQUE_ID_BYTES
from trserve.ipc.device.cpu_device import CpuDevice
from trserve.ipc.device.memory_file import MemoryFile, Place

_PLACE: Final = struct.Struct("<4q")
JOINED, POSTED, SENT, EARLY_SENDS, STALL, PARTIAL = 0, 2, 3, 4, 5, 6
DATA: Final = 4096
JOIN_GIVE_UP_S: Final = 30.0
_NAP_S: Final = 20e-6
_JOIN_NAP_S: Final = 1e-3  # longer: it may be there for 30 s, and others want the core


class EmulatedCommunicators:
    """Over one emulated device.

    Attributes:
        files: the memories of those that this process began.
    """

    def __init__(self, api: CpuDevice) -> None:
        self._api = api
        self._closed = False
        self.files: list[MemoryFile] = []

    def close(self) -> None:
        """End the joins that still wait, which NCCL cannot; for who makes many of these."""
        self._closed = True

    def unique_id(self) -> bytes:
        """Where the memory is."""
        self.files.append(MemoryFile.create("emulated-nccl", 4 * 4096))
        return _PLACE.pack(*self.files[-1].place).ljust(UNIQUE_ID_BYTES, b"\0")

    def join(self, unique_id: bytes, rank: int, buffer: int) -> EmulatedCommunicator:
        """Blocks until the other rank joins; RuntimeError if it never does, which NCCL lacks."""
        place = Place(*_PLACE.unpack_from(unique_id))
        own = [file for file in self.files if file.place == place]
        file = own[0] if own else MemoryFile.open(place)
        file.words[JOINED + rank] = 1
        deadline = time.monotonic() + JOIN_GIVE_UP_S
        while not file.words[JOINED + 1 - rank]:
            if self._closed or time.monotonic() > deadline:
                raise RuntimeError("the other rank never joined")
            time.sleep(_JOIN_NAP_S)
        return EmulatedCommunicator(self._api, file, buffer)


class EmulatedCommunicator:
    """One rank; see ``communicator.Communicator``."""

    def __init__(self, api: CpuDevice, file: MemoryFile, buffer: int) -> None:
        self._api = api
        self._file = file
        self._words = file.words
        self._aborted = False
        self._busy = False
        self._count = 0
        self.buffer = buffer

    def send(self, message: bytes) -> None:
        """In a thread, as a kernel does it."""
        assert len(message) == MESSAGE_BYTES
        if self._count and self._words[POSTED] != self._count + 1:  # the warm-up has no order
            self._words[EARLY_SENDS] += 1
        self._begin(lambda: self._send(message))

    def receive(self) -> None:
        """Likewise."""
        self._words[POSTED] = self._count + 1
        self._begin(self._receive)

    def finished(self) -> bool:
        """Whether the thread is."""
        return not self._busy

    def abort(self) -> None:
        """The buffer keeps what has come."""
        self._aborted = True

    def _begin(self, operation: Callable[[], None]) -> None:
        assert not self._busy, "two operations at once"
        self._busy = True
        self._count += 1
        threading.Thread(target=self._run, args=(operation,), daemon=True).start()

    def _run(self, operation: Callable[[], None]) -> None:
        operation()
        self._busy = False

    def _wait(self, condition: Callable[[], bool]) -> bool:
        while not condition():
            if self._aborted:
                return False
            time.sleep(_NAP_S)
        return True

    def _send(self, message: bytes) -> None:
        words, count, half = self._words, self._count, MESSAGE_BYTES // 2
        if not self._wait(lambda: words[POSTED] >= count):
            return
        self._file.bytes[DATA : DATA + half] = message[:half]
        words[PARTIAL] = count
        if not self._wait(lambda: not words[STALL]):
            return
        self._file.bytes[DATA + half : DATA + MESSAGE_BYTES] = message[half:]
        words[SENT] = count

    def _receive(self) -> None:
        words, count, half = self._words, self._count, MESSAGE_BYTES // 2
        if not self._wait(lambda: words[PARTIAL] >= count):
            return
        found = self._file.bytes[DATA : DATA + half]
        self._api.write(self.buffer, bytes(found))  # what an abort leaves
        if self._wait(lambda: words[SENT] >= count):
            found = self._file.bytes[DATA + half : DATA + MESSAGE_BYTES]
            self._api.write(self.buffer + half, bytes(found))
