"""The private directory of a running server, and the removal of dead ones. Knows no sockets.

The directory holds the control socket only. Its owner keeps an exclusive ``flock`` on a file
inside; the kernel releases it however the owner ends, so a lock that can be taken belongs to a
dead server. (A pid in a file would lie as soon as the pid is used again.)
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

_LOCK_NAME: Final = "owner.lock"


def _prefix() -> str:
    return f"trserve-{os.getuid()}-"


class InstanceDirectory:
    """A 0700 directory that lives as long as its owner."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_prefix()))
        self._lock = os.open(self.path / _LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

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


def sweep_dead_instances() -> list[Path]:
    """Remove directories of this user's servers whose owner is dead; returns them."""
    removed = []
    for path in Path(tempfile.gettempdir()).glob(_prefix() + "*"):
        if path.is_dir() and path.stat().st_uid == os.getuid() and _is_dead(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _is_dead(path: Path) -> bool:
    try:
        fd = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False  # just being created, or just being removed by its owner
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
