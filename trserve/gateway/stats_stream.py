"""``GET /v1/trserve/stats/stream``: what the server does, about once a second, as events.

All listeners get the same bytes, made once; nobody looks while nobody listens. Knows how events
reach a connection; what is in them is ``stats``' matter.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import orjson

from trserve.errors import RequestError
from trserve.gateway.connection import Connection
from trserve.gateway.replies import Handler, Receive, Scope, Send
from trserve.gateway.stats import Stats

PATH: Final = "/v1/trserve/stats/stream"
EVERY_S: Final = 1.0
MOST_LISTENERS: Final = 16
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Moment(NamedTuple):
    """``name`` of the server's phase, what it ``means`` in words, and whether it is the ``last``
    of which events tell: an open stream must not hold up a drain."""

    name: str
    means: str
    last: bool


class Listener:
    """One connection that is written to."""

    def __init__(self, connection: Connection, *, chunked: bool) -> None:
        self._connection = connection
        self._chunked = chunked
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def write(self, event: bytes) -> None:
        """Send the event, unless the client is too slow to have read the ones before."""
        if self._connection.paused or self._connection.lost:
            return
        framed = b"%x\r\n%b\r\n" % (len(event), event) if self._chunked else event
        self._connection.write(framed)

    def end(self) -> None:
        """The response ends, or its client is gone."""
        if not self.ended.done():
            self.ended.set_result(None)


class StatsStream:
    """The route.

    Args:
        moment: what the server is at.
        every_s: seconds between two events.
    """

    def __init__(
        self, stats: Stats, moment: Callable[[], Moment], every_s: float = EVERY_S
    ) -> None:
        self._stats = stats
        self._moment = moment
        self._every_s = every_s
        self._listeners: set[Listener] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def table(self) -> dict[str, dict[str, Handler]]:
        """The route and its method."""
        return {PATH: {"GET": self._listen}}

    async def _listen(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": b""})
            return
        if len(self._listeners) >= MOST_LISTENERS:
            raise RequestError(
                f"{MOST_LISTENERS} clients follow the statistics already; close one of them, or "
                "read /metrics",
                status=429,
                code="too_many_listeners",
                retry_after=5,
            )
        connection: Connection = scope["state"]["connection"]
        chunked = scope["http_version"] != "1.0"
        if not chunked:
            connection.send_unframed()
        listener = Listener(connection, chunked=chunked)
        self._listeners.add(listener)
        connection.on_lost = listener.end
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            self._begin(listener)
            if connection.lost:
                listener.end()
            await listener.ended
        finally:
            connection.on_lost = None
            self._listeners.discard(listener)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _begin(self, listener: Listener) -> None:
        """A first event at once; the clock runs from the first listener on."""
        if self._timer is None:
            self._stats.reset()
            self._tick()
        else:
            listener.write(self._encoded({}))

    def _tick(self) -> None:
        self._timer = None
        if not self._listeners:
            return
        last = self._moment().last
        event = self._encoded(self._stats.take(time.monotonic()))
        for listener in tuple(self._listeners):
            listener.write(event)
            if last:
                listener.end()
        if not last:
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self._tick)

    def _encoded(self, stats: dict[str, object]) -> bytes:
        moment = self._moment()
        said = {"time_s": round(time.time(), 3), "phase": moment.name, "detail": moment.means}
        return b"data: " + orjson.dumps(said | stats) + b"\n\n"
