"""Commands that the host writes and a kernel gives back: the bounded queue of a CUDA device.

Each has four int64 words (kernels.COMMAND_WORDS) and room for one record, in host memory that the
device reads. A ticket numbers every command; its ``state`` word is ``-ticket`` once it was asked
for and ``ticket`` once the kernel's last store gave it back, so what is free is known without
asking the driver. Knows no CUDA: the memory may be any.

Memory order. The host writes words and records, then launches: the launch publishes them. The
kernel's store of ``state`` is a release, so that a host that sees it may write the record again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from trserve.ipc.device.inbox import RECORD_BYTES
from trserve.ipc.device.kernels import COMMAND_WORDS

CAPACITY: Final = 256
_STATE: Final = COMMAND_WORDS - 1
_COMMAND_BYTES: Final = 8 * COMMAND_WORDS
STAGING_BYTES: Final = CAPACITY * (_COMMAND_BYTES + RECORD_BYTES)


class Staging:
    """``memory`` is :data:`STAGING_BYTES` of zeros, which the device sees at ``address``."""

    def __init__(self, memory: memoryview, address: int) -> None:
        self.address = address
        self._words = memory[: CAPACITY * _COMMAND_BYTES].cast("q")
        self._records = memory[CAPACITY * _COMMAND_BYTES :]
        self.last = 0  # the ticket given out last
        self._retired = 0  # all tickets up to this one were given back

    def write(self, commands: Sequence[tuple[int | bytes, int, int]]) -> int | None:
        """Take in (source or record, entry, third word) each.

        Returns the index of the first, the others follow (modulo :data:`CAPACITY`); None, with
        nothing taken in, when so many are not free.
        """
        if len(commands) > CAPACITY or not self.is_done(self.last + len(commands) - CAPACITY):
            return None
        first = (self.last + 1) % CAPACITY
        for source, entry, third in commands:
            self.last += 1
            index = self.last % CAPACITY
            at = COMMAND_WORDS * index
            words = self._words
            words[at] = self._keep(index, source) if isinstance(source, bytes) else source
            words[at + 1], words[at + 2], words[at + _STATE] = entry, third, -self.last
        return first

    def take_back(self, count: int) -> None:
        """The last ``count`` commands were never launched: nobody else will give them back."""
        for ticket in range(self.last - count + 1, self.last + 1):
            self._words[COMMAND_WORDS * (ticket % CAPACITY) + _STATE] = ticket

    def is_done(self, ticket: int) -> bool:
        """Whether ``ticket`` and all before it were given back."""
        while self._retired < ticket:
            at = COMMAND_WORDS * ((self._retired + 1) % CAPACITY) + _STATE
            if self._words[at] < 0:
                return False
            self._retired += 1
        return True

    def _keep(self, index: int, record: bytes) -> int:
        offset = RECORD_BYTES * index
        self._records[offset : offset + len(record)] = record
        return self.address + CAPACITY * _COMMAND_BYTES + offset
