"""Real sockets against what a client may do wrong, slowly, in large or without a key."""

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
from trserve.gateway.connection import LEAST_BODY_BYTES, MAX_HEADER_BYTES, MAX_HEADERS, Timeouts
from trserve.keys import digest

SECRET = "sk-secret-of-somebody"
PROMPT = "a prompt that nobody logs"
PROMPT_TOKENS = 24  # a pair of its letters is one
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


# -- keys, limits and origins -------------------------------------------------------------------


def keyed(raw: bytes, *headers: str, key: str = SECRET) -> bytes:
    """``raw`` with a key and ``headers``."""
    lines = "".join(f"{line}\r\n" for line in (f"authorization: Bearer {key}", *headers))
    return raw.replace(b"host: x\r\n", b"host: x\r\n" + lines.encode(), 1)


def test_no_route_answers_without_a_key(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        closing = b"connection: close\r\n\r\n"
        for path in (*g.app._routes, "/no-route", "/v1/models/trserve"):
            for method in (b"GET", b"POST", b"DELETE"):
                line = b"%b %b HTTP/1.1\r\nhost: x\r\n" % (method, path.encode())
                answer = await exchange(g, line + closing)
                if path in ("/livez", "/readyz", "/health", "/ping", "/metrics"):
                    assert statuses(answer) != [401]
                else:
                    assert statuses(answer) == [401], path
                    assert envelope(answer)["code"] == "invalid_api_key"
                    assert b"www-authenticate: Bearer" in answer
        # The same paths, and another status, for who has one.
        assert statuses(await exchange(g, keyed(GET + closing))) == [200]
        answer = await exchange(g, keyed(b"GET /no-route HTTP/1.1\r\nhost: x\r\n" + closing))
        assert statuses(answer) == [404]

    endpoint = EndpointPlan(api_keys=(digest(SECRET),), log_requests=False)
    play(story, folder, endpoint=endpoint)


@pytest.mark.parametrize("stream", [False, True])
def test_one_key_has_so_many_requests_and_gets_its_place_back(folder: Path, stream: bool) -> None:
    async def story(g: Gateway) -> None:
        reader, writer = await g.connect()
        writer.write(keyed(request(stream=stream)))
        await g.until(lambda: g.dispatcher.num_live == 1)
        answer = await exchange(g, keyed(request(), "connection: close"))
        assert statuses(answer) == [429]
        assert b"retry-after: 1\r\n" in answer
        g.work(8)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        await g.check_nothing_left()
        reader, writer = await g.connect()
        writer.write(keyed(request()))
        await g.until(lambda: g.dispatcher.num_live == 1)
        writer.transport.abort()
        await g.check_nothing_left()
        assert [each.num_requests for _, each in g.app._desk._access._accounts] == [0]

    keys = (digest(SECRET),)
    endpoint = EndpointPlan(api_keys=keys, max_requests_per_key=1, log_requests=False)
    play(story, folder, endpoint=endpoint)


def test_a_full_queue_takes_nothing_of_a_key(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        _, holder = await g.connect()
        holder.write(request())
        await g.until(lambda: g.dispatcher.num_live == 1)
        for _ in range(3):
            answer = await exchange(
                g, request(prompt=[1] * 50).replace(b"host", b"connection: close\r\nhost")
            )
            assert statuses(answer) == [429]
            assert envelope(answer)["code"] == "queue_full"
        holder.transport.abort()
        await g.check_nothing_left()
        assert g.app._desk._access._anyone._balance > 90

    endpoint = EndpointPlan(tokens_per_minute=100, max_queue=0, log_requests=False)
    play(story, folder, endpoint=endpoint, slots=1)


ORIGIN = "https://page.example"


@pytest.mark.parametrize(
    ("origins", "allowed"),
    [(("*",), "*"), ((ORIGIN,), ORIGIN), (("https://other",), None), ((), None)],
)
def test_a_preflight_needs_no_key_and_names_whom_it_allows(
    folder: Path, origins: tuple[str, ...], allowed: str | None
) -> None:
    async def story(g: Gateway) -> None:
        preflight = (
            f"OPTIONS /v1/completions HTTP/1.1\r\nhost: x\r\norigin: {ORIGIN}\r\n"
            "access-control-request-method: POST\r\n"
            "access-control-request-headers: authorization,x-stainless-os\r\n"
            "connection: close\r\n\r\n"
        ).encode()
        for sent, status in (
            (preflight, 204),
            (keyed(GET, f"origin: {ORIGIN}", "connection: close") + b"\r\n", 200),
            (request().replace(b"host", f"origin: {ORIGIN}\r\nhost".encode(), 1), 401),
        ):
            answer = await exchange(
                g, sent.replace(b"host: x\r\n", b"host: x\r\nconnection: close\r\n", 1)
            )
            assert statuses(answer) == [status]
            lines = answer.split(b"\r\n")
            header = b"access-control-allow-origin: "
            found = [line[len(header) :].decode() for line in lines if line.startswith(header)]
            assert found == ([] if allowed is None else [allowed])
            assert b"access-control-allow-credentials" not in answer
            if status == 204:
                assert b"access-control-allow-headers: authorization,x-stainless-os" in lines
                assert b"access-control-allow-methods: POST, OPTIONS" in lines

    endpoint = EndpointPlan(api_keys=(digest(SECRET),), allowed_origins=origins, log_requests=False)
    play(story, folder, endpoint=endpoint)


# -- keep-alive and the log ---------------------------------------------------------------------


def streaming(**changes: Any) -> bytes:
    return request(stream=True, **changes)


def test_a_silent_stream_says_that_it_lives_wherever_it_waits(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        _, holder = await g.connect()
        holder.write(request(max_tokens=50))
        await g.until(lambda: g.dispatcher.num_live == 1)
        reader, writer = await g.connect()
        writer.write(streaming())
        head = await reader.readuntil(b": keep-alive\n\n")
        assert statuses(head) == [200] and g.dispatcher.num_waiting == 1
        holder.transport.abort()
        await g.until(lambda: g.dispatcher.num_live == 0)
        while g.dispatcher.num_waiting:
            g.work()
            await asyncio.sleep(0)
        await g.until(lambda: g.dispatcher.num_live == 1)
        reader._buffer.clear()  # type: ignore[attr-defined]
        await reader.readuntil(b": keep-alive\n\n")  # before the first token
        g.work(3)
        await reader.readuntil(b"data: {")
        await reader.readuntil(b": keep-alive\n\n")  # between two
        g.work(8)
        assert b"data: [DONE]\n\n" in await reader.readuntil(b"0\r\n\r\n")
        writer.close()
        await g.check_nothing_left()

    endpoint = EndpointPlan(sse_keep_alive_s=0.05, log_requests=False)
    play(story, folder, endpoint=endpoint, slots=1)


def test_an_error_behind_a_comment_is_told_in_the_stream(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        _, holder = await g.connect()
        holder.write(request(max_tokens=50))
        await g.until(lambda: g.dispatcher.num_live == 1)
        reader, writer = await g.connect()
        writer.write(streaming(trserve={"timeout_s": 0.2}))
        answer = await reader.readuntil(b"0\r\n\r\n")
        assert statuses(answer) == [200]
        assert b": keep-alive" in answer and b'data: {"error":{' in answer
        assert b"data: [DONE]\n\n" in answer
        writer.close()
        holder.transport.abort()
        await g.check_nothing_left()

    endpoint = EndpointPlan(sse_keep_alive_s=0.05, log_requests=False)
    play(story, folder, endpoint=endpoint, slots=1)


def log_of(folder: Path, log_format: str) -> list[str]:
    """The lines of a request, a refusal, a client that left, and probes."""
    found: list[str] = []

    async def story(g: Gateway) -> None:
        for stream in (False, True):
            reader, writer = await g.connect()
            writer.write(
                keyed(request(stream=stream, prompt=PROMPT), f"x-request-id: mine-{stream}")
            )
            await g.until(lambda: g.dispatcher.num_live == 1)
            g.work(8)
            await reader.readuntil(b"AAAAAA" if not stream else b"0\r\n\r\n")
            writer.close()
            await g.check_nothing_left()
        await exchange(g, keyed(request(), "connection: close", key="sk-wrong-key"))
        _, writer = await g.connect()
        writer.write(keyed(request(prompt=PROMPT)))
        await g.until(lambda: g.dispatcher.num_live == 1)
        writer.transport.abort()
        await g.check_nothing_left()
        for path in ("/livez", "/health", "/metrics"):
            await get(g, path)
        found.extend(g.lines)

    endpoint = EndpointPlan(api_keys=(digest(SECRET),), log_format=log_format)
    play(story, folder, endpoint=endpoint)
    return found


def test_one_line_a_request_in_json(folder: Path) -> None:
    lines = log_of(folder, "json")
    entries = [json.loads(line) for line in lines]
    assert [entry["status"] for entry in entries] == [200, 200, 401, 499]
    assert [entry["request_id"] for entry in entries[:2]] == ["mine-False", "mine-True"]
    for entry in entries[:2]:
        assert entry["key"] == "key-1"
        assert entry["prompt_tokens"] == PROMPT_TOKENS
        assert entry["completion_tokens"] == 6 == sum(entry["tokens"].values())
        assert entry["finish_reason"] == "length"
        assert 0 < entry["ttfb_ms"] <= entry["duration_ms"]
    assert entries[2]["key"] is None and "tokens" not in entries[2]
    assert entries[3]["finish_reason"] == "left"


def test_one_line_a_request_in_text_and_nothing_secret(folder: Path) -> None:
    for log_format in ("text", "json"):
        lines = log_of(folder, log_format)
        assert len(lines) == 4
        for secret in (SECRET, "sk-wrong-key", PROMPT, "AAA", digest(SECRET)):
            assert secret not in "".join(lines)
        assert all("\n" not in line for line in lines)
    lines = log_of(folder, "text")
    assert lines[0].startswith("trserve gateway: POST /v1/completions 200 request_id=mine-False")
    assert "completion_tokens=6 tokens=m0:6,m1:0" in lines[0]


def test_a_path_cannot_write_lines_of_its_own(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        forged = b"GET /x%0d%0atrserve%20gateway:%20forged HTTP/1.1\r\nhost: x\r\n"
        await exchange(g, forged + b"connection: close\r\n\r\n")
        (line,) = g.lines
        assert line.startswith("trserve gateway: GET /x??trserve?gateway:?forged 404 ")

    play(story, folder, endpoint=EndpointPlan())
