"""An answer as a client sees it: a stream of server-sent events, each with the time it was read.

Any OpenAI-compatible server's: chunked or until the connection ends, events cut anywhere, text in
``text``, ``content``, ``reasoning_content`` or ``tool_calls``. Knows no load and no statistics.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from bench.http_client import Connection, HttpError

_TEXT: Final = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Members of a chat's delta that hold what was written."""

Took = Callable[[float, bytes], None]


class EventConnection(Connection):
    """A connection on which streams are read event by event."""

    def __init__(self) -> None:
        super().__init__()
        self._took: Took | None = None
        self._line = b""
        self._chunked = True

    async def events(self, data: bytes, timeout_s: float, took: Took) -> None:
        """Read the stream that answers ``data`` to its end.

        ``took`` is called with ``time.perf_counter`` and the data of every event; it must not
        raise. Raises HttpError, also for a 200 that is no stream, or TimeoutError.
        """
        self._took, self._line = took, b""
        try:
            await self._send(data, timeout_s, None)
        finally:
            self._took = None

    def connection_lost(self, exc: Exception | None) -> None:
        whole = self._status == 200 and not self._missing and not self._chunked
        if whole and exc is None and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(b"")
        super().connection_lost(exc)

    def _finish(self, body: bytes) -> None:
        whole = self._took is not None and self._status == 200 and self._missing > 0
        if whole and self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(HttpError(200, b"no stream but a body: " + body))
        super()._finish(body)

    def _follow(self, data: bytes) -> None:
        if self._took is None or self._status != 200:
            super()._follow(data)
            return
        now = time.perf_counter()
        if not data:  # the head is there, maybe with the beginning of the body
            self._chunked = b"transfer-encoding: chunked" in self.head.lower()
        self._buffer += data
        if self._chunked:
            self._take_chunks(now)
        else:
            body, self._buffer = self._buffer, b""
            self._take(now, body)

    def _take_chunks(self, now: float) -> None:
        """Take every chunk that is there as a whole; the empty one ends the stream."""
        data, at = self._buffer, 0
        while (line := data.find(b"\r\n", at)) >= 0:
            size = int(data[at:line].partition(b";")[0], 16)
            end = line + 2 + size
            if len(data) < end + 2:
                break
            if not size:
                self._finish(b"")
                return
            self._take(now, data[line + 2 : end])
            at = end + 2
        self._buffer = data[at:]

    def _take(self, now: float, piece: bytes) -> None:
        assert self._took is not None
        *lines, self._line = (self._line + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._took(now, line[5:].strip())


@dataclass
class Answer:
    """What came for one request. Times are ``time.perf_counter``.

    Attributes:
        due_s: when it should have been sent.
        sent_s: when it was: before a connection is made for it, if none is free.
        asked_tokens: of the prompt, as far as the client knows.
        text_s: when each event with text was read.
        written: tokens so far at each of these, where the server says so in every event.
        ended_s: when the last event with a choice was read.
        usage: what the server counted; None where it says nothing.
        router: what trserve says of itself; None from other servers.
        error: why this is no whole answer; None if it is one.
    """

    due_s: float
    sent_s: float
    asked_tokens: int | None = None
    text_s: list[float] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    ended_s: float = 0.0
    usage: dict[str, Any] | None = None
    router: str | None = None
    error: str | None = None
    done: bool = False

    def take(self, now: float, data: bytes) -> None:
        """The data of one event."""
        if data == b"[DONE]":
            self.done = True
            return
        try:
            self._read(now, orjson.loads(data))
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            self.error = self.error or f"an event that is none of OpenAI's: {error!r}"

    def _read(self, now: float, event: dict[str, Any]) -> None:
        if event.get("error"):
            self.error = self.error or _said(event["error"])
            return
        usage = event.get("usage")
        if usage:
            self.usage = usage
        for choice in event.get("choices") or ():
            self.ended_s = now
            delta = choice.get("delta") or {}
            if choice.get("text") or any(delta.get(name) for name in _TEXT):
                self.text_s.append(now)
                if usage:
                    self.written.append(usage["completion_tokens"])

    def judge(self) -> None:
        """At the stream's end: one without ``[DONE]`` or without a choice is no whole answer."""
        if self.error is None and not self.done:
            self.error = "the stream ended without [DONE]"
        if self.error is None and not self.ended_s:
            self.error = "an answer without a choice"


def _said(error: Any) -> str:
    """An error event in a line: its kind first, so that equal ones are counted together."""
    if not isinstance(error, dict):
        return f"error event: {error}"
    kind = error.get("code") or error.get("type") or "error"
    return f"error event {kind}: {error.get('message', '')}"
