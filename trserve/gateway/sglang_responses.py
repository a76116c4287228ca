"""Answers as SGLang's /generate shows them: one body, or events of all so far or of what is new.

By default each event repeats the whole answer, as SGLang's clients expect, which costs bytes that
grow with the square of its length; the OpenAI routes share none of it. Knows no slots and no
routes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import orjson

from trserve.errors import RequestError
from trserve.gateway.answer import Delta
from trserve.gateway.logprobs import TokenNames
from trserve.gateway.members import Extras
from trserve.gateway.prompts import Prompt
from trserve.gateway.sglang import OUTPUT_ONLY, Ask, Generate
from trserve.gateway.sinks import StreamSink, WholeSink, Writer
from trserve.ipc.annotations import Annotation

WEIGHT_VERSION: Final = "default"
Entry = list[Any]
"""``[log probability, id, text or null]`` of one token."""
_EMPTY: Final = orjson.Fragment(b"[]")


class Style(NamedTuple):
    """What all answers of a server are shown with.

    ``incremental``: events hold what is new; ``models`` are all their names.
    """

    names: TokenNames
    models: Sequence[str]
    incremental: bool = False


class Shown:
    """One answer as it is shown.

    Args:
        answer_id: goes out as ``meta_info.id``.
        trace: whether each token's writer is told.
    """

    def __init__(
        self, ask: Ask, answer_id: str, prompt: Prompt, style: Style, *, trace: bool
    ) -> None:
        self.usage: Callable[[], dict[str, Any]] = dict
        self._ask = ask
        self._id = answer_id
        self._prompt_ids = prompt.ids
        self._style = style
        self._trace = trace
        self._began_s = time.perf_counter()
        self._reason: dict[str, Any] | None = None
        self._num_scored = 0
        self.clear()

    def clear(self) -> None:
        """Forget what was shown, of the prompt and the output."""
        self._input = self._input_tops = _EMPTY
        self._input_parts: list[bytes] = []
        self._input_top_parts: list[bytes] = []
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._sources: list[int] = []
        self._output: list[Entry] = []
        self._output_tops: list[list[Entry]] = []

    def add(self, delta: Delta) -> None:
        """Take in what the answer gained."""
        self._texts.append(delta.text)
        self._ids += delta.token_ids
        self._sources += delta.sources
        if self._ask.tops is not None:
            if delta.prompt_annotations is not None:
                self._add_prompt(delta.prompt_annotations)
                if not delta.is_of_prompt:
                    self._end_prompt()
            for token, annotation in zip(delta.token_ids, delta.annotations, strict=True):
                self._output.append(self._entry(annotation.logprob, token))
                self._output_tops.append(self._tops(annotation))
        if delta.finish_reason is not None:
            self._reason = self._finish(delta)

    def _add_prompt(self, annotations: Sequence[Annotation]) -> None:
        """Some of the prompt's tokens, from the position asked for; the very first follows nothing.

        An abort may leave the end of the prompt without any.
        """
        entries: list[Entry] = []
        tops: list[list[Entry] | None] = []
        first = self._num_scored
        self._num_scored += len(annotations)
        for position in range(max(self._ask.start, first and first + 1), self._num_scored + 1):
            token = self._prompt_ids[position]
            annotation = annotations[position - first - 1] if position else None
            entries.append(self._entry(annotation and annotation.logprob, token))
            tops.append(annotation and self._tops(annotation))
        if entries:
            self._input_parts.append(orjson.dumps(entries)[1:-1])
            self._input_top_parts.append(orjson.dumps(tops)[1:-1])

    def _end_prompt(self) -> None:
        """Encoded once: a stream that repeats the whole answer has it in every event."""
        self._input = orjson.Fragment(b"[%b]" % b",".join(self._input_parts))
        if self._ask.tops:
            self._input_tops = orjson.Fragment(b"[%b]" % b",".join(self._input_top_parts))
        self._input_parts, self._input_top_parts = [], []

    def _entry(self, logprob: float | None, token: int) -> Entry:
        return [logprob, token, self._style.names.name(token) if self._ask.texts else None]

    def _tops(self, annotation: Annotation) -> list[Entry]:
        pairs = zip(annotation.top_logprobs, annotation.top_ids, strict=True)
        return [self._entry(*pair) for pair in pairs]

    def _finish(self, delta: Delta) -> dict[str, Any]:
        if delta.finish_reason == "stop":
            last = self._ids[-1] if self._ids else None  # the end's own id, where no other is named
            matched = last if delta.stop_reason is None else delta.stop_reason
            return {"type": "stop", "matched": matched}
        if delta.finish_reason == "length":
            return {"type": "length", "length": self.usage()["completion_tokens"]}
        return {"type": "abort", "message": str(delta.stop_reason)}

    def show(self) -> dict[str, Any]:
        """The answer, or what came since :meth:`clear`."""
        usage = self.usage()
        meta: dict[str, Any] = {
            "id": self._id,
            "finish_reason": self._reason,
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "e2e_latency": time.perf_counter() - self._began_s,
            "weight_version": WEIGHT_VERSION,
            "trserve": usage["trserve"],
        }
        if self._ask.tops is not None:
            self._show_logprobs(meta, self._ask.tops)
        shown = {"text": "".join(self._texts), "output_ids": self._ids, "meta_info": meta}
        if self._trace:
            shown["trserve"] = {"models": list(self._style.models), "source": self._sources}
        return shown

    def _show_logprobs(self, meta: dict[str, Any], tops: int) -> None:
        if self._ask.start != OUTPUT_ONLY:
            meta["input_token_logprobs"] = self._input
        meta["output_token_logprobs"] = self._output
        if tops:
            if self._ask.start != OUTPUT_ONLY:
                meta["input_top_logprobs"] = self._input_tops
            meta["output_top_logprobs"] = self._output_tops


class _Answers:
    """Makes the answers of one body of /generate, in their order."""

    def __init__(self, wanted: Generate, style: Style) -> None:
        self._wanted = wanted
        self._style = style
        self._places = [
            (ask, choice, request)
            for request, ask in zip(wanted.requests, wanted.asks, strict=True)
            for choice in range(request.n)
        ]
        self.count = len(self._places)

    def make(self, index: int, prompt: Prompt) -> Shown:
        ask, choice, request = self._places[index]
        own = ask.rid or uuid.uuid4().hex
        answer_id = f"{own}_{choice}" if request.n > 1 and ask.rid else own
        return Shown(ask, answer_id, prompt, self._style, trace=request.trace)


class GenerateWhole(WholeSink):
    """One body: an object, or a list of them for several answers."""

    def __init__(self, wanted: Generate, style: Style) -> None:
        request = wanted.requests[0]
        super().__init__(request, Extras(request, style.models), "")
        self._answers = _Answers(wanted, style)
        self._single = wanted.single
        self._shown: list[Shown] = []
        self._open = self._answers.count

    def choice(self, index: int, prompt: Prompt) -> _WholePlace:  # type: ignore[override]
        """Where the answer ``index``, to ``prompt``, goes; to be called in their order."""
        self._shown.append(self._answers.make(index, prompt))
        return _WholePlace(self, self._shown[-1])

    def body(self) -> bytes:
        """The response, once ``ended``."""
        shown = [answer.show() for answer in self._shown]
        return orjson.dumps(shown[0] if self._single else shown)


class _Place:
    """Where one answer goes: what is common to both kinds of responses."""

    plain = None

    def __init__(self, sink: WholeSink | StreamSink, shown: Shown) -> None:
        self._sink = sink
        self._shown = shown

    @property
    def usage(self) -> Callable[[], dict[str, Any]]:
        """The usage so far."""
        return self._shown.usage

    @usage.setter
    def usage(self, usage: Callable[[], dict[str, Any]]) -> None:
        self._shown.usage = usage

    def fail(self, error: RequestError) -> None:
        """The whole response fails with this answer."""
        self._sink.fail(error)


class _WholePlace(_Place):
    """Collects one answer of a body."""

    _sink: GenerateWhole
    paused = False

    def take(self, delta: Delta) -> None:
        """Keep what came."""
        self._shown.add(delta)
        if delta.finish_reason is not None:
            self._sink.end_choice()


class GenerateStream(StreamSink):
    """Server-sent events, one for each gain of an answer."""

    def __init__(self, wanted: Generate, style: Style, writer: Writer, chunked: bool) -> None:
        request = wanted.requests[0]
        super().__init__(request, Extras(request, style.models), "", writer, chunked)
        self._answers = _Answers(wanted, style)
        self._numbered = not wanted.single
        self._open_choices = self._answers.count
        self.incremental = style.incremental

    def choice(self, index: int, prompt: Prompt) -> _StreamPlace:  # type: ignore[override]
        """Where the answer ``index``, to ``prompt``, goes; to be called in their order."""
        number = index if self._numbered else None
        return _StreamPlace(self, self._answers.make(index, prompt), number)


class _StreamPlace(_Place):
    """Turns one answer into events; ``number`` tells it from the others, if there are any."""

    _sink: GenerateStream

    def __init__(self, sink: GenerateStream, shown: Shown, number: int | None) -> None:
        super().__init__(sink, shown)
        self._number = number

    @property
    def paused(self) -> bool:
        """Whether the client is too slow to be written to now."""
        return self._sink.writer.paused

    def take(self, delta: Delta) -> None:
        """Send an event, also for tokens without text: clients count ids."""
        self._shown.add(delta)
        if delta.is_of_prompt:
            return
        event = self._shown.show()
        if self._number is not None:
            event["index"] = self._number
        data = b"data: " + orjson.dumps(event) + b"\n\n"
        if self._sink.incremental:
            self._shown.clear()
        self._sink.send(data, last=delta.finish_reason is not None)
