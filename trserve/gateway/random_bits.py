"""Random ids and seeds for requests, drawn from the system many at a time.

Each is as hard to guess as one that was drawn alone: no bytes are given twice. For one process
that does not fork, and its threads. Knows nothing of what they are for.
"""

from __future__ import annotations

import os
from typing import Final

_DRAWN: Final = 4096


class RandomBits:
    """A pool that is drawn again when it is used up."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def take(self) -> bytes:
        """16 bytes."""
        try:
            return self._pieces.pop()
        except IndexError:  # also where another thread took the last
            drawn = os.urandom(_DRAWN)
            self._pieces += [drawn[at : at + 16] for at in range(16, _DRAWN, 16)]
            return drawn[:16]


_pool: Final = RandomBits()


def new_hex() -> str:
    """32 hexadecimal digits."""
    return _pool.take().hex()


def new_seed() -> int:
    """63 bits."""
    return int.from_bytes(_pool.take()[:8], "little") >> 1
