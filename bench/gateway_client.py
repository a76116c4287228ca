"""Many connections to one server from one process, at little cost each.

Nothing is parsed: a response's first bytes, its events and its end are found by what they look
like. Knows no tokens and no measurements.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable
from typing import Final, cast

_EVENT: Final = b"data: {"
_LAST: Final = b"0\r\n\r\n"


def raise_file_limit() -> None:
    """Let this process, and those that it starts, have as many connections as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Client(asyncio.Protocol):
    """One keep-alive connection.

    Attributes:
        status: of the last response.
        first_s: from asking to the first bytes of an event, or of a body.
        events: that came so far, in all responses.
        lost: the connection is closed.
    """

    def __init__(self) -> None:
        self.status = 0
        self.first_s = 0.0
        self.events = 0
        self.lost = False
        self._asked_s = 0.0
        self._whole = False
        self._expected = -1
        self._tail = b""
        self._done: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def ask(self, request: bytes) -> asyncio.Future[None]:
        """Send ``request``; the future is done when the response, a stream or not, has ended."""
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self.status, self._expected, self._tail = 0, -1, b""
        self._asked_s = time.perf_counter()
        self.first_s = 0.0
        self._transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        if not self.status:
            self._begin(data)
        self.events += data.count(_EVENT)
        if self._expected >= 0:
            self._tail += data
            if len(self._tail) >= self._expected:
                self._end()
            return
        self._tail = (self._tail + data)[-len(_LAST) :]
        if self._tail == _LAST:
            self._end()

    def _begin(self, data: bytes) -> None:
        """The head comes in one piece: it is short, and written at once."""
        self.first_s = time.perf_counter() - self._asked_s
        self.status = int(data[9:12])
        head, _, _ = data.partition(b"\r\n\r\n")
        _, found, length = head.partition(b"content-length: ")
        if found:
            self._expected = len(head) + 4 + int(length.split(b"\r\n")[0])

    def _end(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self._done is not None and not self._done.done():
            self._done.set_exception(exc or ConnectionError("the server closed the connection"))

    def close(self) -> None:
        """Leave, whatever is under way."""
        if self._done is not None:
            self._done.cancel()
        if self._transport is not None:
            self._transport.abort()


async def connect_all(host: str, port: int, count: int) -> list[Client]:
    """``count`` connections, made at once."""
    loop = asyncio.get_running_loop()
    make: Callable[[], Client] = Client
    pairs = await asyncio.gather(*(loop.create_connection(make, host, port) for _ in range(count)))
    return [client for _, client in pairs]
