"""A device that is none: the emulation that tests and dry runs use. It says so in its name.

What it emulates is the part of CUDA that a link meets, with CUDA's rules, each of which a plain
fake would hide: memory belongs to a process and another one maps it through a 64-byte handle; the
own process may not open its handle; sizes are multiples of 2 MiB; only the base of an allocation
can be exported; opening again counts, closing once too often fails; the exporter must be alive and
may not free what others have open; an address that is nobody's is an error; and copies are done
*later*, by a stream, if ``lag_s`` says so. What it cannot show: caches, the order of memory between
processors, and how long anything takes.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Final

import numpy as np

from trserve.ipc.device.api import (
    GRANULE,
    HANDLE_BYTES,
    PAGE_BYTES,
    DeviceError,
    Forward,
    Piece,
    Push,
)
from trserve.ipc.device.inbox import HEADER_BYTES, SLOT, stores
from trserve.ipc.device.memory_file import MemoryFile, Place
from trserve.ipc.fence import store_fence

_HANDLE: Final = struct.Struct("<8s5q")
_MAGIC: Final = b"EMULATED"


@dataclass
class _Region:
    """Memory that the emulated device may touch."""

    address: int
    view: memoryview
    file: MemoryFile | None = None  # of an allocation or a mapping; None: registered host memory
    handle: bytes = b""  # of a mapping
    opens: int = 0


class CpuDevice:
    """Device ``device`` of ``devices`` emulated ones, each of which reaches the others' memory.

    Args:
        peers: whether they do.
        lag_s: how long after the call a copy begins, in a thread; None: at once, in the call.
    """

    name = "emulated-device"

    def __init__(
        self, device: int = 0, devices: int = 1, *, peers: bool = True, lag_s: float | None = None
    ) -> None:
        self._device = device
        self._devices = devices
        self._peers = peers
        self._regions: dict[int, _Region] = {}
        self._lag_s = lag_s
        self._asked = self._finished = 0
        self._lock = threading.Lock()
        self._stream: SimpleQueue[tuple[float, Callable[[], None]]] = SimpleQueue()
        if lag_s is not None:
            threading.Thread(target=self._run, name="emulated-stream", daemon=True).start()

    def device_count(self) -> int:
        """As many as were asked for."""
        return self._devices

    def can_access_peer(self, device: int, peer: int) -> bool:
        """As was asked for."""
        return self._peers and device != peer

    # -- memory ------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Memory of this process. DeviceError for a size that CUDA would not export alone."""
        if nbytes <= 0 or nbytes % GRANULE:
            raise DeviceError(
                f"an inbox of {nbytes} bytes: it must be a multiple of {GRANULE}, because CUDA "
                "exports smaller blocks together with their neighbours"
            )
        file = MemoryFile.create("trserve-emulated-device", nbytes)
        self._regions[file.address] = _Region(file.address, file.bytes, file)
        return file.address

    def free(self, pointer: int) -> None:
        """DeviceError while another process has it open: on a GPU that is undefined."""
        region = self._base(pointer, "free")
        if region.handle or region.file is None:
            raise DeviceError(f"free: {pointer:#x} was not allocated by this process")
        if region.file.is_open_elsewhere():
            raise DeviceError(f"free: another process still has {pointer:#x} open")
        self._drop(region)

    def export(self, pointer: int) -> bytes:
        """DeviceError for what is not the base of an allocation of this process."""
        region = self._base(pointer, "export")
        if region.handle or region.file is None:
            raise DeviceError(f"export: {pointer:#x} is not an allocation of this process")
        packed = _HANDLE.pack(_MAGIC, *region.file.place, self._device)
        return packed.ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        """DeviceError for a handle of this process, of a dead one, or of memory that is gone."""
        if len(handle) != HANDLE_BYTES or handle[: len(_MAGIC)] != _MAGIC:
            raise DeviceError(f"open: not a handle of {self.name} ({len(handle)} bytes)")
        _, *place, _device = _HANDLE.unpack_from(handle)
        if place[0] == os.getpid():
            raise DeviceError("open: a process cannot open its own handle; use the pointer")
        for region in self._regions.values():
            if region.handle == handle:
                region.opens += 1
                return region.address
        try:
            file = MemoryFile.open(Place(*place))
        except OSError as error:
            raise DeviceError(f"open: the exporter is gone ({error})") from None
        self._regions[file.address] = _Region(file.address, file.bytes, file, handle, opens=1)
        return file.address

    def close(self, pointer: int) -> None:
        """DeviceError for what is not open (any more)."""
        region = self._base(pointer, "close")
        if not region.handle:
            raise DeviceError(f"close: {pointer:#x} was not opened from a handle")
        region.opens -= 1
        if not region.opens:
            self._drop(region)

    def register(self, address: int, nbytes: int) -> int:
        """Whole pages, once; the device pointer is the address (attribute 91 of a GPU)."""
        if nbytes <= 0 or address % PAGE_BYTES or nbytes % PAGE_BYTES:
            raise DeviceError(f"register: {nbytes} bytes at {address:#x} are not whole pages")
        if address in self._regions:
            raise DeviceError(f"register: {address:#x} is registered already")
        view = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        self._regions[address] = _Region(address, view)
        return address

    def unregister(self, address: int) -> None:
        """DeviceError for what is not registered."""
        if self._base(address, "unregister").file is not None:
            raise DeviceError(f"unregister: {address:#x} is not registered host memory")
        del self._regions[address]

    def _base(self, pointer: int, what: str) -> _Region:
        region = self._regions.get(pointer)
        if region is None:
            raise DeviceError(f"{what}: {pointer:#x} is not the base of anything here")
        return region

    def _drop(self, region: _Region) -> None:
        del self._regions[region.address]
        if region.file is not None:
            region.file.close()

    def _at(self, pointer: int, nbytes: int) -> memoryview:
        for region in self._regions.values():
            offset = pointer - region.address
            if offset >= 0 and offset + nbytes <= len(region.view):
                return region.view[offset : offset + nbytes]
        raise DeviceError(f"illegal memory access: {nbytes} bytes at {pointer:#x}")

    # -- copies ------------------------------------------------------------------------------

    def push(self, pushes: Sequence[Push]) -> bool:
        """Stores in the order of ``inbox.stores``."""
        for record, entry, notice in pushes:
            self._ask(partial(self._store, record, entry, notice))
        return True

    def forward(self, forwards: Sequence[Forward]) -> bool:
        """Likewise, of what lies at ``source`` when its turn comes."""
        for source, entry, notice in forwards:
            self._ask(partial(self._store_from, source, entry, notice))
        return True

    def collect(self, pieces: Sequence[Piece]) -> bool:
        """One copy a piece."""
        for piece in pieces:
            self._ask(partial(self._copy, *piece))
        return True

    def _copy(self, source: int, destination: int, count: int) -> None:
        if count >= 0:
            self._at(destination, 4 * count)[:] = self._at(source, 4 * count)
        else:
            wide = np.frombuffer(self._at(destination, -8 * count), np.int64)
            wide[:] = np.frombuffer(self._at(source, -4 * count), np.int32)

    def _store_from(self, source: int, entry: int, notice: int) -> None:
        header = self._at(source, HEADER_BYTES)
        count = header.cast("q")[SLOT] >> 32
        nbytes = HEADER_BYTES + (4 * count + 7 & ~7)
        self._store(bytes(self._at(source, nbytes)), entry, notice)

    def _store(self, record: bytes, entry: int, notice: int) -> None:
        targets = (self._at(entry, len(record)), self._at(notice, HEADER_BYTES))
        for to_notice, offset, data in stores(record):
            target = targets[to_notice]
            if len(data) == 8:  # one store of a word
                target[offset : offset + 8].cast("q")[0] = int.from_bytes(data, "little")
            else:
                target[offset : offset + len(data)] = data
            store_fence()

    # -- the stream --------------------------------------------------------------------------

    def record(self) -> int:
        """How much was asked for."""
        return self._asked

    def done(self, mark: int) -> bool:
        """Whether that much was done."""
        return self._finished >= mark

    def read(self, pointer: int, nbytes: int) -> bytes:
        """The bytes as they are."""
        return bytes(self._at(pointer, nbytes))

    def write(self, pointer: int, data: bytes) -> None:
        """Put ``data`` there, as another engine of a GPU would: in no order with the stream."""
        self._at(pointer, len(data))[:] = data

    def _ask(self, work: Callable[[], None]) -> None:
        with self._lock:  # a thread of nccl's forwards beside the worker's own
            self._asked += 1
            if self._lag_s is None:
                work()
                self._finished += 1
            else:
                self._stream.put((time.monotonic() + self._lag_s, work))

    def _run(self) -> None:
        while True:  # a daemon: ends with the process, as a GPU's stream does
            due, work = self._stream.get()
            time.sleep(max(0.0, due - time.monotonic()))
            work()
            self._finished += 1
