"""Real sockets to the gateway's parts: clients that vanish, half-close, or speak HTTP/1.0.

The workers take their turns by hand, so that a test says where a client leaves.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from uvicorn.config import Config
from uvicorn.server import ServerState

from tests.gateway.stack import new_plan
from tests.workers.fakes import World, world
from trserve.endpoint_plan import EndpointPlan
from trserve.gateway import connection as connection_module
from trserve.gateway import long_work
from trserve.gateway.app import App, Phase
from trserve.gateway.connection import Connection, Timeouts
from trserve.gateway.desk import Desk
from trserve.gateway.dispatcher import Dispatcher
from trserve.gateway.exposition import Exposition
from trserve.gateway.health import Health
from trserve.gateway.journal import Journal
from trserve.gateway.service import Service

LONG_S = 20.0
PATIENT = Timeouts(0, 0)
QUIET = EndpointPlan(log_requests=False)
LETTER_A = 35  # in the byte-level vocabulary: three special tokens, then the printable bytes


class Gateway:
    """App, dispatcher and a listening socket over a world."""

    def __init__(
        self,
        w: World,
        folder: Path,
        endpoint: EndpointPlan = QUIET,
        timeouts: Timeouts = PATIENT,
    ) -> None:
        self.w = w
        self.lines: list[str] = []
        self.timeouts = timeouts
        plan = new_plan(folder, router="none", endpoint=endpoint)
        journal = Journal(
            wanted=endpoint.log_requests,
            as_json=endpoint.log_format == "json",
            write=self.lines.append,
        )
        self.dispatcher = Dispatcher(
            w.slab, w.slots, w.memory.bells[-1], max_waiting=endpoint.max_queue
        )
        self.service = Service(plan, w.slab)
        health = Health(plan, w.slab, self.dispatcher, self.service.states)
        exposition = Exposition(self.service, w.slab, w.slots, self.dispatcher)
        desk = Desk(endpoint, journal=journal)
        self.app = App(self.service, self.dispatcher, health, exposition.render, desk)
        self.app.phase = Phase.SERVING
        self.state = ServerState()

    async def start(self) -> None:
        config = Config(self.app, http=Connection, ws="none", lifespan="off", log_config=None)
        config.load()
        loop = asyncio.get_running_loop()
        loop.add_reader(self.w.memory.bells[-1], self.dispatcher.on_bell)
        self.server = await loop.create_server(
            lambda: Connection(
                config=config, server_state=self.state, app_state={}, timeouts=self.timeouts
            ),
            "127.0.0.1",
            0,
        )
        self.port = self.server.sockets[0].getsockname()[1]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let the loop turn until ``condition`` holds; the caller bounds the wait."""
        while not condition():
            await asyncio.sleep(0)

    def work(self, turns: int = 1) -> None:
        for _ in range(turns):
            for worker in self.w.workers:
                worker.turn()

    async def check_nothing_left(self) -> None:
        await self.until(lambda: not self.state.tasks)
        self.work(2)
        await self.until(lambda: self.w.slots.num_free == self.w.memory.layout.slots)
        d = self.dispatcher
        assert (d.num_live, d.num_waiting, d.num_closing) == (0, 0, 0)
        self.w.check_nothing_held()


def play(
    story: Callable[[Gateway], Awaitable[None]],
    folder: Path,
    *,
    endpoint: EndpointPlan = QUIET,
    timeouts: Timeouts = PATIENT,
    **settings: Any,
) -> None:
    async def run() -> None:
        with world(token=lambda model, row: LETTER_A, **settings) as w:
            gateway = Gateway(w, folder, endpoint, timeouts)
            await gateway.start()
            try:
                await story(gateway)
            finally:
                gateway.server.close()
                asyncio.get_running_loop().remove_reader(w.memory.bells[-1])

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(run(), LONG_S))


def request(*, version: str = "1.1", length: int | None = None, **fields: Any) -> bytes:
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 6, "temperature": 0, **fields}).encode()
    return (
        f"POST /v1/completions HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body) if length is None else length}\r\n\r\n"
    ).encode() + body


