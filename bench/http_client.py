"""HTTP/1.1 over one kept-alive connection, as cheaply as Python can: for clients that share cores
with the server they measure.

An ``asyncio.Protocol``; a whole answer is one future, of a stream only the arrival of its first
byte, its end and its last bytes are kept. Knows no routes and no JSON.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Final, Self, cast

CONNECT_TIMEOUT_S: Final = 10.0
_KEPT: Final = 4096
"""Bytes of a stream's end that are kept: its usage, which comes last, is far shorter."""
_HEAD_END: Final = b"\r\n\r\n"
_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"


class HttpError(Exception):
    """An answer that is no 200; ``status`` is 0 where the connection ended before one came."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"status {status}: {body.decode(errors='replace')[:500]}")
        self.status = status


def encode(
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    host: str = "bench",
) -> bytes:
    """The bytes of one request; ``host`` is what its header says, which trserve does not read."""
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n"
    return f"{head}{more}\r\n".encode() + body


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time; closing it amid an answer is leaving the server.

    ``head`` is that of the last answer.
    """

    def __init__(self) -> None:
        self.head = b""
        self._address: tuple[str, int, ssl.SSLContext | None] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._waiter: asyncio.Future[bytes] | None = None
        self._buffer = b""
        self._missing = -1
        self._begun: Callable[[float], None] | None = None
        self._status = 0

    @classmethod
    async def open(cls, host: str, port: int, tls: ssl.SSLContext | None = None) -> Self:
        """Connect, with ``tls`` if given; raises OSError or TimeoutError."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, made = await loop.create_connection(cls, host, port, ssl=tls)
        made._address = host, port, tls
        return made

    async def again(self) -> Self:
        """Another to the same server, and the end of this one: for one that idled too long."""
        self.close()
        assert self._address is not None, "a connection that was opened has an address"
        return await self.open(*self._address)

    @property
    def closed(self) -> bool:
        """Whether another exchange is out of the question."""
        return self._transport is None or self._transport.is_closing()

    async def exchange(self, data: bytes, timeout_s: float) -> bytes:
        """The body of the answer to ``data``; raises HttpError, or TimeoutError."""
        return await self._send(data, timeout_s, None)

    async def stream(self, data: bytes, timeout_s: float, begun: Callable[[float], None]) -> bytes:
        """Read a stream to its end and return its last bytes; raises as :meth:`exchange`.

        ``begun`` is called when its first byte comes, with ``time.perf_counter``: a server that
        sends the head with the first token says by it when that was.
        """
        return await self._send(data, timeout_s, begun)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def _send(
        self, data: bytes, timeout_s: float, begun: Callable[[float], None] | None
    ) -> bytes:
        if self._transport is None or self._transport.is_closing():
            raise HttpError(0, b"the connection is closed")
        self._waiter = asyncio.get_running_loop().create_future()
        self._buffer, self._missing = b"", -1
        self._begun = begun
        self._transport.write(data)
        async with asyncio.timeout(timeout_s):
            return await self._waiter

    # -- asyncio.Protocol --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        if self._missing == 0:
            self._follow(data)
            return
        self._buffer += data
        if self._missing < 0 and not self._read_head():
            return
        if self._missing and len(self._buffer) >= self._missing:
            self._finish(self._buffer)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(HttpError(0, b"the server closed the connection"))

    # -- the parts of an answer --------------------------------------------------------------

    def _read_head(self) -> bool:
        """Whether the head is there; the body's length, or 0 for chunks, is then known."""
        head, found, rest = self._buffer.partition(_HEAD_END)
        if not found:
            return False
        self.head = head
        self._status = int(head[9:12])
        self._buffer = rest
        length = content_length(head)
        if length is not None:
            self._missing = max(length, 1)
            return True
        self._missing = 0
        if self._begun is not None and self._status == 200:
            self._begun(time.perf_counter())
        self._follow(b"")
        return False

    def _follow(self, data: bytes) -> None:
        """A stream's end is kept, of an answer in chunks that is none all of it."""
        self._buffer += data
        if self._begun is not None:
            self._buffer = self._buffer[-_KEPT:]
        if self._buffer.endswith(_LAST_CHUNK):
            self._finish(self._buffer)

    def _finish(self, body: bytes) -> None:
        assert self._waiter is not None
        if self._waiter.done():
            return
        if self._status == 200:
            self._waiter.set_result(body)
        else:
            self._waiter.set_exception(HttpError(self._status, body))


def content_length(head: bytes) -> int | None:
    """The body's length that a response's head names; None for one sent in chunks."""
    _, found, rest = head.lower().partition(b"content-length:")
    return int(rest.partition(b"\r\n")[0]) if found else None
