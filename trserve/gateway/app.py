"""The HTTP routes, as a plain ASGI application. Knows no tokens, no slab and no processes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from functools import partial
from typing import Final
from urllib.parse import unquote

import orjson

from trserve import __version__
from trserve.errors import RequestError
from trserve.gateway import long_work
from trserve.gateway.access import asks_deep
from trserve.gateway.answering import Answering, Wanted
from trserve.gateway.desk import Desk
from trserve.gateway.dispatcher import Dispatcher
from trserve.gateway.health import Health
from trserve.gateway.members import Extras
from trserve.gateway.message_sinks import MessageStream, MessageWhole
from trserve.gateway.openapi import document
from trserve.gateway.probe import Probe
from trserve.gateway.replies import (
    Handler,
    Receive,
    Scope,
    Send,
    send_body,
    send_error,
    send_json,
)
from trserve.gateway.requests import GenerationRequest, parse_chat, parse_completion
from trserve.gateway.responses import model_body, models_body
from trserve.gateway.service import Service
from trserve.gateway.sglang_routes import SglangRoutes
from trserve.gateway.sinks import StreamSink, WholeSink
from trserve.gateway.tokenize_routes import TokenizeRoutes
from trserve.params import SamplingDefaults

log = logging.getLogger(__name__)
REQUESTS: Final = "/v1/trserve/requests/"
Parse = Callable[[bytes, SamplingDefaults], GenerationRequest]


class Phase(Enum):
    """Whether requests are taken."""

    LOADING = "the models are still loading"
    SERVING = "serving"
    DRAINING = "the server is shutting down"
    LOST = "a model's process ended and the server is shutting down"


class App:
    """The ASGI callable.

    Args:
        metrics: makes the body and content type of ``/metrics`` for an ``Accept`` header.
        desk: what every request passes; by default anyone may ask, and nothing is logged.
        flush: empties the workers' prefix caches; by default there is nobody to ask.

    Attributes:
        phase: set by the process's control loop.
    """

    def __init__(
        self,
        service: Service,
        dispatcher: Dispatcher,
        health: Health,
        metrics: Callable[[str], tuple[bytes, bytes]],
        desk: Desk | None = None,
        *,
        flush: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._service = service
        self._answering = Answering(service, dispatcher)
        self._health = health
        self._exposition = metrics
        self._created = int(time.time())
        self.phase = Phase.LOADING
        self._desk = desk or Desk()
        self._routes: dict[str, dict[str, Handler]] = {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completion},
            "/v1/models": {"GET": self._models},
            "/health": {"GET": self._ready},
            "/readyz": {"GET": self._ready},
            "/ping": {"GET": self._ready},
            "/livez": {"GET": self._live},
            "/metrics": {"GET": self._metrics},
            "/version": {"GET": self._version},
            "/openapi.json": {"GET": self._openapi},
        }
        self._probe = Probe(service, dispatcher, health.loads)
        sglang = SglangRoutes(
            service,
            self._answering,
            read=self._body,
            report=health.report,
            flush=flush or _no_workers,
            probe=self._deep_check,
            incremental=service.plan.endpoint.incremental_streaming_output,
        )
        self._routes |= sglang.table | TokenizeRoutes(service, self._body).table
        self._prefixes: dict[str, dict[str, Handler]] = {
            "/v1/models/": {"GET": self._model},
            REQUESTS: {"GET": self._request},
        }

    def add_routes(self, table: Mapping[str, dict[str, Handler]]) -> None:
        """Answer these paths too, by method."""
        self._routes |= table

    @property
    def routes(self) -> set[tuple[str, str]]:
        """Paths, or what they begin with, and methods."""
        table = self._routes | self._prefixes
        return {(path, method) for path, methods in table.items() for method in methods}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; every failure has an OpenAI error envelope."""
        visit, send = self._desk.open(scope, send)
        try:
            self._desk.check(visit)
            await self._handler(scope)(scope, receive, send)
        except RequestError as error:
            await self._send_error(send, error)
        except asyncio.CancelledError:
            raise
        except Exception:  # a bug of ours must not end as a connection without an answer
            log.exception("%s %s failed", scope["method"], scope["path"])
            await self._send_error(
                send, RequestError("internal error; see the server's log", status=500)
            )
        finally:
            self._desk.close(visit)

    async def _send_error(self, send: Send, error: RequestError) -> None:
        self._service.metrics.errors[error.status, error.code or ""] += 1
        await send_error(send, error)

    def _handler(self, scope: Scope) -> Handler:
        path: str = scope["path"]
        methods = self._routes.get(path) or next(
            (methods for start, methods in self._prefixes.items() if path.startswith(start)), None
        )
        if methods is None:
            raise RequestError(f"no route {path}", status=404, code="not_found")
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if method == "OPTIONS":
            return partial(self._desk.preflight, methods)
        if method not in methods:
            allowed = ", ".join(methods)
            raise RequestError(
                f"{path} takes {allowed}, not {scope['method']}", status=405, allow=allowed
            )
        return methods[method]

    # -- cold routes -------------------------------------------------------------------------

    async def _models(self, scope: Scope, receive: Receive, send: Send) -> None:
        placements = self._service.placements
        names = [*self._service.served_names, *placements.aliases]
        lengths = {name: placements.max_model_len(name) for name in names}
        await send_json(send, 200, models_body(lengths, self._created))

    async def _model(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = unquote(scope["path"].removeprefix("/v1/models/"))
        placements = self._service.placements
        placements.check_model(name)
        await send_json(send, 200, model_body(name, self._created, placements.max_model_len(name)))

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        said = self._answering.log.describe(unquote(scope["path"].removeprefix(REQUESTS)))
        await send_json(send, 200, orjson.dumps(said))

    async def _ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        states, serving = self._service.states, self.phase is Phase.SERVING
        detail = (states.unready if serving else None) or self.phase.value
        ready = serving and states.unready is None
        missing = states.missing
        body = {
            "status": ("degraded" if missing else "ok") if ready else "unavailable",
            "detail": "; ".join((detail, *(each for each in missing if each not in detail))),
            "takes_requests": serving,  # while a worker is started again they wait for it
        }
        status = 200 if ready else 503
        if ready and asks_deep(scope["query_string"]):
            await self._probe.ask()
        await send_json(send, status, orjson.dumps(body | self._health.report()))

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, b'{"status":"ok"}')

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, content_type = self._exposition(_header(scope, b"accept"))
        await send_body(send, 200, body, content_type)

    async def _version(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, orjson.dumps({"version": __version__}))

    async def _openapi(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, document())

    # -- generation --------------------------------------------------------------------------

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._generate(parse_chat, scope, receive, send)

    async def _completion(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._generate(parse_completion, scope, receive, send)

    def _check_serving(self) -> None:
        if self.phase is not Phase.SERVING:
            raise RequestError(self.phase.value, status=503, code="unavailable", retry_after=1)

    async def _deep_check(self) -> None:
        self._check_serving()
        await self._probe.ask()

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        self._check_serving()
        return await self._desk.bodies.read(scope["state"]["connection"].visit, receive)

    async def _read(
        self, parse: Parse, scope: Scope, receive: Receive
    ) -> tuple[GenerationRequest, int]:
        """The request, and how many bytes it came in; these end here, not with its answer."""
        body = await self._body(scope, receive)
        defaults = self._service.defaults
        return await long_work.do(len(body), lambda: parse(body, defaults)), len(body)

    async def _generate(self, parse: Parse, scope: Scope, receive: Receive, send: Send) -> None:
        request, body_bytes = await self._read(parse, scope, receive)
        model = request.model_as_sent or self._service.served_names[0]
        logprobs = self._service.logprobs_of(request)
        extras = Extras(request, self._service.model_names, logprobs)
        parts = self._service.splitters_of(request)
        if parts is None:
            wanted = Wanted(
                [request],
                body_bytes,
                lambda: WholeSink(request, extras, model),
                lambda writer, chunked: StreamSink(request, extras, model, writer, chunked),
            )
        else:
            wanted = Wanted(
                [request],
                body_bytes,
                lambda: MessageWhole(request, extras, model, parts),
                lambda writer, chunked: MessageStream(
                    request, extras, model, writer, chunked, parts
                ),
            )
        await self._answering.answer(wanted, scope, send)


def _header(scope: Scope, wanted: bytes) -> str:
    """The values of a header, joined."""
    return ",".join(value.decode("latin-1") for name, value in scope["headers"] if name == wanted)


async def _no_workers() -> None:
    raise RequestError("there is no launcher to ask for that", status=503, code="unavailable")
