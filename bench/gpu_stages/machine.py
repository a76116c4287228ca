"""What there is: versions, limits, and the device's attributes. Runs no kernel."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
from typing import Any, Final

_PACKAGES: Final = ("torch", "triton", "flashinfer-python", "cupy-cuda13x", "nvidia-nccl-cu13")
_PACKAGES_TOO: Final = ("cuda-bindings", "numpy", "transformers")
ATTRIBUTES: Final = {
    16: "multiprocessors",
    86: "host_native_atomics",
    89: "concurrent_managed_access",
    90: "compute_preemption",
    91: "host_pointer_is_device_pointer",
    99: "host_register",
    122: "stream_64_bit_operations",
    123: "stream_wait_value_nor",
    125: "ipc_events",
    133: "mps_enabled",
}
"""``CUdevice_attribute`` of cuda.h since CUDA 12, where what streams can do has new numbers."""


def env(device: str, quick: bool) -> dict[str, Any]:
    """Versions of everything that takes part, and the process's limits."""
    del quick
    import torch

    found: dict[str, Any] = {
        "packages": {name: _version(name) for name in (*_PACKAGES, *_PACKAGES_TOO)},
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "shm_bytes": shutil.disk_usage("/dev/shm").total,
        "mps_program": bool(shutil.which("nvidia-cuda-mps-control")),
        "cuda_of_torch": torch.version.cuda,
    }
    if device == "cuda":
        if not torch.cuda.is_available():
            return {**found, "error": "torch finds no CUDA device"}
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpus": torch.cuda.device_count(), "gpu": properties.name}
        found |= {"memory_bytes": properties.total_memory}
        found["summary"] = f"{found['gpus']} x {properties.name}, torch {torch.__version__}"
    else:
        found["summary"] = f"no device is asked for; torch {torch.__version__}"
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def attributes(device: str, quick: bool) -> dict[str, Any]:
    """What the device says it can do."""
    del quick
    if device == "cpu":
        return {"summary": "EMULATED: an emulated device has no attributes", "values": {}}
    import ctypes

    driver = ctypes.CDLL("libcuda.so.1")
    if code := driver.cuInit(0):
        return {"error": f"cuInit: CUDA error {code}"}
    values: dict[str, int] = {}
    for number, name in ATTRIBUTES.items():
        value = ctypes.c_int()
        if not driver.cuDeviceGetAttribute(ctypes.byref(value), number, 0):
            values[name] = value.value
    missing = [name for name in ATTRIBUTES.values() if name not in values]
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    said = f"driver for CUDA {version.value / 1000:g}; not known here: {', '.join(missing) or '-'}"
    return {"values": values, "driver": version.value, "summary": said}