async def get(g: Gateway, path: str) -> tuple[int, bytes]:
    """Status and body of a GET on a connection of its own."""
    reader, writer = await g.connect()
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_an_answer_arrives_framed_as_its_headers_say(
    folder: Path, version: str, stream: bool
) -> None:
    async def story(g: Gateway) -> None:
        reader, writer = await g.connect()
        writer.write(request(version=version, stream=stream))
        await g.until(lambda: g.dispatcher.num_live == 1)
        g.work(8)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        if b"transfer-encoding: chunked" in head:
            assert (version, stream) == ("1.1", True)
            body = b""
            while size := int(await reader.readline(), 16):
                body += await reader.readexactly(size)
                assert await reader.readexactly(2) == b"\r\n"
        elif b"content-length" in head:
            assert not stream
            size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
            body = await reader.readexactly(size)
        else:
            assert version == "1.0"
            body = await reader.read()  # up to the end of the connection
        if stream:
            assert body.endswith(b"data: [DONE]\n\n")
            assert body.startswith(b"data: {")
            parts = [json.loads(part[6:]) for part in body.decode().split("\n\n")[:-2]]
            assert "".join(part["choices"][0]["text"] for part in parts) == "A" * 6
        else:
            assert json.loads(body)["choices"][0]["text"] == "A" * 6
        writer.close()
        await g.check_nothing_left()

    play(story, folder)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_all_its_choices(folder: Path, stream: bool) -> None:
    async def story(g: Gateway) -> None:
        _, writer = await g.connect()
        writer.write(request(prompt=[[1], [2]], n=2, max_tokens=50, stream=stream))
        await g.until(lambda: g.dispatcher.num_live == 4)
        g.work(3)
        writer.close()
        await g.until(lambda: g.dispatcher.num_live == 0)
        await g.check_nothing_left()

    play(story, folder)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", ["body", "tokenizing", "queue", "first token", "later token"])
