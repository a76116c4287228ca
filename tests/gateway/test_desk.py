"""Real sockets at the front desk: keys, limits, origins, comments in streams, and the log."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gateway.test_hardening import GET, SECRET, envelope, exchange, statuses
from tests.gateway.test_http import Gateway, get, play, request
from trserve.endpoint_plan import EndpointPlan
from trserve.errors import RequestError
from trserve.gateway.journal import Journal
from trserve.gateway.keep_alive import KeepAlive
from trserve.gateway.members import Extras
from trserve.gateway.requests import GenerationRequest
from trserve.gateway.sinks import StreamSink
from trserve.gateway.visit import Visit
from trserve.keys import digest

PROMPT = "a prompt that nobody logs"
PROMPT_TOKENS = 24  # a pair of its letters is one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


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


def test_a_failure_before_the_response_keeps_its_status() -> None:
    async def story() -> None:
        request = GenerationRequest(kind="completion", prompts=["x"])
        writer: Any = SimpleNamespace(paused=False, write=None)
        sink = StreamSink(request, Extras(request, []), "m", writer, chunked=False)
        opened: list[bool] = []

        async def open_it() -> None:
            opened.append(True)

        with KeepAlive(sink, 0.001, open_it):
            sink.fail(RequestError("no"))
            await asyncio.sleep(0.02)
        assert opened == []
        assert isinstance(sink.begun.exception(), RequestError)

    asyncio.run(story())


@pytest.mark.parametrize("closed", [False, True])
def test_a_log_that_nobody_takes_ends_no_request(
    monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(text)

    stderr = io.StringIO() if closed else Gone()
    if closed:
        stderr.close()
    monkeypatch.setattr("sys.stderr", stderr)
    scope = {"method": "POST", "path": "/x", "headers": []}
    Journal(wanted=True).close(Visit(scope))


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
