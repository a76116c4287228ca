"""uvicorn's HTTP/1.1 protocol with what a streaming server needs besides.

Limits on the size and number of headers and on how slowly a request may come, a callback at the
moment a client is gone, bytes written to the socket without a task in between, and half-closed
connections that still get their answer. Knows no routes and no requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from trserve.errors import RequestError
from trserve.gateway.one_piece import OnePiece
from trserve.gateway.responses import error_body

if TYPE_CHECKING:
    from trserve.gateway.cors import Header
    from trserve.gateway.visit import Visit

MAX_HEADERS: Final = 128
MAX_HEADER_BYTES: Final = 64 * 1024
STALLED_CLIENT_S: Final = 60.0
"""For :data:`LEAST_BODY_BYTES` of an answer to be taken, where more waits."""
SECOND_PROBE_S: Final = 0.02
PROBE_EVERY_S: Final = 1.0

LEAST_BODY_BYTES: Final = 16 * 1024
_OK: Final = b"HTTP/1.1 200 OK\r\n"
_PROBE: Final = b"HTTP/1.1 102 Processing\r\n\r\n"


class Timeouts(NamedTuple):
    """How slowly a request may come; 0 for no limit.

    ``header_s``: from its first byte, or the connection's beginning, to the end of its headers;
    ``body_s``: for :data:`LEAST_BODY_BYTES` more of its body, or the body's end.
    """

    header_s: float = 15.0
    body_s: float = 15.0


def _refusal(status: int, message: str) -> bytes:
    """A whole response, after which the connection ends."""
    body = error_body(RequestError(message, status=status))
    return (
        b"HTTP/1.1 %d %b\r\nserver: trserve\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\nconnection: close\r\n\r\n%b"
        % (status, HTTPStatus(status).phrase.encode(), len(body), body)
    )


_MALFORMED: Final = _refusal(400, "this is no valid HTTP request")
_TOO_LARGE: Final = _refusal(
    431, f"a request has {MAX_HEADERS} headers and {MAX_HEADER_BYTES} bytes of them at most"
)
_LATE_HEADERS: Final = _refusal(408, "the request's headers took too long")
_LATE_BODY: Final = _refusal(408, "the request's body took too long")


_NO_TIMEOUTS: Final = Timeouts(0, 0)


class Connection(HttpToolsProtocol):
    """One client's connection.

    Attributes:
        on_lost: called once when the client is gone while a request is answered.
        on_drained: called when the client reads again after it was too slow.
        on_silence: writes into a stream what no client reads, so that a closed socket is found.
        paused: whether the client is too slow to be written to now.
        lost: whether the client is gone.
        visit: the request that is answered.
        write: writes to the socket now; the caller frames the data.
    """

    write: Callable[[bytes], None]

    def __init__(self, *arguments: Any, timeouts: Timeouts = _NO_TIMEOUTS, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._timeouts = timeouts
        self.on_lost: Callable[[], None] | None = None
        self.on_drained: Callable[[], None] | None = None
        self.on_silence: Callable[[], None] | None = None
        self.paused = False
        self.lost = False
        self.visit: Visit | None = None
        self._header_bytes = 0
        # Headers that are still coming: whether, how much the parser holds, until when.
        self._in_head, self._has_begun, self._held_bytes = True, False, 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._body_bytes = 0
        self._stalled: asyncio.TimerHandle | None = None

    @property
    def flushed(self) -> bool:
        """Whether all that was written is in the kernel's hands."""
        return self.transport.is_closing() or not self.transport.get_write_buffer_size()

    def send_unframed(self) -> None:
        """Let the response end with the connection: HTTP/1.0 knows no chunks."""
        self.cycle.chunked_encoding = False

    def reply(self, scope: Mapping[str, Any], headers: Iterable[Header], body: bytes) -> bool:
        """Write all of the response, of status 200, to the request of ``scope``, which is no HEAD.

        At once, without uvicorn's checks of each header and a task's turns for two messages. False,
        and nothing, where somebody must wait: the client is too slow, or gone.
        """
        cycle = self.cycle
        if cycle.scope is not scope or cycle.response_started or cycle.disconnected or self.paused:
            return False
        cycle.response_started = cycle.response_complete = True
        pieces = [_OK]
        for name, value in (*self.server_state.default_headers, *headers):
            pieces += (name, b": ", value, b"\r\n")
        pieces += (b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n", body)
        cycle.transport.write_past(b"".join(pieces))  # type: ignore[attr-defined]
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
        return True

    def refuse_incomplete(self) -> None:
        """Close if a request has begun whose body is not here yet."""
        cycle = self.cycle
        if cycle is not None and cycle.more_body and not cycle.response_complete:
            self.transport.close()

    # -- requests ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.write = transport.write
        self._watch_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self._has_begun = True
        self.scope["state"]["connection"] = self

    def on_url(self, url: bytes) -> None:
        self._header_bytes += len(url)
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(_TOO_LARGE)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES or len(self.headers) >= MAX_HEADERS:
            self._refuse(_TOO_LARGE)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = self._has_begun = False
        self._held_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if not self.transport.is_closing():
            super().on_headers_complete()
            # The response to HEAD has a length and no body.
            if self.cycle is not None and self.scope["method"] != "HEAD":
                self.cycle.transport = OnePiece(self.transport)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._held_bytes = True, -1
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        if self.cycle is not None:
            super().on_message_complete()
            # A long last part stopped the reading, and nobody asks for more of this request: while
            # nothing is read, a client that leaves is not noticed.
            if not self.pipeline:
                self.flow.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if not self._in_head:
            self._watch_body()
        elif self._held_bytes < 0:  # the bytes were, at least in part, those of another request
            self._held_bytes = 0
            if self._has_begun:
                self._watch_head()
        else:
            # One header that never ends is in the parser's hands, and no callback counts it.
            self._held_bytes += len(data)
            if self._held_bytes > MAX_HEADER_BYTES:
                self._refuse(_TOO_LARGE)
            else:
                self._watch_head()  # an empty line begins no request, and ends the idle time

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused, in JSON as every other error."""
        self._refuse(_MALFORMED)

    def _refuse(self, response: bytes) -> None:
        """Write ``response`` and close, unless that would cut another one."""
        if self.transport.is_closing():
            return
        if not self._is_answering:
            self.transport.write(response)
        self.transport.close()

    @property
    def _is_answering(self) -> bool:
        """Whether a response has begun and not ended."""
        cycle = self.cycle
        return cycle is not None and cycle.response_started and not cycle.response_complete

    # -- slow requests -----------------------------------------------------------------------

    def _watch_head(self) -> None:
        if self._head_timer is None and self._timeouts.header_s:
            self._head_timer = self.loop.call_later(self._timeouts.header_s, self._on_late_head)

    def _on_late_head(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._watch_head()  # it waits behind another request, and nobody reads on
        elif self._has_begun:
            self._refuse(_LATE_HEADERS)
        else:
            self.transport.close()

    def _watch_body(self) -> None:
        if self._body_timer is None and self._timeouts.body_s:
            self._body_bytes = 0
            self._body_timer = self.loop.call_later(self._timeouts.body_s, self._on_late_body)

    def _on_late_body(self) -> None:
        self._body_timer = None
        if self.transport.is_closing():
            return
        # Where nobody reads, or another request is answered first, the client is not to blame.
        if self._body_bytes >= LEAST_BODY_BYTES or self.flow.read_paused or self.pipeline:
            self._watch_body()
            return
        if self.cycle.response_complete:
            self.transport.close()  # it was refused before its body was here
            return
        if self.visit is not None and not self.cycle.response_started:
            self.visit.status = HTTPStatus.REQUEST_TIMEOUT
        self._refuse(_LATE_BODY)

    # -- the client --------------------------------------------------------------------------

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; it may still read (a half-closed connection).

        A closed socket looks the same from here until something is written to it: a stream's
        comments, or interim responses before the answer has begun, which a client must ignore (RFC
        9110, 15.2). A closed socket answers the first with a reset, and the second meets the reset:
        reading has ended, so only a write can find it.
        """
        cycle = self.cycle
        # A body that is not complete never will be.
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        cycle.keep_alive = False
        self._probe(SECOND_PROBE_S)
        return True

    def _probe(self, next_after_s: float) -> None:
        if self.lost or self.cycle.response_complete:
            return
        if self.cycle.response_started:
            if self.on_silence is not None and not self.paused:
                self.on_silence()
        elif self.scope["http_version"] == "1.1":  # which 1.0 knows no interim responses of
            self.transport.write(_PROBE)
        self.loop.call_later(next_after_s, self._probe, PROBE_EVERY_S)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.lost = True
        for timer in (self._stalled, self._head_timer, self._body_timer):
            if timer is not None:
                timer.cancel()
        if self.on_lost is not None:
            self.on_lost()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.paused = True
        self._watch_writing()

    def _watch_writing(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stalled = self.loop.call_later(STALLED_CLIENT_S, self._on_stalled, left)

    def _on_stalled(self, left: int) -> None:
        """End one that takes next to nothing of the ``left`` bytes; a slow one that reads may."""
        if left - self.transport.get_write_buffer_size() >= LEAST_BODY_BYTES:
            self._watch_writing()
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.paused = False
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        if self.on_drained is not None:
            self.on_drained()


def connection_config(app: Any, keep_alive_s: int) -> Config:
    """What uvicorn needs to know to serve ``app`` over :class:`Connection`; nothing is logged."""
    config = Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nobody is believed to be a proxy
        timeout_keep_alive=keep_alive_s,
    )
    config.load()
    return config