def test_a_client_that_vanishes_leaves_nothing_wherever_it_was(
    folder: Path, place: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(g: Gateway) -> None:
        reader, writer = await g.connect()
        released = threading.Event()
        if place == "queue":
            other = (await g.connect())[1]
            other.write(request(max_tokens=3))
            await g.until(lambda: g.dispatcher.num_live == 1)
        if place == "tokenizing":
            monkeypatch.setattr(long_work, "LONG_BODY_BYTES", -1)
            prepare = g.service.prepare_all

            def slow(*arguments: Any) -> Any:
                assert released.wait(LONG_S)
                return prepare(*arguments)

            g.service.prepare_all = slow  # type: ignore[method-assign]
        length = 9999 if place == "body" else None
        writer.write(request(stream=stream, max_tokens=50, length=length))
        await g.until(lambda: len(g.state.tasks) == (2 if place == "queue" else 1))
        if place == "queue":
            await g.until(lambda: g.dispatcher.num_waiting == 1)
        elif "token" in place and place != "tokenizing":
            await g.until(lambda: g.dispatcher.num_live == 1)
        if place == "later token":
            g.work(2)
            if stream:
                await reader.readuntil(b"data: ")
        writer.transport.abort()
        if stream and place == "later token":
            # Only what is written to a closed socket tells it from a half-closed one.
            await g.until(lambda: g.work() or not g.state.tasks)
            assert len(g.w.workers[0].runner.batches) < 20
        await g.until(lambda: len(g.state.tasks) == (1 if place == "queue" else 0))
        released.set()
        assert g.dispatcher.num_waiting == 0
        if place == "queue":
            assert g.dispatcher.num_live == 1
            g.work(4)
        await g.check_nothing_left()

    play(story, folder, slots=1)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("leaves", [True, False])
def test_a_client_that_closes_is_noticed_while_its_stream_is_silent(
    folder: Path, version: str, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "PROBE_EVERY_S", 0.02)

    async def story(g: Gateway) -> None:
        reader, writer = await g.connect()
        writer.write(request(stream=True, version=version))
        await g.until(lambda: g.dispatcher.num_live == 1)
        g.work()
        await reader.readuntil(b"data: ")
        await reader.readuntil(b"}")
        if leaves:
            writer.close()
            await g.until(lambda: not g.state.tasks)  # and no worker takes a turn
        else:
            writer.write_eof()
            for _ in range(3):
                await reader.readuntil(b": keep-alive\n\n")
            g.work(8)
            assert (await reader.read()).count(b"[DONE]") == 1
        await g.check_nothing_left()

    play(story, folder)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_is_noticed_after_a_long_body(folder: Path, stream: bool) -> None:
    """Its last part, of more than what stops the reading, comes after the headers were seen."""

    async def story(g: Gateway) -> None:
        _, writer = await g.connect()
        asked = request(stream=stream, max_tokens=50)
        body = asked.partition(b"\r\n\r\n")[2] + b" " * 70_000
        writer.write(asked.partition(b"content-length")[0])
        writer.write(f"content-length: {len(body)}\r\n\r\n".encode())
        await g.until(lambda: len(g.state.tasks) == 1)
        await asyncio.sleep(0.01)  # it waits for the body
        connection: Any = next(iter(g.state.connections))
        connection.data_received(body)
        await g.until(lambda: g.dispatcher.num_live == 1)
        assert not connection.flow.read_paused
        writer.transport.abort()
        await g.until(lambda: not g.state.tasks)
        await g.check_nothing_left()

    play(story, folder)


@pytest.mark.parametrize("reads", [True, False])
def test_a_slow_client_has_its_time_as_long_as_it_reads(
    folder: Path, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "STALLED_CLIENT_S", 0.3)

    async def story(g: Gateway) -> None:
        raw = socket.socket()
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(raw, ("127.0.0.1", g.port))
        await g.until(lambda: len(g.state.connections) == 1)
        connection: Any = next(iter(g.state.connections))
        size = 64 << 20
        connection.write(b"x" * size)
        assert connection.paused
        while reads and size and not connection.lost:
            size -= len(await loop.sock_recv(raw, 1 << 18))
            await asyncio.sleep(0.005)
        assert not size or not reads
        await g.until(lambda: connection.lost is not reads)
        raw.close()

    play(story, folder)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_only_stopped_sending_gets_its_answer(folder: Path, stream: bool) -> None:
    async def story(g: Gateway) -> None:
        reader, writer = await g.connect()
        writer.write(request(stream=stream))
        writer.write_eof()
        await g.until(lambda: g.dispatcher.num_live == 1)
        g.work(8)
        answer = await reader.read()
        assert b"HTTP/1.1 200" in answer
        assert answer.count(b"A") >= 6
        await g.check_nothing_left()

    play(story, folder)


def test_a_client_that_stopped_sending_inside_its_body_is_let_go(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        reader, writer = await g.connect()
        writer.write(request(length=9999))
        await g.until(lambda: len(g.state.tasks) == 1)
        writer.write_eof()
        assert b" 200 " not in await reader.read()
        await g.check_nothing_left()

    play(story, folder)


def test_a_drain_waits_for_no_body_that_does_not_come(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        stuck, answered = await g.connect(), await g.connect()
        stuck[1].write(request(length=9999))
        answered[1].write(request())
        await g.until(lambda: len(g.state.tasks) == 2 and g.dispatcher.num_live == 1)
        for connection in tuple(g.state.connections):
            connection.refuse_incomplete()  # type: ignore[union-attr]
        assert await stuck[0].read() == b""
        g.work(8)
        assert b'"text":"AAAAAA"' in await answered[0].readuntil(b'"text":"AAAAAA"')
        await g.check_nothing_left()

    play(story, folder)


def test_bytes_that_a_slow_client_has_not_taken_are_not_flushed(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(raw, ("127.0.0.1", g.port))
        await g.until(lambda: len(g.state.connections) == 1)
        connection: Any = next(iter(g.state.connections))
        assert connection.flushed
        size = 0
        while not connection.paused:
            connection.write(b"x" * 65536)
            size += 65536
            await asyncio.sleep(0)
        assert not connection.flushed
        while size:
            size -= len(await loop.sock_recv(raw, 1 << 20))
        assert connection.flushed and not connection.paused
        raw.close()
        await g.until(lambda: not g.state.connections)
        assert connection.lost

    play(story, folder)


@pytest.mark.parametrize(
    ("phase", "status"), [(Phase.LOADING, 503), (Phase.DRAINING, 503), (Phase.LOST, 503)]
)
def test_nothing_is_taken_when_not_serving(folder: Path, phase: Phase, status: int) -> None:
    async def story(g: Gateway) -> None:
        g.app.phase = phase
        reader, writer = await g.connect()
        writer.write(request())
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status}".encode())
        assert b"retry-after" in head
        assert g.w.slots.num_free == 4
        writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"HTTP/1.1 200")

    play(story, folder)
