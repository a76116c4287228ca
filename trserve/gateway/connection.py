"""uvicorn's HTTP/1.1 protocol with what a streaming server needs besides.

Limits on the size and number of headers, a callback at the moment a client is gone, bytes written
to the socket without a task in between, and half-closed connections that still get their answer.
Knows no routes and no requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADERS: Final = 128
MAX_HEADER_BYTES: Final = 64 * 1024
STALLED_CLIENT_S: Final = 60.0
SECOND_PROBE_S: Final = 0.02
PROBE_EVERY_S: Final = 1.0

_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)
_PROBE: Final = b"HTTP/1.1 102 Processing\r\n\r\n"


class Connection(HttpToolsProtocol):
    """One client's connection.

    Attributes:
        on_lost: called once when the client is gone while a request is answered.
        on_drained: called when the client reads again after it was too slow.
        paused: whether the client is too slow to be written to now.
        lost: whether the client is gone.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.on_lost: Callable[[], None] | None = None
        self.on_drained: Callable[[], None] | None = None
        self.paused = False
        self.lost = False
        self._header_bytes = 0
        self._stalled: asyncio.TimerHandle | None = None

    def write(self, data: bytes) -> None:
        """Write to the socket now; the caller frames the data."""
        self.transport.write(data)

    @property
    def flushed(self) -> bool:
        """Whether all that was written is in the kernel's hands."""
        return self.transport.is_closing() or not self.transport.get_write_buffer_size()

    def send_unframed(self) -> None:
        """Let the response end with the connection: HTTP/1.0 knows no chunks."""
        self.cycle.chunked_encoding = False

    def refuse_incomplete(self) -> None:
        """Close if a request has begun whose body is not here yet."""
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_complete:
            self.transport.close()

    # -- requests ----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self.scope["state"]["connection"] = self

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._header_bytes += size
        too_many = self.headers is not None and len(self.headers) >= MAX_HEADERS
        if (too_many or self._header_bytes > MAX_HEADER_BYTES) and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)

    # -- the client --------------------------------------------------------------------------

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; it may still read (a half-closed connection).

        A closed socket looks the same from here until something is written to it. A stream finds
        out with its next token; an answer that has not begun asks with interim responses, which
        a client must ignore (RFC 9110, 15.2). A closed socket answers the first with a reset, and
        the second meets the reset: reading has ended, so only a write can find it.
        """
        cycle = self.cycle
        # A body that is not complete never will be.
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        cycle.keep_alive = False
        if self.scope["http_version"] == "1.1":
            self._probe(SECOND_PROBE_S)
        return True

    def _probe(self, next_after_s: float) -> None:
        if self.lost or self.cycle.response_started:
            return
        self.transport.write(_PROBE)
        self.loop.call_later(next_after_s, self._probe, PROBE_EVERY_S)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.lost = True
        if self._stalled is not None:
            self._stalled.cancel()
        if self.on_lost is not None:
            self.on_lost()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.paused = True
        self._stalled = self.loop.call_later(STALLED_CLIENT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.paused = False
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        if self.on_drained is not None:
            self.on_drained()
