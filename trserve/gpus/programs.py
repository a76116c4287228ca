"""Running the programs that come with the GPU driver, with a bound on how long each may take.

Knows no program's answers.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

QUERY: Final = "nvidia-smi"
MPS_CONTROL: Final = "nvidia-cuda-mps-control"

TIMEOUT_S: Final = 10.0
"""A driver that initializes GPUs without persistence mode takes some seconds to answer."""

_BESIDE: Final = ("/usr/bin", "/usr/local/bin", "/usr/local/nvidia/bin", "/opt/bin")
_WORDS_SHOWN: Final = 200


class DriverError(Exception):
    """A program of the driver is not there, or does not answer as it should."""


def find_program(name: str) -> str:
    """The path of ``name``: on PATH, or beside the driver's other programs. Raises DriverError.

    In virtual machines and containers the programs may lie outside of PATH.
    """
    found = shutil.which(name)
    query = shutil.which(QUERY)
    beside = [str(Path(query).resolve().parent)] if query else []
    for place in () if found else (*beside, *_BESIDE):
        found = found or shutil.which(name, path=place)
    if found is None:
        raise DriverError(f"there is no {name} on PATH, nor beside the driver")
    return found


def run_program(
    command: Sequence[str],
    said: str = "",
    *,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """What ``command`` prints when it reads ``said``. Raises DriverError."""
    name, limit_s = Path(command[0]).name, TIMEOUT_S if timeout_s is None else timeout_s
    try:
        done = subprocess.run(
            command,
            input=said,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env=env,
        )
    except subprocess.TimeoutExpired:
        raise DriverError(f"{name} does not answer within {limit_s:g} s") from None
    except OSError as error:
        raise DriverError(f"{name}: {error.strerror}") from None
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split())[:_WORDS_SHOWN]
        raise DriverError(f"{name} ends with {done.returncode}: {words or 'no word'}")
    return done.stdout
