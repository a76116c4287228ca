"""The compiled kernels: which of their variants this processor can run, and how to call them.

Installing trserve compiles ``*.cpp`` once for each instruction set worth having (``setup.py``).
Where nothing was compiled, for want of a compiler, torch does the work, in up to twice the time a
step: compare ``python -m bench.engine`` under ``TRSERVE_CPU_KERNELS=none``. Knows the C interface,
field for field; nothing of decoders or tensors.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Final

log = logging.getLogger(__name__)

VARIANTS: Final[dict[str, frozenset[str]]] = {
    "avx512bf16": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    "avx2": frozenset({"avx2", "fma", "bmi2", "f16c"}),
    "baseline": frozenset(),
}
"""Flags of ``/proc/cpuinfo`` that a variant needs; the best comes first."""

CHOICE: Final = "TRSERVE_CPU_KERNELS"
"""Environment variable that names one variant, or ``none`` for torch alone."""

FLOAT32, BFLOAT16, INT8 = range(3)

_INTERFACE_VERSION: Final = 3


class CMatrix(ctypes.Structure):
    """``Matrix`` of ``linear.h``."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("kind", ctypes.c_int32),
    )


class CLayer(ctypes.Structure):
    """``Layer`` of ``model.h``."""

    _fields_ = (
        ("qkv", CMatrix),
        ("output", CMatrix),
        ("gate_up", CMatrix),
        ("down", CMatrix),
        ("input_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("head_norm", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
    )


class CModel(ctypes.Structure):
    """``ModelSpec`` of ``model.h``."""

    _fields_ = (
        ("layers", ctypes.POINTER(CLayer)),
        ("embedding", ctypes.c_void_p),
        ("final_norm", ctypes.c_void_p),
        ("tap_norm", ctypes.c_void_p),
        ("head", CMatrix),
        ("num_layers", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("intermediate", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


class CStep(ctypes.Structure):
    """``StepSpec`` of ``model.h``."""

    _fields_ = (
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("rotations", ctypes.c_void_p),
        ("wanted", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("tap", ctypes.c_void_p),
        ("heartbeat", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
        ("hidden_count", ctypes.c_int64),
        ("logits_count", ctypes.c_int64),
    )


def _interface() -> int:
    """What ``trs_interface`` of a library that was compiled for this file returns."""
    sizes = [ctypes.sizeof(structure) for structure in (CLayer, CModel, CStep)]
    return ((_INTERFACE_VERSION * 1000 + sizes[0]) * 1000 + sizes[1]) * 1000 + sizes[2]


class Library:
    """One variant, loaded. OSError if it cannot be, or was compiled for another version."""

    def __init__(self, variant: str, path: Path) -> None:
        self.variant = variant
        functions: Any = ctypes.CDLL(str(path))
        described = getattr(functions, "trs_interface", None)
        if described is not None:
            described.restype = ctypes.c_int64
        if described is None or described() != _interface():
            raise OSError("it was compiled for another version of trserve")
        functions.trs_create.restype = ctypes.c_void_p
        functions.trs_create.argtypes = (
            ctypes.POINTER(CModel),
            ctypes.c_int32,
            ctypes.c_int32,
        )
        functions.trs_step.restype = None
        functions.trs_step.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        functions.trs_destroy.restype = None
        functions.trs_destroy.argtypes = (ctypes.c_void_p,)
        functions.trs_dim_multiple.restype = ctypes.c_int64
        functions.trs_dim_multiple.argtypes = (ctypes.c_int32,)
        rows = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        functions.trs_signals.restype = None
        functions.trs_signals.argtypes = (*rows, ctypes.c_void_p)
        functions.trs_largest.restype = None
        functions.trs_largest.argtypes = (*rows, ctypes.c_int32, ctypes.c_void_p)
        self.functions = functions


def _path(variant: str) -> Path | None:
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).parent / f"_{variant}{suffix}"
        if path.exists():
            return path
    return None


@cache
def processor_flags() -> frozenset[str]:
    """What this processor can do, in the kernel's words; empty where it does not say."""
    for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def runnable_variants() -> list[str]:
    """The variants that were compiled and that this processor can run, the best first."""
    flags = processor_flags()
    return [name for name, needed in VARIANTS.items() if needed <= flags and _path(name)]


def load_library(variant: str | None = None) -> Library | None:
    """The kernels, or None where torch must do.

    Args:
        variant: one of :func:`runnable_variants`; by default what the environment variable
            ``TRSERVE_CPU_KERNELS`` names, else the best.
    """
    return _load(variant or os.environ.get(CHOICE) or "")


@cache
def _load(wanted: str) -> Library | None:
    found = runnable_variants()
    if wanted and wanted not in found:
        if wanted != "none":
            log.warning("%s=%s cannot run here; there are %s", CHOICE, wanted, found or "none")
        return None
    if not found:
        return None
    path = _path(wanted or found[0])
    assert path is not None
    try:
        return Library(wanted or found[0], path)
    except OSError as error:
        log.warning("%s: %s; run make setup, torch does its work until then", path.name, error)
        return None
