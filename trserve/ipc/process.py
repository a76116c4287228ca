"""What every process of a server does about the others' lives. Knows no slab and no model.

Children start by ``subprocess.Popen`` with inherited descriptors named on the command line. A
child's first act is to tie itself to its parent, because a launcher that was killed cannot clean
up: the kernel signals it when the spawning thread ends, and the launcher's pidfd in every poller
covers what that misses.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def die_with_parent(parent_pid: int, signal_number: int = signal.SIGKILL) -> None:
    """Have the kernel send ``signal_number`` to this process when its parent ends.

    The parent may have ended before the call, so its pid is compared afterwards.
    """
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent_pid:
        sys.exit("trserve: the launcher ended while this process was starting")


def become_subreaper() -> None:
    """Make this process the parent of orphans among its descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


STEP_SPIN: Final = 20_000
"""Rounds, some tens of microseconds, that a thread spins between two loops of a step."""


def thread_environment(threads: int, *, cores_to_itself: bool = False) -> dict[str, str]:
    """Thread limits that OpenMP and BLAS read at exec; after ``import torch`` it is too late.

    Passive waiting matters: two pools that spin for two cores cost each other 10x and more. But a
    team that sleeps between the hundred loops of a step takes twice as long as one that does not,
    so threads that have their cores to themselves spin for a moment before they sleep. (A worker
    without a step has no loop to wait for; nothing spins while idle.)
    """
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": str(STEP_SPIN if cores_to_itself and threads > 1 else 0),
        "MALLOC_ARENA_MAX": "2",
    }


def spawn(
    module: str, arguments: Sequence[str], *, fds: Sequence[int], env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start ``python -m module arguments`` in a process group of its own.

    A group of its own, because a terminal sends Ctrl-C to the whole foreground group, and only
    the launcher decides what that means.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        pass_fds=tuple(fds),
        env={**os.environ, **env},
        process_group=0,
    )
