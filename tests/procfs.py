"""What the operating system says of processes and shared memory: /proc and /dev/shm, read only.

Every function takes a process that may end at any moment; an ended one, or a zombie, is absent.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_SHM = Path("/dev/shm")


def pids() -> list[int]:
    """All processes of this machine, zombies too."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on; None for a process that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields


def start_time(pid: int) -> str | None:
    """Ticks since boot at its start: with the process id, an identity that is never reused."""
    fields = stat(pid)
    return fields[19] if fields else None


def cpu_seconds(pid: int) -> float:
    """Processor time it has used, in user and system mode; 0 for one that is gone."""
    fields = stat(pid)
    ticks = int(fields[11]) + int(fields[12]) if fields else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def descendants(root: int) -> list[int]:
    """Children of ``root``, their children and so on, without ``root``."""
    parents = {pid: int(fields[1]) for pid in pids() if (fields := stat(pid))}
    found: list[int] = []
    frontier = {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        found.extend(frontier)
    return sorted(found)


def marked(name: str, value: str) -> set[tuple[int, str]]:
    """(process id, start time) of everything that was started with ``name=value`` set."""
    wanted = f"{name}={value}".encode()
    found = ((pid, start_time(pid)) for pid in pids() if wanted in _environ(pid))
    return {(pid, start) for pid, start in found if start is not None}


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""


def command(pid: int) -> str:
    """Its command line, for reports."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return "ended"
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()


def shm_names() -> set[str]:
    """Everything that exists in /dev/shm."""
    return set(os.listdir(_SHM)) if _SHM.is_dir() else set()


def maps(pid: int) -> str:
    """Its memory map, which names every library and file that it has loaded."""
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def mapped_shm() -> set[str]:
    """Names in /dev/shm that a living process maps: they are its own, of another program."""
    return {name for pid in pids() for name in re.findall(r"/dev/shm/(\S+)", maps(pid))}
