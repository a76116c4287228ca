"""Links between processes on a device: registration, inboxes, waits, NCCL. Compares every id.

On a CPU the same protocol runs over emulations, named so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

from trserve.errors import TrserveError
from trserve.ipc.device.transport import soak, transport_samples

_MOST_US: Final = 10.0
_SOAK: Final = 20_000
_TIMED: Final = 20_000
_DONE: Final = "done, which no documentation promises"


def host_register(device: str, quick: bool) -> dict[str, Any]:
    """The slab's own pages in a GPU's reach, from two processes; every id is compared."""
    name = "host_mapped" if device == "cuda" else "emulated-host_mapped"
    return _checked(name, 2000 if quick or device == "cpu" else _SOAK // 4)


def ipc(device: str, quick: bool) -> dict[str, Any]:
    """Inboxes of another process: a soak over a consumer that is killed, then times."""
    name = "cuda_ipc" if device == "cuda" else "emulated-cuda_ipc"
    few = quick or device == "cpu"
    found = _checked(name, 2000 if few else _SOAK)
    if "error" in found:
        return found
    rows = [transport_samples(name, 1000 if few else _TIMED).summary()]
    rows.append(transport_samples("shm", 1000 if few else _TIMED).summary())
    found["tables"] = {"transport": rows}
    p50 = rows[0].get("ids_p50_us")
    found["within_10_us"] = isinstance(p50, float) and p50 <= _MOST_US
    found["summary"] += f"; ids usable after {p50} us (p50)"
    found |= _refusals(device)
    return found


def _checked(name: str, count: int) -> dict[str, Any]:
    said = soak(name, count)
    found: dict[str, Any] = {
        **said,
        "summary": f"{name}: {said['taken']} of {count} suffixes taken",
    }
    if said["wrong"]:
        found["error"] = f"{name}: {said['wrong']} suffixes had other ids than the row"
    elif (
        int(said["taken"]) < int(said["received"]) // 2
    ):  # of all lengths, nine in ten fit an entry
        found["error"] = f"{name}: only {said['taken']} of {said['received']} through the device"
    return found


def _refusals(device: str) -> dict[str, Any]:
    """What must be refused: a handle in the process that made it (by CUDA, and told only), and
    memory within a pool of torch's, whose handle would open the whole of it (by us)."""
    if device == "cpu":
        return {}
    import torch

    from trserve.ipc.device.cuda_device import CudaDevice

    api = CudaDevice()
    within = torch.zeros(2, 1024, device="cuda")[1]
    pointer = api.allocate(2 << 20)
    try:
        found = {"own_handle": _refusal(lambda: api.open(api.export(pointer)))}
        found["pool"] = _refusal(lambda: api.export(within.data_ptr()))
    finally:
        api.free(pointer)
    if found["pool"] == _DONE:
        found["error"] = "memory within a pool was exported: its offset would be lost"
    return found


def _refusal(ask: Callable[[], object]) -> str:
    try:
        ask()
    except TrserveError as error:
        return f"refused, as it must be: {error}"
    return _DONE


def waits(device: str, quick: bool) -> dict[str, Any]:
    """Whether a stream can wait for a word (``cuStreamWaitValue32``), which no step does."""
    del quick
    if device == "cpu":
        return {"unavailable": "there is no stream"}
    import torch

    driver = ctypes.CDLL("libcuda.so.1")
    wait = getattr(driver, "cuStreamWaitValue32_v2", None)
    write = getattr(driver, "cuStreamWriteValue32_v2", None)
    if wait is None or write is None:
        return {"unavailable": "the driver has no cuStreamWaitValue32_v2"}
    word = torch.zeros(1, dtype=torch.int32, device="cuda")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    address = ctypes.c_uint64(word.data_ptr())
    # The write is launched first: a wait that nothing ends would hold the stream for good.
    codes = [
        write(ctypes.c_void_p(first.cuda_stream), address, ctypes.c_uint32(7), 0),
        wait(ctypes.c_void_p(second.cuda_stream), address, ctypes.c_uint32(7), 0),
    ]
    torch.cuda.synchronize()
    if any(codes):
        return {"unavailable": f"CUDA errors {codes}"}
    return {"summary": "a stream waits for another one's word", "value": int(word.item())}


def nccl(device: str, quick: bool) -> dict[str, Any]:
    """Two ranks on two GPUs where there are two; one rank alone, and what is refused, on one."""
    if device == "cpu":
        return {"unavailable": "there is no GPU"}
    from trserve.ipc.device.cupy_communicator import why_no_nccl

    if why := why_no_nccl():
        return {"unavailable": why}
    import torch

    if torch.cuda.device_count() < 2:
        return {"unavailable": "one GPU: NCCL joins no two processes on one", **_one_rank()}
    count = 500 if quick else 2000
    said = soak("nccl", count, devices=(0, 1))
    times = transport_samples("nccl", count, devices=(0, 1)).summary()
    found: dict[str, Any] = {**said, "tables": {"transport": [times]}}
    found["summary"] = f"{said['taken']} of {count} suffixes taken"
    if said["wrong"]:
        found["error"] = f"{said['wrong']} suffixes had other ids than the row"
    return found


def _one_rank() -> dict[str, Any]:
    """A communicator of one rank: sums with itself, and ends."""
    import cupy
    from cupy.cuda import nccl as library

    communicator = library.NcclCommunicator(1, library.get_unique_id(), 0)
    values = cupy.arange(4, dtype=cupy.float32)
    stream = cupy.cuda.Stream.null.ptr
    pointer = values.data.ptr
    communicator.allReduce(pointer, pointer, 4, library.NCCL_FLOAT32, library.NCCL_SUM, stream)
    cupy.cuda.Stream.null.synchronize()
    communicator.destroy()
    return {"one_rank": values.tolist()}
