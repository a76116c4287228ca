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
from trserve.gateway.sinks import Extras, StreamSink, WholeSink

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
    sink = StreamSink(request, Extras(request, NAMES), "trserve", socket, chunked)
    sink.usage = lambda: USAGE
    return sink


def whole(**fields: Any) -> WholeSink:
    request = completion(**fields)
    sink = WholeSink(request, Extras(request, NAMES), "trserve")
    sink.usage = lambda: USAGE
    return sink


def events(socket: Socket) -> list[Any]:
    text = b"".join(socket.written).decode()
    assert text == "" or text.endswith("\n\n")
    lines = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def feed(sink: Any) -> None:
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


def test_tokens_without_text_make_no_event_of_their_own() -> None:
    async def story() -> None:
        socket = Socket()
        sink = stream(socket)
        sink.open()
        for _ in range(1000):
            sink.take(Delta("", [5], [0], None, None))
        assert socket.written == []
        assert not sink.begun.done()
        sink.take(Delta("x", [6], [0], None, None))
        assert len(events(socket)) == 1
        assert sink._held_ids == []  # nobody asked for ids

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
            sink.fail(ERROR)
            sink.fail(RequestError("another"))
            with pytest.raises(RequestError, match="process ended"):
                await wait

    play(story())


def test_a_failure_after_it_is_an_event_and_the_end() -> None:
    async def story() -> None:
        socket = Socket()
        sink = stream(socket)
        sink.open()
        sink.take(Delta("Hel", [1], [0], None, None))
        sink.fail(ERROR)
        sink.fail(ERROR)
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


def test_a_stream_is_paused_with_its_socket_and_a_body_never() -> None:
    async def story() -> None:
        socket = Socket()
        sink = stream(socket)
        assert (sink.paused, whole().paused) == (False, False)
        socket.paused = True
        assert sink.paused

    play(story())
