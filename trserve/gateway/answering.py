"""How a checked request gets its answer over a connection: prepared, submitted, written.

The same path for every route that generates; what an answer looks like is its sinks' business.
Knows no routes and no formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from trserve.errors import RequestError
from trserve.gateway import long_work
from trserve.gateway.connection import Connection
from trserve.gateway.dispatcher import Dispatcher, Job
from trserve.gateway.exchange import Exchange
from trserve.gateway.keep_alive import KeepAlive
from trserve.gateway.replies import JSON, Scope, Send, send_json
from trserve.gateway.request_log import RequestLog
from trserve.gateway.requests import GenerationRequest
from trserve.gateway.service import Service
from trserve.gateway.sinks import StreamSink, WholeSink

_STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Wanted(NamedTuple):
    """What a route asks for.

    ``requests`` share one response, in their order, and came in a body of ``body_bytes``; ``whole``
    and ``stream`` make its sink, the latter from the connection and whether its bytes are chunked.
    """

    requests: Sequence[GenerationRequest]
    body_bytes: int
    whole: Callable[[], WholeSink]
    stream: Callable[[Connection, bool], StreamSink]


class Answering:
    """Gives every generating route its answers.

    Attributes:
        log: the requests that are open, and the last ones that are not.
    """

    def __init__(self, service: Service, dispatcher: Dispatcher) -> None:
        self._service = service
        self._dispatcher = dispatcher
        self.log = RequestLog()

    async def answer(self, wanted: Wanted, scope: Scope, send: Send) -> None:
        """Answer with one response, streamed if the first request says so."""
        connection: Connection = scope["state"]["connection"]
        # A sink has a place for each answer: first it must be known that there are not too many.
        self._service.check_slots(wanted.requests)
        with Exchange(self._dispatcher, connection) as exchange:
            if wanted.requests[0].stream:
                chunked = scope["http_version"] != "1.0"
                if not chunked:
                    connection.send_unframed()
                sink = wanted.stream(connection, chunked)
                exchange.understood(wanted.requests, sink)
                with self.log.entry(sink, exchange, wanted.requests):
                    await self._stream(exchange, wanted, sink, send)
            else:
                whole = wanted.whole()
                exchange.understood(wanted.requests, whole)
                with self.log.entry(whole, exchange, wanted.requests):
                    await self._whole(exchange, wanted, whole, scope, send)

    async def _prepare(self, wanted: Wanted, sink: WholeSink | StreamSink) -> list[Job]:
        """The jobs of a response; what is long is rendered and tokenized while streams go on."""
        prepare, long = self._service.prepare_many, False
        for request in wanted.requests:
            long |= request.constrained
        return await long_work.do(
            wanted.body_bytes,
            lambda: prepare(wanted.requests, sink.choice),
            long=long,
        )

    async def _whole(
        self, exchange: Exchange, wanted: Wanted, sink: WholeSink, scope: Scope, send: Send
    ) -> None:
        await exchange.submit(self._prepare(wanted, sink))
        await sink.ended
        body, visit = sink.body(), exchange.visit
        if visit is not None:
            connection: Connection = scope["state"]["connection"]
            visit.begin(200)
            headers = (JSON, (b"content-length", b"%d" % len(body)), *visit.labels)
            if connection.reply(scope, headers, body):
                return
        await send_json(send, 200, body)

    async def _stream(
        self, exchange: Exchange, wanted: Wanted, sink: StreamSink, send: Send
    ) -> None:
        async def begin() -> None:
            if not sink.opened:
                start = {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}
                await send(start)
                sink.open()

        with KeepAlive(sink, self._service.keep_alive_s, begin):
            try:
                await exchange.submit(self._prepare(wanted, sink))
            except RequestError as error:
                if not sink.opened:
                    raise
                sink.fail(error)
            await sink.begun
            await begin()
            await sink.ended
        await send({"type": "http.response.body", "body": b"", "more_body": False})
