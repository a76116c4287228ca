"""Where answers go: one body, or events that together say the same, and failures at their time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.gateway.stack import completion
from trserve.errors import RequestError
from trserve.gateway.answer import Delta
from trserve.gateway.members import Extras
from trserve.gateway.prompts import Prompt
from trserve.gateway.requests import GenerationRequest
from trserve.gateway.responses import usage_dict
from trserve.gateway.sinks import StreamSink, WholeSink
from trserve.ipc.annotations import Annotation

NAMES = ["small", "large"]
USAGE = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
LAST = ("stop", None)


class Socket:
    def __init__(self) -> None:
        self.paused = False
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


def play(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 10))


def stream(socket: Socket, *, chunked: bool = False, **fields: Any) -> StreamSink:
    request = completion(stream=True, **fields)
    return StreamSink(request, Extras(request, NAMES), "trserve", socket, chunked)


def whole(**fields: Any) -> WholeSink:
    request = completion(**fields)
    return WholeSink(request, Extras(request, NAMES), "trserve")


def events(socket: Socket) -> list[Any]:
    text = b"".join(socket.written).decode()
    assert text == "" or text.endswith("\n\n")
    lines = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def one_choice(sink: Any, usage: Any = None) -> Any:
    choice = sink.choice(len(sink._choices), Prompt([1]))
    choice.usage = lambda: usage or USAGE
    return choice


def feed(sink: Any) -> None:
    sink = one_choice(sink)
    sink.take(Delta("Hel", [1], [0], None, None))
    sink.take(Delta("", [2], [1], None, None))
    sink.take(Delta("lo", [3], [1], None, None))
    sink.take(Delta("", [4], [0], "stop", None))


def test_a_stream_says_what_the_body_says() -> None:
    async def story() -> None:
        socket = Socket()
        fields = {"return_token_ids": True, "trace": True}
        one, other = whole(**fields), stream(socket, **fields)
        other.open()
        feed(one)
        feed(other)
        await one.ended
        await other.ended
        choice = json.loads(one.body())["choices"][0]
        *parts, done = events(socket)
        choices = [part["choices"][0] for part in parts]
        assert done == "[DONE]"
        assert "".join(part["text"] for part in choices) == choice["text"] == "Hello"
        ids = [token for part in choices for token in part["token_ids"]]
        assert ids == choice["token_ids"] == [1, 2, 3, 4]
        sources = [model for part in choices for model in part["trserve"]["source"]]
        assert sources == choice["trserve"]["source"] == [0, 1, 1, 0]
        assert choices[-1]["finish_reason"] == choice["finish_reason"] == "stop"

    play(story())


def test_a_trace_has_the_scores_that_there_are() -> None:
    async def story() -> None:
        for scores, shown in (([0.5, None], {"score": [0.5, None]}), ([None, None], {})):
            sink = whole(trace=True)
            choice = one_choice(sink)
            handoffs = [None, 71]
            records = [
                Annotation(0.0, [], [], score, n == 1, handoffs[n])
                for n, score in enumerate(scores)
            ]
            choice.take(Delta("xy", [1, 2], [0, 1], "stop", None, records))
            own = json.loads(sink.body())["choices"][0]["trserve"]
            told = {"alone": [False, True], "handoff_us": handoffs}
            assert own == {"models": NAMES, "source": [0, 1], **told, **shown}

    play(story())


def test_tokens_without_text_make_no_event_of_their_own() -> None:
    async def story() -> None:
        socket = Socket()
        sink = stream(socket)
        sink.open()
        choice = one_choice(sink)
        for _ in range(1000):
            choice.take(Delta("", [5], [0], None, None))
        assert socket.written == []
        assert not sink.begun.done()
        choice.take(Delta("x", [6], [0], None, None))
        assert len(events(socket)) == 1
        assert choice._members is None  # nobody asked for ids

    play(story())


def test_nothing_is_written_before_the_response_has_begun() -> None:
    async def story() -> None:
        socket = Socket()
        sink = stream(socket)
        feed(sink)
        assert sink.begun.done() and socket.written == []
        sink.open()
        assert len(socket.written) == 1
        assert events(socket)[-1] == "[DONE]"

    play(story())


def test_chunks_are_framed_for_http_1_1() -> None:
    async def story() -> None:
        socket, plain = Socket(), Socket()
        framed = stream(socket, chunked=True)
        unframed = stream(plain)
        unframed._settings = framed._settings
        unframed._format = framed._format
        for sink in (framed, unframed):
            sink.open()
            feed(sink)
        data, found = b"".join(socket.written), b""
        while data:
            size, _, rest = data.partition(b"\r\n")
            found += rest[: int(size, 16)]
            assert rest[int(size, 16) :][:2] == b"\r\n"
            data = rest[int(size, 16) + 2 :]
        assert found == b"".join(plain.written)

    play(story())


def test_usage_comes_where_it_was_asked_for() -> None:
    async def story() -> None:
        socket = Socket()
        sink = stream(socket, include_usage=True)
        sink.open()
        feed(sink)
        *parts, last, done = events(socket)
        assert (last["choices"], last["usage"]) == ([], USAGE)
        assert {part["usage"] for part in parts} == {None}
        socket = Socket()
        sink = stream(socket, continuous_usage_stats=True)
        sink.open()
        feed(sink)
        assert all(part["usage"] == USAGE for part in events(socket)[:-1])
        assert done == "[DONE]"

    play(story())


ERROR = RequestError("a model's process ended", status=503, code="worker_lost")


def test_a_failure_before_the_first_event_is_raised_with_its_status() -> None:
    async def story() -> None:
        for sink, wait in ((one := whole(), one.ended), (two := stream(Socket()), two.begun)):
            choice = one_choice(sink)
            choice.fail(ERROR)
            choice.fail(RequestError("another"))
            with pytest.raises(RequestError, match="process ended"):
                await wait

    play(story())


def test_a_failure_after_it_is_an_event_and_the_end() -> None:
    async def story() -> None:
        socket = Socket()
        sink = stream(socket)
        sink.open()
        choice = one_choice(sink)
        choice.take(Delta("Hel", [1], [0], None, None))
        choice.fail(ERROR)
        choice.fail(ERROR)
        choice.take(Delta("late", [2], [0], "stop", None))
        await sink.ended
        first, error, done = events(socket)
        assert first["choices"][0]["text"] == "Hel"
        assert error["error"]["code"] == "worker_lost"
        assert done == "[DONE]"

    play(story())


def test_a_client_that_left_does_not_disturb_the_last_tokens() -> None:
    """Its task was cancelled, and with it the futures; the doorbell's callback may come first."""

    async def story() -> None:
        for sink in (whole(), stream(Socket())):
            for name in ("begun", "ended"):
                if hasattr(sink, name):
                    getattr(sink, name).cancel()
            feed(sink)
            sink.fail(ERROR)

    play(story())


