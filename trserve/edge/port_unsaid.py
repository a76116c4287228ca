"""What an edge port had to say when there was no room to, until there is.

Bounded; what a home has not heard it asks for again when it speaks of the request, so that whatever
is kept of one counts only until then. Knows no slots and no visits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from trserve.edge.port_session import Key

MAX_UNSAID: Final = 4096


class Unsaid:
    """A frame for each request, in the order in which they were to be sent.

    Args:
        send: sends a frame to whoever dialled; False if it cannot be sent now.
    """

    def __init__(self, send: Callable[[bytes, bytes], bool]) -> None:
        self._send = send
        self._frames: dict[Key, bytes] = {}

    def __len__(self) -> int:
        return len(self._frames)

    def say(self, key: Key, frame: bytes) -> None:
        """Send ``frame``, the last word on the request, now or when there is room."""
        self._frames.pop(key, None)
        if self._send(key[0], frame):
            return
        if len(self._frames) >= MAX_UNSAID:
            del self._frames[next(iter(self._frames))]
        self._frames[key] = frame

    def forget(self, key: Key) -> None:
        """Its home speaks of the request, and whatever holds then is said anew."""
        self._frames.pop(key, None)

    def retry(self, is_here: Callable[[bytes], bool]) -> None:
        """Send what has found room. Who has gone speaks of its requests when it is back."""
        frames, self._frames = self._frames, {}
        for key, frame in frames.items():
            if is_here(key[0]):
                self.say(key, frame)
