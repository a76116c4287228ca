"""The private directory of a running server, and the removal of dead ones. Knows no sockets.

The directory holds the control socket only. Its owner keeps an exclusive ``flock`` on a file
inside; the kernel releases it however the owner ends, so a lock that can be taken belongs to a
dead server. (A pid in a file would lie as soon as the pid is used again.)
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import Final

_LOCK_NAME: Final = "owner.lock"
_UNLOCKED_GRACE_S: Final = 60.0


def _prefix() -> str:
    return f"trserve-{os.getuid()}-"


class InstanceDirectory:
    """A 0700 directory that lives as long as its owner."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_prefix()))
        # Locked under another name first: a lock file that can be seen is always held, so that
        # a server starting at the same moment cannot take this one for dead.
        hidden = self.path / (_LOCK_NAME + ".new")
        self._lock = os.open(hidden, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hidden.rename(self.path / _LOCK_NAME)

    @property
    def control_endpoint(self) -> str:
        """The ZeroMQ endpoint; short, because a socket path has 107 bytes at most."""
        return f"ipc://{self.path}/control"

    def remove(self) -> None:
        """Remove the directory; safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


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
            lock = (path / _LOCK_NAME).stat()
            ours = _is_ours(path)
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
    removed = []
    for path in Path(tempfile.gettempdir()).glob(_prefix() + "*"):
        try:
            dead = _is_ours(path) and _is_dead(path)
        except FileNotFoundError:
            continue  # its owner removed it meanwhile
        if dead:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _is_ours(path: Path) -> bool:
    # Not following links: anybody may put one with this name into a shared directory.
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _is_dead(path: Path) -> bool:
    try:
        fd = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # Just being created or removed, unless it has been so for long.
        return time.time() - path.stat().st_mtime > _UNLOCKED_GRACE_S
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
