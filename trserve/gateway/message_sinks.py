"""Where a chat's answers go that have parts beside their content.

Everything else about them is as in ``sinks``. Knows no slots and no routes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from trserve.gateway.answer import Delta
from trserve.gateway.members import Extras
from trserve.gateway.message_parts import PartSplitter, whole_message
from trserve.gateway.prompts import Prompt
from trserve.gateway.requests import GenerationRequest
from trserve.gateway.responses import Choice, FinishReason, StreamFormat
from trserve.gateway.sinks import (
    StreamChoice,
    StreamSink,
    WholeChoice,
    WholeSink,
    Writer,
)

Splitters = Callable[[Prompt], PartSplitter | None]
_ROLE: Final = {"role": "assistant"}


def _finish_reason(given: str | None, parts: PartSplitter) -> FinishReason | None:
    """A model that stops to have tools called ends with ``tool_calls``."""
    if given == "stop" and parts.calls_tools:
        return "tool_calls"
    return given  # type: ignore[return-value]


class MessageWhole(WholeSink):
    """One body whose messages have parts."""

    def __init__(
        self, request: GenerationRequest, extras: Extras, model: str, splitters: Splitters
    ) -> None:
        super().__init__(request, extras, model)
        self._splitters = splitters

    def choice(self, index: int, prompt: Prompt) -> WholeChoice:
        """Where the answer ``index``, to ``prompt``, goes; to be called in their order."""
        parts = self._splitters(prompt)
        choice = WholeChoice(self, prompt) if parts is None else _WholeMessage(self, prompt, parts)
        assert index == len(self._choices)
        self._choices.append(choice)
        return choice


class _WholeMessage(WholeChoice):
    def __init__(self, sink: WholeSink, prompt: Prompt, parts: PartSplitter) -> None:
        super().__init__(sink, prompt)
        self._parts = parts

    def whole(self) -> Choice:
        """The answer, once it has ended."""
        plain = super().whole()
        message = whole_message(self._parts.push(plain.text, last=True))
        reason = _finish_reason(plain.finish_reason, self._parts)
        assert reason is not None
        return plain._replace(message=message, finish_reason=reason)


class MessageStream(StreamSink):
    """Server-sent events of messages with parts."""

    def __init__(
        self,
        request: GenerationRequest,
        extras: Extras,
        model: str,
        writer: Writer,
        chunked: bool,
        splitters: Splitters,
    ) -> None:
        super().__init__(request, extras, model, writer, chunked)
        self._splitters = splitters

    def choice(self, index: int, prompt: Prompt) -> StreamChoice:
        """Where the answer ``index``, to ``prompt``, goes; to be called in their order."""
        parts = self._splitters(prompt)
        if parts is None:
            return super().choice(index, prompt)
        assert index == len(self._choices)
        events = StreamFormat(**self._settings, index=index) if index else self._format
        self._choices.append(_StreamMessage(self, events, prompt, index, parts))
        return self._choices[-1]


class _StreamMessage(StreamChoice):
    def __init__(
        self,
        sink: StreamSink,
        events: StreamFormat,
        prompt: Prompt,
        index: int,
        parts: PartSplitter,
    ) -> None:
        super().__init__(sink, events, prompt, index)
        self._parts = parts

    def take(self, delta: Delta) -> None:
        """Send an event for each part; what is said of tokens goes with the last of them."""
        if self._continuous_usage:
            self._sink.count(self._index)
        if self._members is not None:
            self._members.add(delta)
        last = delta.finish_reason is not None
        deltas = self._parts.push(delta.text, last=last)
        if last and not deltas:
            deltas = [{}]
        for number, part in enumerate(deltas, 1):
            is_end = number == len(deltas)
            self._send(part, delta, last=last and is_end, is_end=is_end)

    def _send(self, part: dict[str, object], delta: Delta, *, last: bool, is_end: bool) -> None:
        extra, logprobs = None, b"null"
        if is_end and self._members is not None:
            extra, logprobs = self._members.take()
        event = self._format.message(
            {**_ROLE, **part} if self._first else part,
            finish_reason=_finish_reason(delta.finish_reason, self._parts) if last else None,
            stop_reason=delta.stop_reason,
            extra=extra,
            logprobs=logprobs,
            usage=self._sink.usage_so_far() if self._continuous_usage else None,
        )
        self._first = False
        self._sink.send(event, last=last)
