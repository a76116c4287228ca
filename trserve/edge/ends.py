"""Sessions that are over, until the other side is known to have heard of it.

What is sent last on a connection may be lost with it, and then nothing at the other side would end
what nobody wants any more. A connection keeps its order, so the answer to a ping says that all that
was sent before the ping has come. Knows numbers; no sockets and no sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MOST: Final = 4096
"""Kept while the other side is away; what is beyond it ends there after a while by itself."""


class Ends:
    """In the order in which they came."""

    def __init__(self) -> None:
        self._unsent: dict[int, None] = {}
        self._unheard: dict[int, None] = {}
        self._asked: tuple[int, tuple[int, ...]] | None = None

    def __bool__(self) -> bool:
        """Whether any is to be sent."""
        return bool(self._unsent)

    def add(self, number: int) -> None:
        """``number`` is over."""
        if len(self._unsent) + len(self._unheard) < MOST:
            self._unsent[number] = None

    def send(self, send: Callable[[int], bool]) -> None:
        """Send as many as there is room for: ``send`` returns False where there is none."""
        while self._unsent:
            number = next(iter(self._unsent))
            if not send(number):
                return
            del self._unsent[number]
            self._unheard[number] = None

    def pinged(self, stamp: int) -> None:
        """A ping with ``stamp``, larger than any before, was sent after them."""
        if self._asked is None and self._unheard:
            self._asked = stamp, tuple(self._unheard)

    def ponged(self, stamp: int) -> None:
        """The ping with ``stamp`` was answered."""
        if self._asked is not None and stamp >= self._asked[0]:
            for number in self._asked[1]:
                self._unheard.pop(number, None)
            self._asked = None

    def reconnected(self) -> None:
        """There is another connection: what may have been lost is to be sent again."""
        self._unsent = {**self._unheard, **self._unsent}
        self._unheard.clear()
        self._asked = None
