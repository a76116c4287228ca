"""SGLang's own routes: /generate, and what its clients and tools ask a server about itself.

Knows how a route is answered; how a body is read and an answer shown is its neighbours' matter.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import orjson

from trserve import __version__
from trserve.errors import RequestError
from trserve.gateway import long_work
from trserve.gateway.answering import Answering, Wanted
from trserve.gateway.replies import Handler, Receive, Scope, Send, send_body, send_json
from trserve.gateway.request_body import decode
from trserve.gateway.service import Service
from trserve.gateway.sglang import Generate, parse_generate
from trserve.gateway.sglang_responses import (
    WEIGHT_VERSION,
    GenerateStream,
    GenerateWhole,
    Style,
)
from trserve.plan import ServerPlan

Read = Callable[[Scope, Receive], Awaitable[bytes]]
_TEXT = b"text/plain; charset=utf-8"


class AbortBody(msgspec.Struct, kw_only=True):
    """A body of /abort_request."""

    rid: str | None = None
    abort_all: bool | None = None


_abort_decoder = msgspec.json.Decoder(AbortBody)


def _model_path(plan: ServerPlan) -> str:
    """The first checkpoint that is here: a model at another host has none."""
    return next(model.path for model in plan.models if not model.remote)


class SglangRoutes:
    """The routes of one server.

    Args:
        read: the body of a request, if requests are taken.
        report: what the server is doing.
        flush: empties the prefix caches; RequestError if it must not or cannot.
        probe: has every model write a token; RequestError if one does not.
        incremental: streams of /generate hold what is new instead of all so far.
    """

    def __init__(
        self,
        service: Service,
        answering: Answering,
        *,
        read: Read,
        report: Callable[[], dict[str, Any]],
        flush: Callable[[], Awaitable[None]],
        probe: Callable[[], Awaitable[None]],
        incremental: bool = False,
    ) -> None:
        self._service = service
        self._answering = answering
        self._read = read
        self._report = report
        self._flush = flush
        self._probe = probe
        self._style = Style(service.token_names, service.model_names, incremental)
        self.table: dict[str, dict[str, Handler]] = {
            "/generate": {"POST": self._generate, "PUT": self._generate},
            "/get_model_info": {"GET": self._model_info},
            "/model_info": {"GET": self._model_info},
            "/get_server_info": {"GET": self._server_info},
            "/server_info": {"GET": self._server_info},
            "/flush_cache": {"GET": self._flush_cache, "POST": self._flush_cache},
            "/abort_request": {"POST": self._abort},
            "/health_generate": {"GET": self._health_generate},
        }

    async def _wanted(self, scope: Scope, receive: Receive) -> tuple[Generate, int]:
        """What is asked for, and in how many bytes; these end here, not with the answer."""
        body = await self._read(scope, receive)
        defaults = self._service.defaults
        return await long_work.do(len(body), lambda: parse_generate(body, defaults)), len(body)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted, body_bytes = await self._wanted(scope, receive)
        style = self._style
        await self._answering.answer(
            Wanted(
                wanted.requests,
                body_bytes,
                lambda: GenerateWhole(wanted, style),
                lambda writer, chunked: GenerateStream(wanted, style, writer, chunked),
            ),
            scope,
            send,
        )

    async def _model_info(self, scope: Scope, receive: Receive, send: Send) -> None:
        plan = self._service.plan
        info = {
            "model_path": _model_path(plan),
            "tokenizer_path": plan.tokenizer_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": WEIGHT_VERSION,
            "served_model_name": plan.served_names[0],
            "models": [{"name": model.name, "path": model.path} for model in plan.models],
            "router": plan.router,
        }
        await send_json(send, 200, orjson.dumps(info))

    async def _server_info(self, scope: Scope, receive: Receive, send: Send) -> None:
        plan = self._service.plan
        info = {
            "version": __version__,
            "model_path": _model_path(plan),
            "tokenizer_path": plan.tokenizer_path,
            "served_model_name": plan.served_names[0],
            "device": plan.device,
            "router": plan.router,
            "context_length": self._service.max_prompt_and_output,
            "max_running_requests": plan.max_rows,
            "max_prefill_tokens": plan.max_tokens,
            "page_size": plan.block_size,
            "disable_radix_cache": not plan.prefix_caching,
            "internal_states": [self._report()],
        }
        await send_json(send, 200, orjson.dumps(info))

    async def _flush_cache(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._read(scope, receive)
        await self._flush()
        await send_body(send, 200, b"Cache flushed.\n", _TEXT)

    async def _abort(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = decode(_abort_decoder, await self._read(scope, receive))
        if not wanted.abort_all and not wanted.rid:
            raise RequestError("send a rid, or abort_all: true", param="rid")
        by = scope["state"]["connection"].visit.account
        count = self._answering.log.abort(None if wanted.abort_all else wanted.rid, by)
        await send_json(send, 200, orjson.dumps({"aborted": count}))

    async def _health_generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._probe()
        await send_json(send, 200, b'{"status":"ok"}')
