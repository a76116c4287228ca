"""Whole answers take a short way out, and leave nothing behind of what they were made of."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.test_http import LETTER_A, Gateway, play, request
from tests.workers.fakes import world
from trserve.gateway import bodies
from trserve.gateway.long_work import LONG_BODY_BYTES
from trserve.gateway.random_bits import RandomBits, new_hex, new_seed
from trserve.gateway.requests import GenerationRequest
from trserve.gateway.sinks import StreamSink, WholeSink
from trserve.ipc.doorbell import silence
from trserve.params import RequestParams, SamplingParams, encode_params


async def _answer(g: Gateway, raw: bytes) -> bytes:
    """All that the server writes until it closes."""
    reader, writer = await g.connect()
    writer.write(raw)
    await g.until(lambda: g.dispatcher.num_live == 1)
    g.work(8)
    found = await reader.read()
    await g.check_nothing_left()
    writer.close()
    return found


@pytest.mark.parametrize("stream", (False, True))
def test_nothing_of_a_request_waits_for_the_collector(tmp_path: Path, stream: bool) -> None:
    kinds = (GenerationRequest, WholeSink, StreamSink)

    def alive() -> Counter[type]:
        return Counter(type(each) for each in gc.get_objects() if type(each) in kinds)

    async def story(g: Gateway) -> None:
        raw = request(version="1.0", stream=stream)
        assert b"AAAAAA" in await _answer(g, request(version="1.0"))  # what is made once is made
        gc.collect()
        before = alive()
        gc.disable()
        try:
            for _ in range(3):
                assert b"A" in await _answer(g, raw)
            assert alive() == before
        finally:
            gc.enable()

    play(story, tmp_path)


@pytest.mark.parametrize("stream", (False, True))
@pytest.mark.parametrize("padding", (0, 2 * LONG_BODY_BYTES))
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [1], "max_tokens": 50}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 50}}),
    ],
)
def test_a_body_goes_once_it_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, object],
    padding: int,
    stream: bool,
) -> None:
    """It may be many times as long as what the request keeps of it."""
    real, read, gone = bodies.read_body, [], []

    class Raw(bytes):
        def __del__(self) -> None:
            gone.append(1)

    async def counted(*given: Any) -> bytes:
        read.append(1)
        return Raw(await real(*given))

    monkeypatch.setattr(bodies, "read_body", counted)

    async def story(g: Gateway) -> None:
        body = json.dumps({**fields, "stream": stream, "unknown": "x" * padding}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        _, writer = await g.connect()
        writer.write(head.encode() + body)
        await g.until(lambda: g.dispatcher.num_live == 1)
        for _ in range(100):  # the thread that read a long one lets go of it a moment later
            if not gone:
                await asyncio.sleep(0.01)
        assert (len(read), len(gone), g.dispatcher.num_live) == (1, 1, 1)
        writer.close()
        await g.until(lambda: g.work() or g.dispatcher.num_live == 0)
        await g.check_nothing_left()

    play(story, tmp_path)


ENDS = [
    ({"stop": "A", "min_tokens": 3}, "AAA", 4, "A"),
    ({"stop": "AA", "min_tokens": 3, "include_stop_str_in_output": True}, "AAAA", 4, "AA"),
    ({"stop": "A", "min_tokens": 6}, "AAAAAA", 6, None),
    ({"stop_token_ids": [LETTER_A]}, "", 1, LETTER_A),
    ({"stop_token_ids": [LETTER_A], "include_stop_str_in_output": True}, "A", 1, LETTER_A),
    ({"stop_token_ids": [LETTER_A], "no_stop_trim": True}, "A", 1, LETTER_A),
]


@pytest.mark.parametrize(("fields", "text", "tokens", "reason"), ENDS)
def test_an_answer_ends_as_it_is_asked_to(
    tmp_path: Path, fields: dict[str, Any], text: str, tokens: int, reason: object
) -> None:
    async def story(g: Gateway) -> None:
        whole = json.loads((await _answer(g, request(version="1.0", **fields))).split(b"\r\n")[-1])
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        said = await _answer(g, request(version="1.0", **streaming, **fields))
        lines = said.partition(b"\r\n\r\n")[2].decode().split("\n\n")
        *parts, last, _, _ = [line.removeprefix("data: ") for line in lines]
        choices = [json.loads(part)["choices"][0] for part in parts]
        assert whole["choices"][0]["text"] == "".join(each["text"] for each in choices) == text
        for choice in (whole["choices"][0], choices[-1]):
            assert choice["stop_reason"] == reason
            assert choice["finish_reason"] == ("length" if reason is None else "stop")
        for usage in (whole["usage"], json.loads(last)["usage"]):
            assert usage["completion_tokens"] == tokens

    play(story, tmp_path)


def test_the_short_way_says_what_the_long_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything but what is drawn anew for each request."""
    answers: list[tuple[list[bytes], object]] = []

    async def story(g: Gateway) -> None:
        for _ in range(2):
            raw = request(version="1.0", seed=1)
            raw = raw.replace(b"\r\n", b"\r\norigin: https://a.example\r\nx-request-id: me\r\n", 1)
            head, _, body = (await _answer(g, raw)).partition(b"\r\n\r\n")
            said = json.loads(body)
            assert said.pop("id").startswith("cmpl-") and said.pop("created") > 0
            answers.append((sorted(head.split(b"\r\n")), said))
            monkeypatch.setattr(
                "trserve.gateway.connection.Connection.reply", lambda *_, **__: False
            )

    play(story, tmp_path)
    assert answers[0] == answers[1]
    assert b"x-request-id: me" in answers[0][0] and b"connection: close" in answers[0][0]


def test_requests_that_come_before_the_answer_are_answered_in_turn(tmp_path: Path) -> None:
    async def story(g: Gateway) -> None:
        reader, writer = await g.connect()
        writer.write(request(max_tokens=2) + request(max_tokens=3) + request(version="1.0"))
        found = b""
        while found.count(b"HTTP/1.1 200 OK\r\n") < 3:
            await g.until(lambda: g.dispatcher.num_live == 1)
            g.work(8)
            found += await reader.readuntil(b"}}}")  # of its usage
        found += await reader.read()
        texts = [part.split(b'"')[0] for part in found.split(b'"text":"')[1:]]
        assert texts == [b"AA", b"AAA", b"AAAAAA"] and found.count(b"HTTP/1.1 200 OK\r\n") == 3
        writer.close()
        await g.check_nothing_left()

    play(story, tmp_path)


def test_whoever_publishes_rings_the_worker_and_not_itself() -> None:
    with world(workers=2) as w:
        blob = encode_params(RequestParams(sampling=SamplingParams()))
        w.slots.publish((1, 2, 3), blob, limit=8, entry=1)
        assert [silence(bell) for bell in w.memory.bells] == [False, True, False]


def test_drawn_bits_are_never_the_same() -> None:
    pool = RandomBits()
    drawn = [pool.take() for _ in range(1000)]  # more than one draw
    assert len(set(drawn)) == 1000 and {len(each) for each in drawn} == {16}
    assert len({new_hex() for _ in range(1000)}) == 1000 and len(new_hex()) == 32
    seeds = [new_seed() for _ in range(200)]
    assert max(seeds) < 2**63 and max(seeds) > 2**60 and len(set(seeds)) == 200
