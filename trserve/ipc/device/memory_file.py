"""Memory that one process owns and others of the same user map. Knows nothing of what is in it.

A ``memfd`` has no name; a peer finds it under the owner's entry in ``/proc``, which is open to the
same user in the same process namespace (what CUDA's handles ask for as well). So it cannot outlive
its owner in a file system, and cannot be opened once the owner is gone.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from typing import Final, NamedTuple

import numpy as np

_F_ADD_SEALS: Final = 1033
_SEAL_SHRINK_GROW: Final = 0x2 | 0x4


class Place(NamedTuple):
    """Where a memory file is: the owner's pid and descriptor; and what must be found there."""

    pid: int
    fd: int
    inode: int
    nbytes: int


class MemoryFile:
    """A mapping of such a file.

    While another process has it open, it holds a shared lock, which the kernel takes back however
    that process ends; so the owner can ask whether anybody has it.

    Attributes:
        address: of the first byte, in this process.
        bytes, words: the same memory, as bytes and as int64 words.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd)
        self._map = mmap.mmap(fd, nbytes)
        self.address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        self.bytes = memoryview(self._map)
        self.words = self.bytes.cast("q")
        self.place = Place(os.getpid(), fd, os.fstat(fd).st_ino, nbytes)

    @classmethod
    def create(cls, name: str, nbytes: int) -> MemoryFile:
        """A zeroed one; sealed, so that no peer can cut it short under our feet."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SHRINK_GROW)
        return cls(fd, nbytes)

    @classmethod
    def open(cls, place: Place) -> MemoryFile:
        """Map another process's. OSError if it is gone, or something else is there."""
        fd = os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDWR | os.O_CLOEXEC)
        found = os.fstat(fd)
        if (found.st_ino, found.st_size) != (place.inode, place.nbytes):
            os.close(fd)
            raise FileNotFoundError(f"process {place.pid} has given that memory back")
        fcntl.flock(fd, fcntl.LOCK_SH)
        return cls(fd, place.nbytes)

    def is_open_elsewhere(self) -> bool:
        """Whether another process has it open (asked by the owner)."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """Unmap it; nobody may use ``address`` or the views any more."""
        self.words.release()
        self.bytes.release()
        self._map.close()
        self._close_fd()
