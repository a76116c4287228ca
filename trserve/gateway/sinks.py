"""Where answers go: one event per token on a stream, or one body at the end.

Knows the shape of responses and how bytes reach a connection; nothing of slots or routes.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import orjson

from trserve.errors import RequestError
from trserve.gateway.answer import Delta
from trserve.gateway.requests import GenerationRequest
from trserve.gateway.responses import (
    DONE,
    StreamFormat,
    chat_response,
    completion_response,
)

_ID_PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-"}


class Writer(Protocol):
    """A socket that can be written to at once."""

    @property
    def paused(self) -> bool:
        """Whether the client is too slow to be written to now."""

    def write(self, data: bytes) -> None:
        """Write now."""


class Extras:
    """The members that a request asked for beside its text."""

    def __init__(self, request: GenerationRequest, model_names: Sequence[str]) -> None:
        self._ids = request.return_token_ids
        self._trace = request.trace
        self._models = list(model_names)

    @property
    def wanted(self) -> bool:
        """Whether there is anything to add."""
        return self._ids or self._trace

    def encode(self, token_ids: list[int], sources: list[int]) -> bytes | None:
        """JSON members of a choice, without a leading comma; None if nothing was asked for."""
        members: dict[str, Any] = {}
        if self._ids:
            members["token_ids"] = token_ids
        if self._trace:
            members["trserve"] = {"models": self._models, "source": sources}
        return orjson.dumps(members)[1:-1] if members else None


class WholeSink:
    """Collects an answer that is sent as one body; never paused, because nothing is written."""

    paused = False

    def __init__(self, request: GenerationRequest, extras: Extras, model: str) -> None:
        self.request = request
        self.usage: Callable[[], dict[str, Any]] = dict
        self._extras = extras
        self._model = model
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._sources: list[int] = []
        self._last: Delta | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, delta: Delta) -> None:
        """Keep what came; the last part ends the wait."""
        self._texts.append(delta.text)
        if self._extras.wanted:
            self._token_ids += delta.token_ids
            self._sources += delta.sources
        if delta.finish_reason is not None:
            self._last = delta
            if not self.ended.done():
                self.ended.set_result(None)

    def fail(self, error: RequestError) -> None:
        """Have the waiting task raise ``error``."""
        if not self.ended.done():
            self.ended.set_exception(error)

    def body(self) -> bytes:
        """The response, once ``ended``."""
        assert self._last is not None
        make = chat_response if self.request.kind == "chat" else completion_response
        return make(
            response_id=_new_id(self.request),
            created=int(time.time()),
            model=self._model,
            text="".join(self._texts),
            finish_reason=self._last.finish_reason,  # type: ignore[arg-type]
            stop_reason=self._last.stop_reason,
            usage=self.usage(),
            extra=self._extras.encode(self._token_ids, self._sources),
        )


class StreamSink:
    """Writes an answer as server-sent events, straight from the doorbell's callback.

    Until the first token the response has not begun, so that a failure still gets its status.
    """

    def __init__(
        self, request: GenerationRequest, extras: Extras, model: str, writer: Writer, chunked: bool
    ) -> None:
        self.request = request
        self.usage: Callable[[], dict[str, Any]] = dict
        self._extras = extras
        self._writer = writer
        self._chunked = chunked
        self._open = False
        self._first = True
        self._early: list[bytes] = []
        self._held_ids: list[int] = []
        self._held_sources: list[int] = []
        self._format = StreamFormat(
            kind=request.kind,
            response_id=_new_id(request),
            created=int(time.time()),
            model=model,
            include_usage=request.include_usage,
        )
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()

    @property
    def paused(self) -> bool:
        """Whether the client is too slow to be written to now."""
        return self._writer.paused

    def take(self, delta: Delta) -> None:
        """Send an event if there is anything to show; ids of tokens without text wait for it."""
        if self._extras.wanted:
            self._held_ids += delta.token_ids
            self._held_sources += delta.sources
        if not delta.text and delta.finish_reason is None:
            return
        self._write(self._events(delta))
        self._held_ids, self._held_sources = [], []
        if not self.begun.done():
            self.begun.set_result(None)
        if delta.finish_reason is not None and not self.ended.done():
            self.ended.set_result(None)

    def _events(self, delta: Delta) -> bytes:
        request = self.request
        event = self._format.delta(
            delta.text,
            first=self._first,
            finish_reason=delta.finish_reason,  # type: ignore[arg-type]
            stop_reason=delta.stop_reason,
            extra=self._extras.encode(self._held_ids, self._held_sources),
            usage=self.usage() if request.continuous_usage_stats else None,
        )
        self._first = False
        if delta.finish_reason is None:
            return event
        if request.include_usage:
            event += self._format.usage(self.usage())
        return event + DONE

    def _write(self, data: bytes) -> None:
        if not self._open:
            self._early.append(data)
        elif self._chunked:
            self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self._writer.write(data)

    def open(self) -> None:
        """The response has begun: write what came before, and everything from now on at once."""
        self._open = True
        early, self._early = b"".join(self._early), []
        if early:
            self._write(early)

    def fail(self, error: RequestError) -> None:
        """Before the first event: have the waiting task raise. Later: an error event, the end."""
        if not self.begun.done():
            self.begun.set_exception(error)
        elif not self.ended.done():
            self._write(self._format.error(error) + DONE)
            self.ended.set_result(None)


def _new_id(request: GenerationRequest) -> str:
    return _ID_PREFIX[request.kind] + uuid.uuid4().hex
