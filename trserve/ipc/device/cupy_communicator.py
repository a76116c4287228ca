"""Two-rank NCCL communicators by CuPy. Unproven on a device.

CuPy's communicator blocks: joining returns once both ranks have joined, and cannot be given up
meanwhile; sends and receives are enqueued and return. Each has a stream of its own, so that a
receive that waits for its peer holds up nothing but itself, and one thread block of the GPU.
Knows no slots and no protocol.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Final

from trserve.ipc.device.api import DeviceError
from trserve.ipc.device.communicator import MESSAGE_BYTES, UNIQUE_ID_BYTES
from trserve.ipc.device.cuda_device import CudaDevice

_HOST_TO_DEVICE: Final = 1
_NO_TIMING: Final = 2
_RANKS: Final = 2


def why_no_nccl() -> str:
    """Why NCCL cannot be used through CuPy; empty if it can."""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        return f"CuPy is not installed ({error})"
    if not nccl.available:
        return "CuPy finds no libnccl.so.2: pip install nvidia-nccl-cu13"
    return ""


class CupyCommunicators:
    """Communicators of one device. DeviceError if there is no NCCL."""

    def __init__(self, device: CudaDevice) -> None:
        if why := why_no_nccl():
            raise DeviceError(f"nccl links cannot be used: {why}")
        # Read when a communicator is made: a message of 4 KiB needs one thread block.
        os.environ.setdefault("NCCL_MAX_CTAS", "1")
        from cupy.cuda import nccl

        self._nccl = nccl
        self._device = device

    def unique_id(self) -> bytes:
        """As NCCL makes it."""
        found = bytes(self._nccl.get_unique_id())
        if len(found) != UNIQUE_ID_BYTES:
            raise DeviceError(f"NCCL's unique id has {len(found)} bytes, not {UNIQUE_ID_BYTES}")
        return found

    def join(self, unique_id: bytes, rank: int, buffer: int) -> CupyCommunicator:
        """Blocks until the other rank joins; in the thread that will use it."""
        self._device.bind_thread()
        made = self._nccl.NcclCommunicator(_RANKS, unique_id, rank)
        return CupyCommunicator(self._nccl, made, 1 - rank, buffer)


class CupyCommunicator:
    """One rank; see ``communicator.Communicator``."""

    def __init__(self, nccl: Any, made: Any, peer: int, buffer: int) -> None:
        import cupy

        self._rt = cupy.cuda.runtime
        self._int8 = nccl.NCCL_INT8
        self._made = made
        self._peer = peer
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._event = self._rt.eventCreateWithFlags(_NO_TIMING)
        self.buffer = buffer
        self._message = ctypes.create_string_buffer(MESSAGE_BYTES)

    def send(self, message: bytes) -> None:
        """Copy to the device, then send, both in stream order."""
        self._message.raw = message
        source, stream = ctypes.addressof(self._message), self._stream.ptr
        self._rt.memcpyAsync(self.buffer, source, MESSAGE_BYTES, _HOST_TO_DEVICE, stream)
        self._made.send(self.buffer, MESSAGE_BYTES, self._int8, self._peer, stream)
        self._rt.eventRecord(self._event, stream)

    def receive(self) -> None:
        """Post a receive."""
        self._made.recv(self.buffer, MESSAGE_BYTES, self._int8, self._peer, self._stream.ptr)
        self._rt.eventRecord(self._event, self._stream.ptr)

    def finished(self) -> bool:
        """``cudaEventQuery``, which CuPy returns as the number that it is."""
        return int(self._rt.eventQuery(self._event)) == 0

    def abort(self) -> None:
        """``ncclCommAbort``."""
        self._made.abort()
