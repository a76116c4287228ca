"""The private directory of a running server, and who runs. Knows no sockets.

The directory holds the control socket only.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from trserve.ipc.owned_directory import LOCK_NAME, OwnedDirectory, is_ours, sweep_dead


def _prefix() -> str:
    return f"trserve-{os.getuid()}-"


class InstanceDirectory(OwnedDirectory):
    """That of this process's server."""

    def __init__(self) -> None:
        super().__init__(_prefix())

    @property
    def control_endpoint(self) -> str:
        """The ZeroMQ endpoint; short, because a socket path has 107 bytes at most."""
        return f"ipc://{self.path}/control"


def remove_abandoned(control_endpoint: str) -> None:
    """Remove the directory of a launcher that was killed; for a child that outlived it."""
    shutil.rmtree(Path(control_endpoint.removeprefix("ipc://")).parent, ignore_errors=True)


def running_instances() -> dict[int, Path]:
    """Directories of this user's servers that run, by the pid of the owner (the launcher).

    The kernel says who holds a lock, so nothing that a file says has to be believed.
    """
    holders = _lock_holders()
    found = {}
    for path in Path(tempfile.gettempdir()).glob(_prefix() + "*"):
        try:
            lock = (path / LOCK_NAME).stat()
            ours = is_ours(path)
        except FileNotFoundError:
            continue  # just being created or removed
        pid = holders.get((os.major(lock.st_dev), os.minor(lock.st_dev), lock.st_ino))
        if ours and pid:
            found[pid] = path
    return found


def _lock_holders() -> dict[tuple[int, int, int], int]:
    """Pids by (major, minor, inode) of the files that are locked by ``flock``."""
    holders = {}
    for line in Path("/proc/locks").read_text().splitlines():
        # "1: FLOCK  ADVISORY  WRITE 6202 fe:00:2146460 0 EOF"; "->" marks one that waits
        fields = line.split()
        if fields[1] == "FLOCK":
            major, minor, inode = fields[5].split(":")
            holders[int(major, 16), int(minor, 16), int(inode)] = int(fields[4])
    return holders


def sweep_dead_instances() -> list[Path]:
    """Remove directories of this user's servers whose owner is dead; returns them."""
    return sweep_dead(_prefix())
