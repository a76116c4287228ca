"""Python and the packages that a server needs or could use, by what is installed.

Imports none of them: torch alone would take seconds, and a broken one would end the check.
"""

from __future__ import annotations

import sys
from typing import Final

from trserve.doctor.findings import Finding, Level
from trserve.gpus.torch_build import TorchBuild, version_of
from trserve.models.native.library import load_library

OLDEST_PYTHON: Final = (3, 11)


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    """Whether this Python is new enough."""
    shown = ".".join(map(str, version))
    if version[:2] >= OLDEST_PYTHON:
        return Finding("python", Level.OK, f"Python {shown}")
    oldest = ".".join(map(str, OLDEST_PYTHON))
    fix = f"make setup PYTHON=python{oldest}"
    return Finding("python", Level.FAULT, f"Python {shown}, older than {oldest}", "PYTHON", fix)


def check_torch(build: TorchBuild | None, device: str) -> Finding:
    """Whether torch is there, and for GPUs where ``--device`` asks for them."""
    if build is None:
        return Finding("torch", Level.FAULT, "torch is not installed", "torch", "run make setup")
    shown = f"torch {build.version}, " + (f"CUDA {build.cuda}" if build.cuda else "without CUDA")
    if device != "cuda" or build.cuda:
        return Finding("torch", Level.OK, shown)
    return Finding(
        "torch",
        Level.FAULT,
        shown,
        "--device cuda",
        "install a build of torch for CUDA in this environment, or use --device cpu",
        unproven=True,
    )


def check_kernels() -> Finding:
    """Whether the compiled CPU kernels are there."""
    library = load_library()
    if library is not None:
        return Finding("CPU kernels", Level.OK, f"compiled for {library.variant}")
    return Finding(
        "CPU kernels",
        Level.WARNING,
        "none; torch does their work at a fraction of the speed",
        "TRSERVE_CPU_KERNELS",
        "install a C++ compiler (GCC 12 or later, or Clang), run make setup again, and do not set "
        "the variable to none",
    )


def check_optional(device: str, gpus: int) -> list[Finding]:
    """Packages that only some devices need: flashinfer, NCCL for several GPUs, ONNX Runtime."""
    flashinfer = version_of("flashinfer-python")
    nccl = next(filter(None, map(version_of, ("nvidia-nccl-cu13", "nvidia-nccl-cu12"))), None)
    return [
        _optional("flashinfer", flashinfer, "flashinfer", needed=device == "cuda"),
        _optional("NCCL", nccl, "cuda", needed=device == "cuda" and gpus > 1),
        _runtime(version_of("onnxruntime"), needed=device == "onnx"),
    ]


def _runtime(version: str | None, *, needed: bool) -> Finding:
    if version or not needed:
        return Finding("ONNX Runtime", Level.OK, version or "not installed, and not needed")
    fix = "install 'trserve[edge]' in this environment, or use --device cpu"
    return Finding("ONNX Runtime", Level.FAULT, "not installed", "--device onnx", fix)


def _optional(name: str, version: str | None, extra: str, *, needed: bool) -> Finding:
    if version:
        return Finding(name, Level.OK, version, unproven=True)
    if not needed:
        return Finding(name, Level.OK, "not installed, and not needed")
    fix = f"install 'trserve[{extra}]' in this environment"
    return Finding(name, Level.WARNING, "not installed", "--device cuda", fix, unproven=True)
