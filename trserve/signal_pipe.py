"""SIGINT and SIGTERM as bytes in a pipe, for a loop that waits on descriptors.

Knows nothing of what a signal means.
"""

from __future__ import annotations

import os
import signal


class SignalPipe:
    """Takes both signals for this process, from its making on; in the main thread only."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # the pipe carries the number

    def read(self) -> bytes:
        """The numbers of the signals that came."""
        return os.read(self.fd, 64)

    def close(self) -> None:
        """No longer tell; the handlers stay."""
        signal.set_wakeup_fd(-1)
        os.close(self.fd)
        os.close(self._write)
