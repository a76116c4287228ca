"""Two-rank communicators that are none: memory of two processes, and a thread for what NCCL's
kernel does. Named emulated; what it shows is the order of operations, and what an abort leaves.

As with NCCL: joining blocks until both have; an operation waits for the other side's for as long as
it takes; an abort ends it without an error, with half of the message in the buffer. And it notes
what must never happen: a send before its receive was posted, or two operations at once.
"""

from __future__ import annotations

import struct
import threading
import time

from trserve.ipc.device.communicator import MESSAGE_BYTES, UNIQUE_ID_BYTES
from trserve.ipc.device.cpu_device import CpuDevice
from trserve.ipc.device.memory_file import MemoryFile, Place

_PLACE = struct.Struct("<4q")
JOINED, POSTED, SENT, EARLY_SENDS, STALL, PARTIAL = 0, 2, 3, 4, 5, 6
DATA = 4096
JOIN_GIVE_UP_S = 30.0
_NAP_S = 20e-6


class EmulatedCommunicators:
    """Over one emulated device. ``files`` are the memories of those that this process began."""

    def __init__(self, api: CpuDevice) -> None:
        self._api = api
        self.files: list[MemoryFile] = []

    def unique_id(self) -> bytes:
        self.files.append(MemoryFile.create("emulated-nccl", 4 * 4096))
        return _PLACE.pack(*self.files[-1].place).ljust(UNIQUE_ID_BYTES, b"\0")

    def join(self, unique_id: bytes, rank: int, buffer: int) -> EmulatedCommunicator:
        place = Place(*_PLACE.unpack_from(unique_id))
        own = [file for file in self.files if file.place == place]
        file = own[0] if own else MemoryFile.open(place)
        file.words[JOINED + rank] = 1
        deadline = time.monotonic() + JOIN_GIVE_UP_S
        while not file.words[JOINED + 1 - rank]:
            if time.monotonic() > deadline:
                raise RuntimeError("the other rank never joined")
            time.sleep(_NAP_S)
        return EmulatedCommunicator(self._api, file, buffer)


class EmulatedCommunicator:
    def __init__(self, api: CpuDevice, file: MemoryFile, buffer: int) -> None:
        self._api = api
        self._file = file
        self._words = file.words
        self._aborted = False
        self._busy = False
        self._count = 0
        self.buffer = buffer

    def send(self, message: bytes) -> None:
        assert len(message) == MESSAGE_BYTES
        if self._count and self._words[POSTED] != self._count + 1:  # the warm-up has no order
            self._words[EARLY_SENDS] += 1
        self._begin(lambda: self._send(message))

    def receive(self) -> None:
        self._words[POSTED] = self._count + 1
        self._begin(self._receive)

    def finished(self) -> bool:
        return not self._busy

    def abort(self) -> None:
        self._aborted = True

    def _begin(self, operation) -> None:
        assert not self._busy, "two operations at once"
        self._busy = True
        self._count += 1
        threading.Thread(target=self._run, args=(operation,), daemon=True).start()

    def _run(self, operation) -> None:
        operation()
        self._busy = False

    def _wait(self, condition) -> bool:
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
        buffer = self._api._at(self.buffer, MESSAGE_BYTES)
        if not self._wait(lambda: words[PARTIAL] >= count):
            return
        buffer[:half] = self._file.bytes[DATA : DATA + half]  # what an abort leaves
        if self._wait(lambda: words[SENT] >= count):
            buffer[half:] = self._file.bytes[DATA + half : DATA + MESSAGE_BYTES]