def usage_of(prompt: int, small: int, large: int, seed: int = 5) -> dict[str, Any]:
    total = small + large
    return usage_dict(
        prompt,
        total,
        {
            "tokens": {"small": small, "large": large},
            "handoffs": 2,
            "share": large / total,
            "pending_ms": 1.5,
            "degraded": False,
            "seed": seed,
        },
    )


def test_choices_are_interleaved_each_with_its_role_and_its_end() -> None:
    async def story() -> None:
        socket = Socket()
        request = GenerationRequest(kind="chat", n=3, stream=True, include_usage=True)
        sink = StreamSink(request, Extras(request, NAMES), "trserve", socket, False)
        sink.open()
        choices = [one_choice(sink, usage_of(4, index, 1)) for index in range(3)]
        for text in "ab":
            for choice in choices:
                choice.take(Delta(text, [1], [0], None, None))
        for choice in reversed(choices):
            assert not sink.ended.done()
            choice.take(Delta("", [7], [0], "stop", None))
        await sink.ended
        *parts, usage, done = events(socket)
        assert [part["choices"][0]["index"] for part in parts] == [0, 1, 2, 0, 1, 2, 2, 1, 0]
        assert len({part["id"] for part in parts}) == 1
        for index in range(3):
            deltas = [p["choices"][0] for p in parts if p["choices"][0]["index"] == index]
            assert [d["delta"].get("role") for d in deltas] == ["assistant", None, None]
            assert [d["finish_reason"] for d in deltas] == [None, None, "stop"]
        assert usage["choices"] == [] and done == "[DONE]"
        assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (4, 6)

    play(story())


def test_a_body_holds_all_choices_and_counts_each_prompt_once() -> None:
    async def story() -> None:
        sink = whole(prompts=[[1], [2]], n=2)
        choices = [one_choice(sink, usage_of(3 + i // 2, i, 2, seed=i // 2)) for i in range(4)]
        for index, choice in enumerate(reversed(choices)):
            assert not sink.ended.done()
            choice.take(Delta(str(index), [1], [0], "length", None))
        await sink.ended
        body = json.loads(sink.body())
        assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
        assert [c["text"] for c in body["choices"]] == ["3", "2", "1", "0"]
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3 + 4, 6 + 8)
        own = usage["trserve"]
        assert own["tokens"] == {"small": 6, "large": 8}
        assert (own["handoffs"], own["share"], own["pending_ms"]) == (8, 8 / 14, 6.0)
        assert (own["seed"], own["seeds"]) == (0, [0, 1])

    play(story())


def test_one_choice_that_fails_fails_all() -> None:
    async def story() -> None:
        sink = whole(n=2)
        first, second = one_choice(sink), one_choice(sink)
        first.fail(ERROR)
        second.take(Delta("x", [1], [0], "stop", None))
        with pytest.raises(RequestError, match="process ended"):
            await sink.ended

    play(story())


def test_a_stream_is_paused_with_its_socket_and_a_body_never() -> None:
    async def story() -> None:
        socket = Socket()
        sink = stream(socket)
        choice = one_choice(sink)
        assert (choice.paused, one_choice(whole()).paused) == (False, False)
        socket.paused = True
        assert choice.paused

    play(story())


def test_an_echo_comes_with_the_first_text() -> None:
    async def story() -> None:
        socket = Socket()
        one, other = whole(echo=True), stream(socket, echo=True)
        other.open()
        for sink in (one, other):
            choice = sink.choice(0, Prompt([1, 2], "Say: "))
            choice.usage = lambda: USAGE
            choice.take(Delta("Hel", [1], [0], None, None))
            choice.take(Delta("lo", [3], [1], "stop", None))
        assert json.loads(one.body())["choices"][0]["text"] == "Say: Hello"
        *parts, _ = events(socket)
        assert [part["choices"][0]["text"] for part in parts] == ["Say: Hel", "lo"]

    play(story())


def test_an_echo_may_be_all_there_is() -> None:
    async def story() -> None:
        socket = Socket()
        sink = stream(socket, echo=True, max_tokens=0)
        sink.open()
        choice = sink.choice(0, Prompt([1, 2], "Say: "))
        choice.take(Delta("", [], [], "length", None))
        (part, done) = events(socket)
        assert part["choices"][0]["text"] == "Say: " and done == "[DONE]"
        assert part["choices"][0]["finish_reason"] == "length"

    play(story())
