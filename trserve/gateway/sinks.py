"""Where answers go: one event per token on a stream, or one body at the end.

A request has one sink, and that a place for each of its choices. Knows the shape of responses and
how bytes reach a connection; nothing of slots or routes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from trserve.errors import RequestError
from trserve.gateway.answer import Delta
from trserve.gateway.members import Extras
from trserve.gateway.prompts import Prompt
from trserve.gateway.random_bits import new_hex
from trserve.gateway.requests import GenerationRequest
from trserve.gateway.responses import (
    DONE,
    Choice,
    StreamFormat,
    UsageTotal,
    chat_response,
    completion_response,
    total_usage,
)

COMMENT: Final = b": keep-alive\n\n"
"""An event that no client reads."""
_NOTHING = (None, b"null")
_ID_PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-"}


class Writer(Protocol):
    """A socket that can be written to at once."""

    @property
    def paused(self) -> bool:
        """Whether the client is too slow to be written to now."""

    def write(self, data: bytes) -> None:
        """Write now."""


class WholeChoice:
    """Collects one answer of a body; never paused, because nothing is written."""

    paused = False
    plain = None

    def __init__(self, sink: WholeSink, prompt: Prompt) -> None:
        self.usage: Callable[[], dict[str, Any]] = dict
        self._sink = sink
        self._texts = [prompt.text] if sink.request.echo else []
        self._members = sink.extras.collect(prompt)
        self._last: Delta | None = None

    def take(self, delta: Delta) -> None:
        """Keep what came."""
        self._texts.append(delta.text)
        if self._members is not None:
            self._members.add(delta)
        if delta.finish_reason is not None:
            self._last = delta
            self._sink.end_choice()

    def fail(self, error: RequestError) -> None:
        """The whole response fails with this choice."""
        self._sink.fail(error)

    def whole(self) -> Choice:
        """The answer, once it has ended."""
        assert self._last is not None
        return Choice(
            "".join(self._texts),
            self._last.finish_reason,  # type: ignore[arg-type]
            self._last.stop_reason,
            *(() if self._members is None else self._members.take()),
        )


class WholeSink:
    """Collects the answers of a request, which are sent as one body.

    Attributes:
        ended: set when the last of them has ended.
    """

    def __init__(self, request: GenerationRequest, extras: Extras, model: str) -> None:
        self.request = request
        self.extras = extras
        self.response_id = _new_id(request)
        self._model = model
        self._choices: list[WholeChoice] = []
        self._open = request.num_choices
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def choice(self, index: int, prompt: Prompt) -> WholeChoice:
        """Where the answer ``index``, to ``prompt``, goes; to be called in their order."""
        assert index == len(self._choices)
        self._choices.append(WholeChoice(self, prompt))
        return self._choices[-1]

    def end_choice(self) -> None:
        """One more answer has ended; the last ends the wait."""
        self._open -= 1
        if not self._open and not self.ended.done():
            self.ended.set_result(None)

    def fail(self, error: RequestError) -> None:
        """Have the waiting task raise ``error``."""
        if not self.ended.done():
            self.ended.set_exception(error)

    def let_go(self) -> None:
        """All is over: its choices know it, and it them no more (see ``Generation.let_go``)."""
        self._choices.clear()

    def body(self) -> bytes:
        """The response, once ``ended``."""
        make = chat_response if self.request.kind == "chat" else completion_response
        return make(
            response_id=self.response_id,
            created=int(time.time()),
            model=self._model,
            choices=[choice.whole() for choice in self._choices],
            usage=total_usage([choice.usage() for choice in self._choices], self.request.n),
        )


class StreamChoice:
    """Turns one answer into events.

    Attributes:
        plain: sends the text of a token, after the first and while nothing else is said of tokens.
    """

    def __init__(self, sink: StreamSink, events: StreamFormat, prompt: Prompt, index: int) -> None:
        self.usage: Callable[[], dict[str, Any]] = dict
        self.plain: Callable[[str], None] | None = None
        self._sink = sink
        self._index = index
        self._format = events
        self._members = sink.extras.collect(prompt)
        self._continuous_usage = sink.request.continuous_usage_stats
        self._first = True
        self._echo = prompt.text if sink.request.echo else ""

    @property
    def paused(self) -> bool:
        """Whether the client is too slow to be written to now."""
        return self._sink.writer.paused

    def take(self, delta: Delta) -> None:
        """Send an event if there is anything to show; what is said of tokens without text waits."""
        if self._continuous_usage:
            self._sink.count(self._index)
        if self._members is not None:
            self._members.add(delta)
        if not delta.text and delta.finish_reason is None:
            return
        extra, logprobs = _NOTHING if self._members is None else self._members.take()
        event = self._format.delta(
            self._echo + delta.text if self._first else delta.text,
            first=self._first,
            finish_reason=delta.finish_reason,  # type: ignore[arg-type]
            stop_reason=delta.stop_reason,
            extra=extra,
            logprobs=logprobs,
            usage=self._sink.usage_so_far() if self._continuous_usage else None,
        )
        if self._first:
            self._first = False
            if self._members is None and not self._continuous_usage:
                self.plain = self._send_text
        self._sink.send(event, last=delta.finish_reason is not None)

    def _send_text(self, text: str) -> None:
        self._sink.send_next(self._format.text(text))

    def fail(self, error: RequestError) -> None:
        """The whole stream fails with this choice."""
        self._sink.fail(error)


class StreamSink:
    """Writes answers as server-sent events, straight from the doorbell's callback.

    The events of several choices are interleaved as they come. Until the first of them the
    response has not begun, so that a failure still gets its status.

    Attributes:
        opened: the response has begun.
        num_writes: pieces that were written so far.
    """

    def __init__(
        self, request: GenerationRequest, extras: Extras, model: str, writer: Writer, chunked: bool
    ) -> None:
        self.request = request
        self.extras = extras
        self.writer = writer
        self._put = writer.write
        self.response_id = _new_id(request)
        self._chunked = chunked
        self.opened = False
        self.num_writes = 0
        self._early: list[bytes] = []
        self._choices: list[StreamChoice] = []
        self._total: UsageTotal | None = None
        self._open_choices = request.num_choices
        self._settings: dict[str, Any] = {
            "kind": request.kind,
            "response_id": self.response_id,
            "created": int(time.time()),
            "model": model,
            "include_usage": request.include_usage,
        }
        self._format = StreamFormat(**self._settings)
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()

    def choice(self, index: int, prompt: Prompt) -> StreamChoice:
        """Where the answer ``index``, to ``prompt``, goes; to be called in their order."""
        assert index == len(self._choices)
        events = StreamFormat(**self._settings, index=index) if index else self._format
        self._choices.append(StreamChoice(self, events, prompt, index))
        return self._choices[-1]

    def let_go(self) -> None:
        """All is over: its choices know it, and it them no more (see ``Generation.let_go``)."""
        for choice in self._choices:
            choice.plain = None
        self._choices.clear()

    def usage(self) -> dict[str, Any]:
        """The usage of all choices so far."""
        return total_usage([choice.usage() for choice in self._choices], self.request.n)

    def count(self, index: int) -> None:
        """The choice ``index`` was given something: :meth:`usage_so_far` changes."""
        if self._total is not None:
            self._total.replace(index, self._choices[index].usage())

    def usage_so_far(self) -> dict[str, Any]:
        """The usage of all choices, each as it was when it was last given something.

        No event asks more than one of them: with many, the events would have no time for more.
        """
        if len(self._choices) == 1:
            return self._choices[0].usage()
        if self._total is None:
            self._total = UsageTotal([choice.usage() for choice in self._choices], self.request.n)
        return self._total.usage()

    def send(self, event: bytes, *, last: bool) -> None:
        """Write an event; ``last`` says that it ends its choice, and perhaps the stream."""
        if self.ended.done():
            return  # another choice failed, or the client is gone
        if last:
            self._open_choices -= 1
            if not self._open_choices:
                if self.request.include_usage:
                    event += self._format.usage(self.usage())
                event += DONE
        self._write(event)
        if not self.begun.done():
            self.begun.set_result(None)
        if not self._open_choices:
            self.ended.set_result(None)

    def send_next(self, event: bytes) -> None:
        """:meth:`send` of an event that is neither the first of the stream nor ends a choice."""
        if not self._chunked or not self.opened or self.ended.done():
            self.send(event, last=False)
            return
        self.num_writes += 1
        self._put(b"%x\r\n%b\r\n" % (len(event), event))

    def comment(self) -> None:
        """A line that no client reads, from when the response has begun until it ends."""
        if self.opened and not self.ended.done():
            self._write(COMMENT)

    def _write(self, data: bytes) -> None:
        self.num_writes += 1
        if not self.opened:
            self._early.append(data)
        elif self._chunked:
            self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self.writer.write(data)

    def open(self) -> None:
        """The response has begun: write what came before, and everything from now on at once."""
        self.opened = True
        early, self._early = b"".join(self._early), []
        if early:
            self._write(early)

    def fail(self, error: RequestError) -> None:
        """Before the response: have the waiting task raise. Later: an error event, the end."""
        if not self.begun.done() and not self.opened:
            self.begun.set_exception(error)
        elif not self.ended.done():
            self._write(self._format.error(error) + DONE)
            self.ended.set_result(None)
            if not self.begun.done():
                self.begun.set_result(None)


def _new_id(request: GenerationRequest) -> str:
    return _ID_PREFIX[request.kind] + new_hex()
