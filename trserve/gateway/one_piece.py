"""A response of known length leaves in one piece: its head waits for the first of its body.

Two writes are two system calls, two packets, and a client that is woken twice. Knows what the head
of a response looks like; nothing of requests.
"""

from __future__ import annotations

import asyncio
from typing import Final

_HEAD: Final = b"HTTP/1.1 "
_LENGTH: Final = b"\r\ncontent-length: "


class OnePiece:
    """What a response is written to, in the place of ``transport``.

    A head without a length passes at once, and so does whatever is no head: streams are written
    past this object, and ``100 Continue`` is waited for. What is held is lost with a response that
    breaks off before its body, of which nothing then was sent.
    """

    __slots__ = ("_held", "_transport", "write_past")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held = b""
        self.write_past = transport.write

    def write(self, data: bytes) -> None:
        """Write ``data`` with the head that is held, or hold it."""
        if self._held:
            held, self._held = self._held, b""
            self.write_past(held + data)
        elif data.startswith(_HEAD) and _LENGTH in data:
            self._held = data
        else:
            self.write_past(data)

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close once everything is written."""
        self._transport.close()
