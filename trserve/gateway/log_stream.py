"""Standard error as a log that nobody need read: what has no room is left out, and counted.

A pipe whose reader stands still is full after 64 KiB, and a terminal can be stopped; to write then
is to wait, and every stream of the process with it. Knows nothing of what the lines say.
"""

from __future__ import annotations

import io
import os
import select
from collections.abc import Callable


def _plain_note(lines: int) -> str:
    return f"trserve gateway: {lines} lines were left out here: nobody read the log\n"


class LogStream(io.TextIOBase):
    """Writes to a descriptor, whole lines a call, and waits for nobody.

    Others may write to the same pipe. It has room for ``PIPE_BUF`` bytes whenever it says that it
    has any, but for what they write between the question and the write.

    Attributes:
        note: what to say of so many lines, once somebody reads again.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._left_out = 0
        self.note: Callable[[int], str] = _plain_note

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, text: str) -> int:
        """All of ``text``, or as much of it as there is room for."""
        if self._left_out and self._put(self.note(self._left_out)):
            self._left_out = 0
        if not self._put(text):
            self._left_out += 1
        return len(text)

    def _put(self, text: str) -> bool:
        """Whether there was room for all of it."""
        data = text.encode(errors="backslashreplace")
        while data:
            # A reader that is gone, or a descriptor that is closed, is an event too, and no room.
            if [event for _, event in self._poll.poll(0)] != [select.POLLOUT]:
                return False
            data = data[os.write(self._descriptor, data[: select.PIPE_BUF]) :]
        return True
