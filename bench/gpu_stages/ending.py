"""The end of a stage that takes too long: with all that it started, in the order that spares a GPU.

Servers lead sessions of their own and would outlive their stage, with the GPU's memory. Knows
processes; nothing of what a stage does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from typing import Final

from tests.procfs import descendants, start_time

_WORKERS_S: Final = 6.0
"""How long workers may take whose launcher is gone: they wait for what is on the GPU, up to 3 s."""


def end_stage(process: subprocess.Popen[str]) -> None:
    """Kill ``process``, the leader of its group, then servers, then what is left of them."""
    below = {pid: start_time(pid) for pid in descendants(process.pid)}
    os.killpg(process.pid, signal.SIGKILL)
    for pid in [pid for pid in below if _leads(pid)]:
        _kill(pid)
    until = time.monotonic() + _WORKERS_S
    while time.monotonic() < until and _alive(below):
        time.sleep(0.05)
    for pid in _alive(below):
        _kill(pid)


def _leads(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def _alive(known: dict[int, str | None]) -> list[int]:
    """Those of ``known`` that still run: a number may be another process's by now."""
    return [pid for pid, began in known.items() if began and start_time(pid) == began]


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
