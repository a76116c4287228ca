"""Private directories of processes, and the removal of those whose owner is dead.

An owner keeps an exclusive ``flock`` on a file inside; the kernel releases it however the owner
ends, so a lock that can be taken belongs to a dead one. (A pid in a name or a file would lie as
soon as the pid is used again, or where another container shares the directory above.) Knows nothing
of what is in them.
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

LOCK_NAME: Final = "owner.lock"
_UNLOCKED_GRACE_S: Final = 60.0


class OwnedDirectory:
    """A 0700 directory that lives as long as its owner; its name begins with ``prefix``."""

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        # Locked under another name first: a lock file that can be seen is always held, so that
        # whoever sweeps at the same moment cannot take this one for a dead one's.
        hidden = self.path / (LOCK_NAME + ".new")
        self._lock = os.open(hidden, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hidden.rename(self.path / LOCK_NAME)

    def remove(self) -> None:
        """Remove the directory; safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep_dead(prefix: str) -> list[Path]:
    """Remove this user's directories of ``prefix`` whose owner is dead; returns them."""
    removed = []
    for path in Path(tempfile.gettempdir()).glob(prefix + "*"):
        try:
            dead = is_ours(path) and _is_dead(path)
        except FileNotFoundError:
            continue  # its owner removed it meanwhile
        if dead:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def is_ours(path: Path) -> bool:
    """Whether it is a directory of this user's. Raises FileNotFoundError."""
    # Not following links: anybody may put one with this name into a shared directory.
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _is_dead(path: Path) -> bool:
    try:
        fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
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
