"""What the control groups of this process (a container's, a service's) leave of memory.

Reads their files, of version 1 and 2; knows nothing of the machine's memory or of who wants any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN_CGROUPS: Final = Path("/proc/self/cgroup")


def memory_left() -> int | None:
    """The least that any control group of this process leaves, in bytes; None without a limit.

    What the page cache holds and can give back counts as free.
    """
    left = [
        limit - used
        for directory in _directories()
        if (limit := _number(directory, "memory.max", "memory.limit_in_bytes")) is not None
        and (used := _used(directory)) is not None
        # Version 1 says a number near 2**63 for no limit.
        and limit < 2**60
    ]
    return min(left, default=None)


def _directories() -> list[Path]:
    """The groups of this process, up to the root, that count memory."""
    found: list[Path] = []
    for line in _read(_OWN_CGROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUPS / "memory" if controllers else _CGROUPS
        group = root / path.lstrip("/")
        # In a container the path may be the host's; its own group is the root then.
        found += [each for each in (group, *group.parents) if each.is_relative_to(root)]
    return found


def _used(directory: Path) -> int | None:
    used = _number(directory, "memory.current", "memory.usage_in_bytes")
    if used is None:
        return None
    text = _read(directory / "memory.stat")
    cached = {line.split()[0]: int(line.split()[1]) for line in text.splitlines() if line.strip()}
    return used - cached.get("total_inactive_file", cached.get("inactive_file", 0))


def _number(directory: Path, *names: str) -> int | None:
    for name in names:
        if (text := _read(directory / name).strip()).isdigit():
            return int(text)
    return None


def _read(file: Path) -> str:
    """What is in it; nothing where it is not there, or not ours to read."""
    try:
        return file.read_text()
    except OSError:
        return ""
