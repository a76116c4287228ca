"""Real sockets against what a client may do wrong, slowly or in large."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.test_http import Gateway, get, play, request
from trserve.endpoint_plan import EndpointPlan
from trserve.gateway import bodies
from trserve.gateway.connection import LEAST_BODY_BYTES, MAX_HEADER_BYTES, MAX_HEADERS, Timeouts
from trserve.keys import digest

SECRET = "sk-secret-of-somebody"
GET = b"GET /livez HTTP/1.1\r\nhost: x\r\n"
QUICK = Timeouts(header_s=0.15, body_s=0.15)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def statuses(answer: bytes) -> list[int]:
    """Of all responses in ``answer``."""
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


def envelope(answer: bytes) -> dict[str, Any]:
    """The error of the last response."""
    error: dict[str, Any] = json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def exchange(g: Gateway, *pieces: bytes) -> bytes:
    """All that comes back until the server closes; nothing more is sent once it has answered."""
    reader, writer = await g.connect()
    answer = b""
    for piece in pieces:
        writer.write(piece)
        try:
            answer += await asyncio.wait_for(reader.read(65536), 0.005)
        except TimeoutError:
            continue
        if statuses(answer)[-1:] != [200]:
            break
    answer += await reader.read()
    writer.close()
    return answer


def say(send: list[bytes], **settings: Any) -> Callable[[Path], bytes]:
    """What a server with ``settings`` answers to ``send``."""

    def answer(folder: Path) -> bytes:
        found = b""

        async def story(g: Gateway) -> None:
            nonlocal found
            found = await exchange(g, *send)
            assert (await get(g, "/livez"))[0] == 200
            await g.check_nothing_left()

        play(story, folder, **settings)
        return found

    return answer


# -- slow ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"G", GET, GET + b"x-half: "], ids=len)
def test_headers_that_do_not_come_are_waited_for_so_long(folder: Path, sent: bytes) -> None:
    answer = say([sent], timeouts=QUICK)(folder)
    assert statuses(answer) == [408]
    assert "headers" in envelope(answer)["message"]


def test_a_connection_that_says_nothing_is_closed_without_a_word(folder: Path) -> None:
    assert say([], timeouts=QUICK)(folder) == b""


def test_an_empty_line_buys_no_time(folder: Path) -> None:
    assert statuses(say([GET + b"\r\n", b"\r\n"], timeouts=QUICK)(folder)) == [200]


def test_headers_by_drops_do_not_buy_time(folder: Path) -> None:
    drops = [bytes([byte]) for byte in GET + b"x" * 200]
    assert statuses(say(drops, timeouts=QUICK)(folder)) == [408]


def test_the_next_request_of_a_connection_has_its_own_time(folder: Path) -> None:
    answer = say([GET + b"\r\n", b"GET /li"], timeouts=QUICK)(folder)
    assert statuses(answer) == [200, 408]


@pytest.mark.parametrize("drops", [0, 400])
def test_a_body_that_does_not_come_is_waited_for_so_long(folder: Path, drops: int) -> None:
    answer = say([request(length=9999), *[b" "] * drops], timeouts=QUICK)(folder)
    assert statuses(answer) == [408]
    assert "body" in envelope(answer)["message"]


def test_what_is_refused_before_its_body_is_here_is_answered_once(folder: Path) -> None:
    endpoint = EndpointPlan(log_requests=False, api_keys=(digest("one"),))
    answer = say([request(length=9999)], timeouts=QUICK, endpoint=endpoint)(folder)
    assert statuses(answer) == [401]


def test_a_body_that_keeps_coming_may_take_longer(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        reader, writer = await g.connect()
        whole = request(padding="x" * 6 * LEAST_BODY_BYTES)
        step = LEAST_BODY_BYTES * 3 // 2
        for start in range(0, len(whole), step):
            writer.write(whole[start : start + step])
            await asyncio.sleep(0.1)
        await g.until(lambda: g.dispatcher.num_live == 1)
        g.work(8)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()

    play(story, folder, timeouts=QUICK)


def test_a_long_answer_is_no_slow_request(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        reader, writer = await g.connect()
        writer.write(request(stream=True) + b"GET /livez HTTP/1.1\r\n")  # half of another behind it
        await g.until(lambda: g.dispatcher.num_live == 1)
        g.work(2)
        await asyncio.sleep(3 * QUICK.header_s)
        g.work(8)
        answer = await reader.readuntil(b"[DONE]")
        assert statuses(answer) == [200]
        rest = await reader.read()
        assert statuses(rest) == [408]
        writer.close()

    play(story, folder, timeouts=QUICK)


# -- large, and wrong ---------------------------------------------------------------------------


LARGE = EndpointPlan(log_requests=False, max_body_bytes=2000)


def test_a_body_that_says_it_is_too_long_is_refused_before_it_comes(folder: Path) -> None:
    answer = say([request(length=2001)], endpoint=LARGE, timeouts=QUICK)(folder)
    assert statuses(answer) == [413]
    error = envelope(answer)
    assert error["code"] == "body_too_large"
    assert "2000 bytes" in error["message"] and "--max-body-bytes" in error["message"]


def test_a_body_that_does_not_say_how_long_it_is_is_cut_off(folder: Path) -> None:
    head = request().split(b"\r\n\r\n")[0]
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-le")]
    chunked = b"\r\n".join([*lines, b"transfer-encoding: chunked"]) + b"\r\n\r\n"
    chunk = b"3e8\r\n" + b" " * 1000 + b"\r\n"
    answer = say([chunked, chunk, chunk, chunk], endpoint=LARGE, timeouts=QUICK)(folder)
    assert statuses(answer) == [413]


def test_a_body_of_just_that_length_is_read(folder: Path) -> None:
    empty = len(request(padding="").partition(b"\r\n\r\n")[2])
    whole = request(padding="x" * (2000 - empty))

    async def story(g: Gateway) -> None:
        reader, writer = await g.connect()
        writer.write(whole)
        await g.until(lambda: g.dispatcher.num_live == 1)
        g.work(8)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()

    play(story, folder, endpoint=LARGE)


@pytest.mark.parametrize("ends", ["whole", "closed"])
def test_the_bodies_of_all_have_a_bound_of_their_own(
    folder: Path, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "AT_ONCE", 1)
    one_at_once = EndpointPlan(log_requests=False, max_body_bytes=100_000)
    whole = request(padding="x" * 90_000)
    head, _, body = request(padding="x" * 70_000).partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-le")]
    chunked = b"\r\n".join([*lines, b"transfer-encoding: chunked", b"", b"%x" % len(body), body])

    async def story(g: Gateway) -> None:
        async def ask(sent: bytes) -> bytes:
            reader, writer = await g.connect()
            writer.write(sent)
            answer = await reader.readuntil(b"}")
            writer.close()
            return answer

        held = g.app._desk.bodies
        first, writer = await g.connect()
        writer.write(whole[:80_000])
        await g.until(lambda: held.held > 50_000)
        for too_much in (head + b"\r\n\r\n" + body, chunked):
            refused = await ask(too_much)
            assert statuses(refused) == [429] and b"retry-after: 1\r\n" in refused
            assert envelope(refused + b"}")["code"] == "too_many_bodies"
        writer.write(whole[80_000:]) if ends == "whole" else writer.close()
        await g.until(lambda: not held.held)
        if ends == "whole":
            await g.until(lambda: g.dispatcher.num_live == 1)
            g.work(8)
            assert statuses(await first.readuntil(b"\r\n")) == [200]
            writer.close()
        answer = asyncio.create_task(ask(chunked + b"\r\n0\r\n\r\n"))
        await g.until(lambda: g.dispatcher.num_live == 1)
        assert not held.held  # its prompt is there, and the body is not kept for the answer
        g.work(8)
        assert statuses(await answer) == [200]

    play(story, folder, endpoint=one_at_once)


def test_a_short_request_passes_while_there_is_no_room_for_long_ones(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        g.app._desk.bodies.held = 1 << 40
        reader, writer = await g.connect()
        writer.write(request())
        await g.until(lambda: g.dispatcher.num_live == 1)
        g.work(8)
        assert statuses(await reader.readuntil(b"\r\n")) == [200]
        writer.close()

    play(story, folder)


@pytest.mark.parametrize(
    "sent",
    [
        GET + b"x: y\r\n" * (MAX_HEADERS + 1) + b"\r\n",
        GET + b"x: " + b"y" * (MAX_HEADER_BYTES + 1) + b"\r\n\r\n",
        GET + b"x: " + b"y" * 4 * MAX_HEADER_BYTES,
        GET + b"y" * 4 * MAX_HEADER_BYTES,
        b"GET /" + b"y" * 4 * MAX_HEADER_BYTES,
    ],
    ids=["many", "long", "endless value", "endless name", "endless path"],
)
def test_headers_beyond_the_limits(folder: Path, sent: bytes) -> None:
    pieces = [sent[start : start + 40_000] for start in range(0, len(sent), 40_000)]
    answer = say(pieces)(folder)
    assert statuses(answer) in ([431], [400])  # the parser itself may refuse a name
    envelope(answer)


def test_a_large_body_behind_few_headers_is_no_header(folder: Path) -> None:
    body = request(padding="x" * 5 * MAX_HEADER_BYTES).replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\n", 1)

    async def story(g: Gateway) -> None:
        reader, writer = await g.connect()
        writer.write(body)
        await g.until(lambda: g.dispatcher.num_live == 1)
        g.work(8)
        assert statuses(await reader.read()) == [200]

    play(story, folder)


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        GET + b"bad header : x\r\n\r\n",
        GET + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabc",
        GET + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        GET + b"transfer-encoding: xchunked\r\n\r\n",
        GET + b"content-length: -1\r\n\r\n",
    ],
    ids=range(7),
)
def test_what_is_no_http_is_refused_once(folder: Path, sent: bytes) -> None:
    answer = say([sent + GET + b"\r\n"])(folder)
    assert statuses(answer) == [400]
    envelope(answer)


# -- as the protocol allows ---------------------------------------------------------------------


def test_expect_100_continue(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        reader, writer = await g.connect()
        head, _, body = request().partition(b"\r\n\r\n")
        writer.write(head + b"\r\nexpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        await g.until(lambda: g.dispatcher.num_live == 1)
        g.work(8)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()

    play(story, folder)


def test_expect_100_continue_of_one_without_a_key_is_final_at_once(folder: Path) -> None:
    head, _, _ = request().partition(b"\r\n\r\n")
    sent = head + b"\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n"
    answer = say([sent], endpoint=EndpointPlan(api_keys=(digest(SECRET),), log_requests=False))
    assert statuses(answer(folder)) == [401]


def test_pipelined_requests_are_answered_in_their_order(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        reader, writer = await g.connect()
        writer.write(request(max_tokens=3) + GET + b"\r\n" + request(prompt=[]) + request())
        answer = b""
        while statuses(answer) != [200, 200, 400, 200]:
            g.work()
            with contextlib.suppress(TimeoutError):
                answer += await asyncio.wait_for(reader.read(65536), 0.01)
        writer.close()
        await g.check_nothing_left()

    play(story, folder)


def test_a_chunked_body(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        reader, writer = await g.connect()
        head, _, body = request().partition(b"\r\n\r\n")
        head = head.rpartition(b"\r\n")[0] + b"\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head)
        for byte in body:
            writer.write(b"1\r\n%c\r\n" % byte)
        writer.write(b"0\r\n\r\n")
        await g.until(lambda: g.dispatcher.num_live == 1)
        g.work(8)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()

    play(story, folder)
