"""One CUDA device, by CuPy's runtime API: memory, handles, host registration, copies.

Unproven on a device until ``bench/gpu_check.py`` has passed on one. CuPy is imported when a device
is made, never before. An inbox comes from ``cudaMalloc`` itself: blocks of torch's allocator and of
CuPy's pool cannot be exported as such (a handle opens a whole allocation; torch's expandable
segments and ``cudaMallocAsync`` give none at all). Copies run on a private stream that does not
wait for the default one. Nothing here may be called while a graph is being captured.

Knows no slots and no protocol.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from trserve.ipc.device.api import (
    GRANULE,
    HANDLE_BYTES,
    PAGE_BYTES,
    DeviceError,
    Forward,
    Piece,
    Push,
)
from trserve.ipc.device.kernels import SOURCE, THREADS
from trserve.ipc.device.staging import CAPACITY, STAGING_BYTES, Staging

_PORTABLE_AND_MAPPED: Final = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
_HOST_POINTER_IS_DEVICE_POINTER: Final = 91
_BY_POINTERS: Final = 4  # cudaMemcpyDefault: what is read may be registered host memory


def why_unavailable() -> str:
    """Why there is no CUDA device for links here; empty if there is one.

    That CuPy can be imported says nothing: it can be without a driver.
    """
    try:
        import cupy
    except ImportError as error:
        return f"CuPy is not installed ({error}): pip install 'trserve[cuda]'"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CUDA cannot be used ({error})"
    return "" if count > 0 else "CUDA sees no GPU"


class CudaDevice:
    """Device ``device``, in the numbering of this process.

    Raises DeviceError if there is none.
    """

    name = "cuda"

    def __init__(self, device: int = 0) -> None:
        if why := why_unavailable():
            raise DeviceError(f"CUDA links cannot be used: {why}")
        import cupy

        self._cuda = cupy.cuda
        self._rt = cupy.cuda.runtime
        self._errors = (self._rt.CUDARuntimeError, cupy.cuda.driver.CUDADriverError)
        self._device = device
        self._do("setDevice", self._rt.setDevice, device)
        self._allocated: set[int] = set()
        self._opened: dict[int, int] = {}
        self._stream = cupy.cuda.Stream(non_blocking=True)
        module = cupy.RawModule(code=SOURCE, options=("--std=c++17",))
        self._push_kernel = self._compile(module, "trserve_push")
        self._collect_kernel = self._compile(module, "trserve_collect")
        self._staging = self._create_staging()
        self._staging_lock = threading.Lock()  # a thread of nccl's forwards beside the worker's

    def _compile(self, module: Any, name: str) -> Any:
        try:
            return module.get_function(name)
        except Exception as error:  # NVRTC's own, or of whatever looks for its library
            raise DeviceError(
                f"the kernel {name} cannot be compiled ({error}): NVRTC comes with the CUDA "
                "toolkit, or as nvidia-cuda-nvrtc"
            ) from None

    def _create_staging(self) -> Staging:
        address = self._do("hostAlloc", self._rt.hostAlloc, STAGING_BYTES, _PORTABLE_AND_MAPPED)
        ctypes.memset(address, 0, STAGING_BYTES)
        memory = memoryview((ctypes.c_char * STAGING_BYTES).from_address(address)).cast("B")
        return Staging(memory, address)  # with unified addressing, hostAlloc's is the device's too

    def _do(self, what: str, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._errors as error:
            raise DeviceError(f"{what} failed on CUDA device {self._device}: {error}") from None

    def bind_thread(self) -> None:
        """Make this the calling thread's device, which CUDA keeps by thread."""
        self._do("setDevice", self._rt.setDevice, self._device)

    def device_count(self) -> int:
        """Visible devices."""
        return int(self._do("getDeviceCount", self._rt.getDeviceCount))

    def can_access_peer(self, device: int, peer: int) -> bool:
        """``cudaDeviceCanAccessPeer``."""
        return bool(self._do("deviceCanAccessPeer", self._rt.deviceCanAccessPeer, device, peer))

    # -- memory ------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """``cudaMalloc``, zeroed before this returns."""
        if nbytes <= 0 or nbytes % GRANULE:
            raise DeviceError(f"an inbox of {nbytes} bytes: it must be a multiple of {GRANULE}")
        pointer = int(self._do("malloc", self._rt.malloc, nbytes))
        self._do("memset", self._rt.memset, pointer, 0, nbytes)
        self._do("deviceSynchronize", self._rt.deviceSynchronize)
        self._allocated.add(pointer)
        return pointer

    def free(self, pointer: int) -> None:
        """``cudaFree``. Others must have closed it: otherwise what happens is undefined."""
        if pointer not in self._allocated:
            raise DeviceError(f"free: {pointer:#x} was not allocated here")
        self._allocated.remove(pointer)
        self._do("free", self._rt.free, pointer)

    def export(self, pointer: int) -> bytes:
        """``cudaIpcGetMemHandle``."""
        if pointer not in self._allocated:  # another's offset would be lost without a word
            raise DeviceError(f"export: {pointer:#x} is not the base of an allocation made here")
        return bytes(self._do("ipcGetMemHandle", self._rt.ipcGetMemHandle, pointer))

    def open(self, handle: bytes) -> int:
        """``cudaIpcOpenMemHandle`` with peer access."""
        if len(handle) != HANDLE_BYTES:  # CuPy would say IndexError
            raise DeviceError(f"open: a handle has {HANDLE_BYTES} bytes, this one {len(handle)}")
        pointer = int(self._do("ipcOpenMemHandle", self._rt.ipcOpenMemHandle, handle))
        self._opened[pointer] = self._opened.get(pointer, 0) + 1
        return pointer

    def close(self, pointer: int) -> None:
        """``cudaIpcCloseMemHandle``."""
        if not self._opened.get(pointer):
            raise DeviceError(f"close: {pointer:#x} is not open here")
        self._opened[pointer] -= 1
        self._do("ipcCloseMemHandle", self._rt.ipcCloseMemHandle, pointer)

    def register(self, address: int, nbytes: int) -> int:
        """``cudaHostRegister``; the pages stay in memory until :meth:`unregister`."""
        if nbytes <= 0 or address % PAGE_BYTES or nbytes % PAGE_BYTES:
            raise DeviceError(f"register: {nbytes} bytes at {address:#x} are not whole pages")
        rt = self._rt
        self._do("hostRegister", rt.hostRegister, address, nbytes, _PORTABLE_AND_MAPPED)
        attribute = _HOST_POINTER_IS_DEVICE_POINTER
        if self._do("deviceGetAttribute", rt.deviceGetAttribute, attribute, self._device):
            return address
        found = self._do("pointerGetAttributes", rt.pointerGetAttributes, address)
        if not found.devicePointer:
            raise DeviceError(f"register: CUDA device {self._device} cannot reach host memory")
        return int(found.devicePointer)

    def unregister(self, address: int) -> None:
        """``cudaHostUnregister``."""
        self._do("hostUnregister", self._rt.hostUnregister, address)

    # -- copies ------------------------------------------------------------------------------

    def push(self, pushes: Sequence[Push]) -> bool:
        """One launch, a block a record."""
        return self._launch(self._push_kernel, pushes)

    def forward(self, forwards: Sequence[Forward]) -> bool:
        """The same kernel, which reads device memory as well."""
        return self._launch(self._push_kernel, forwards)

    def collect(self, pieces: Sequence[Piece]) -> bool:
        """One launch, a block a piece."""
        return self._launch(self._collect_kernel, pieces)

    def _launch(self, kernel: Any, commands: Sequence[tuple[Any, int, int]]) -> bool:
        if not commands:
            return True
        with self._staging_lock:
            first = self._staging.write(commands)
            if first is None:
                return False
            arguments = (self._staging.address, first, CAPACITY - 1)
            with self._stream:
                try:
                    self._do("launch", kernel, (len(commands),), (THREADS,), arguments)
                except DeviceError:
                    self._staging.take_back(len(commands))
                    raise
        return True

    def record(self) -> int:
        """The ticket of the last copy."""
        return self._staging.last

    def done(self, mark: int) -> bool:
        """Whether the kernels have given back all tickets so far; the driver is not asked."""
        with self._staging_lock:
            return self._staging.is_done(mark)

    def read(self, pointer: int, nbytes: int) -> bytes:
        """Waits for the private stream; for checks only."""
        self._do("streamSynchronize", self._stream.synchronize)
        host = ctypes.create_string_buffer(nbytes)
        address = ctypes.addressof(host)
        self._do("memcpy", self._rt.memcpy, address, pointer, nbytes, _BY_POINTERS)
        return host.raw
