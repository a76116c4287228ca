"""What there is: versions, programs, limits, and the device's attributes. Runs no kernel."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
from typing import Any, Final

from bench.gpu_stages.parts import tell
from trserve.gpus.programs import DriverError, find_program, run_program

_OF_DEVICE: Final = ("torch", "triton", "flashinfer-python", "apache-tvm-ffi", "cuda-bindings")
_OF_DEVICE_TOO: Final = ("cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_OF_SERVERS: Final = ("numpy", "msgspec", "orjson", "pyzmq", "uvicorn", "uvloop", "httptools")
_OF_SERVERS_TOO: Final = ("click", "tokenizers", "safetensors", "transformers", "prometheus-client")
_PROGRAMS: Final = ("nvidia-smi", "nvidia-cuda-mps-control", "nvcc", "g++", "ninja")
_ASKED: Final = {
    "driver": "nvidia-smi --query-gpu=name,driver_version,memory.used,compute_mode --format=csv",
    "topology": "nvidia-smi topo -m",
    "compiler": "nvcc --version",
}
_ANSWER_S: Final = 8.0
_MOST_LINES: Final = 12
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
    """Versions of everything that takes part, and the process's limits; torch comes last."""
    del quick
    packages = (*_OF_DEVICE, *_OF_DEVICE_TOO, *_OF_SERVERS, *_OF_SERVERS_TOO)
    found: dict[str, Any] = {
        "packages": {name: _version(name) for name in packages},
        "programs": {name: _has(name) for name in _PROGRAMS},
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "pidfd": _has_pidfd(),
        "shm_bytes": shutil.disk_usage("/dev/shm").total,
    }
    if device == "cuda":
        found |= {name: _answer(*command.split()) for name, command in _ASKED.items()}
    tell(found)
    import torch

    found["cuda_of_torch"] = torch.version.cuda
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


def _has_pidfd() -> bool:
    """Whether processes can be watched by descriptor, which not every sandbox's kernel offers."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _has(name: str) -> bool:
    try:
        find_program(name)
    except DriverError:
        return False
    return True


def _answer(program: str, *arguments: str) -> list[str]:
    """What a program says, or why it says nothing."""
    try:
        said = run_program([find_program(program), *arguments], timeout_s=_ANSWER_S)
    except DriverError as error:
        return [str(error)]
    return said.splitlines()[:_MOST_LINES]


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
