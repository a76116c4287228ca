"""GPUs, their driver, their memory and the MPS daemon, as the driver's own programs tell them.

Everything here was tried with programs of the same names and answers, not on a device, and says
so. Knows no model beyond the bytes of all of them.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from typing import Final, NamedTuple

from trserve.doctor.findings import Finding, Level

QUERY: Final = "nvidia-smi"
MPS_CONTROL: Final = "nvidia-cuda-mps-control"
OLDEST_DRIVER: Final = {11: 450, 12: 525, 13: 580}
"""The first branch of the Linux driver that runs programs of a CUDA major version."""

_TIMEOUT_S: Final = 10.0
_FIELDS: Final = "name,driver_version,memory.total,memory.free,compute_mode"
_EXCLUSIVE: Final = "Exclusive_Process"
_FLAG: Final = "--device cuda"
_MIB: Final = 2**20
_GIB: Final = 2**30


class Gpu(NamedTuple):
    """One line of the driver's answer; memory in bytes."""

    name: str
    driver: str
    memory: int
    free: int
    compute_mode: str


class DriverError(Exception):
    """The driver's program is not there, or does not answer as it should."""


def read_gpus() -> list[Gpu]:
    """The GPUs of this machine. Raises DriverError."""
    answer = _run([QUERY, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"])
    try:
        return [_gpu(line) for line in answer.splitlines() if line.strip()]
    except (ValueError, IndexError):
        raise DriverError(f"{QUERY} answers what is no list of GPUs: {answer[:80]!r}") from None


def _gpu(line: str) -> Gpu:
    name, driver, total, free, mode = (part.strip() for part in line.split(","))
    return Gpu(name, driver, int(total) * _MIB, int(free) * _MIB, mode)


def _run(command: Sequence[str], said: str = "") -> str:
    if shutil.which(command[0]) is None:
        raise DriverError(f"there is no {command[0]} on PATH")
    try:
        done = subprocess.run(
            command, input=said, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise DriverError(f"{command[0]} does not answer within {_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise DriverError(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split())[:200]
        raise DriverError(f"{command[0]} ends with {done.returncode}: {words or 'no word'}")
    return done.stdout


def check_gpus(cuda: str | None, models: int, weights: int) -> tuple[list[Finding], int]:
    """Findings where GPUs are asked for, and how many there are.

    Args:
        cuda: the CUDA version that torch was built with, None for none.
        models: how many share the GPUs.
        weights: bytes of all models' weights, 0 where they are not known.
    """
    try:
        gpus = read_gpus()
    except DriverError as error:
        return [_fault("driver", str(error), "install the NVIDIA driver, or use --device cpu")], 0
    if not gpus:
        fix = "give this machine one (containers: --gpus all), or use --device cpu"
        return [_fault("driver", f"{QUERY} lists no GPU", fix)], 0
    found = [_driver(gpus, cuda), _memory(gpus, weights)]
    if models > 1:
        found.append(_mps(gpus))
    return found, len(gpus)


def _driver(gpus: Sequence[Gpu], cuda: str | None) -> Finding:
    first = gpus[0]
    shown = f"{first.driver}, {len(gpus)} x {first.name}"
    oldest = OLDEST_DRIVER.get(int(cuda.partition(".")[0]), 0) if cuda else 0
    branch = first.driver.partition(".")[0]
    if branch.isdigit() and int(branch) < oldest:
        return _fault(
            "driver",
            f"{shown}: too old for CUDA {cuda} of torch, which needs {oldest} or later",
            f"install driver {oldest} or later, or a build of torch for an older CUDA",
        )
    return Finding("driver", Level.OK, shown, unproven=True)


def _memory(gpus: Sequence[Gpu], weights: int) -> Finding:
    free = sum(gpu.free for gpu in gpus)
    shown = f"{free / _GIB:.1f} GiB free of {sum(gpu.memory for gpu in gpus) / _GIB:.1f}"
    if weights <= free:
        return Finding("GPU memory", Level.OK, shown, unproven=True)
    return Finding(
        "GPU memory",
        Level.FAULT,
        f"{shown}, but the weights need {weights / _GIB:.1f} GiB",
        "--models",
        "name smaller models, use --quantization int8, or end what else uses the GPUs",
        unproven=True,
    )


def _mps(gpus: Sequence[Gpu]) -> Finding:
    """Several models on one GPU: their steps overlap only where the MPS daemon runs."""
    try:
        _run([MPS_CONTROL], "get_server_list\nquit\n")
    except DriverError as error:
        exclusive = any(gpu.compute_mode == _EXCLUSIVE for gpu in gpus)
        level = Level.FAULT if exclusive else Level.WARNING
        cost = (
            f"a GPU is in the mode {_EXCLUSIVE} and takes one process only"
            if exclusive
            else "models on one GPU take turns instead of running at once"
        )
        what = f"no MPS daemon ({error}): {cost}"
        return Finding("MPS", level, what, _FLAG, f"start it: {MPS_CONTROL} -d", unproven=True)
    return Finding("MPS", Level.OK, "the daemon answers", unproven=True)


def _fault(check: str, what: str, fix: str) -> Finding:
    return Finding(check, Level.FAULT, what, _FLAG, fix, unproven=True)
