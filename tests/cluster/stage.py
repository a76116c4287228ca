"""A front server before groups that are played by small servers of their own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import aiohttp
import orjson
from aiohttp import web

from trserve.cluster.front_server import FrontServer
from trserve.endpoint_plan import EndpointPlan
from trserve.keys import digest

EVENTS = [b'data: {"n": 0}\n\n', b'data: {"n": 1}\n\n', b"data: [DONE]\n\n"]
BOUND_S = 10.0
STATS = "/v1/trserve/stats/stream"
ADMINISTERED = EndpointPlan(admin_key=digest("boss"))
BOSS = {"authorization": "Bearer boss"}


class FakeGroup:
    """Answers as a group would, and remembers what it was asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[web.Request] = []
        self.bodies: list[bytes] = []
        self.hold = asyncio.Event()
        self.hangs = False
        self.left = asyncio.Event()
        self.dies = self.never_ends = False
        self.begins = EVENTS[0]
        self.adds: dict[str, object] = {}
        self.says: object = {"detail": "serving"}
        self.readiness = self.status = 200
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)

    async def start(self) -> str:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/readyz":
            return web.json_response(self.says, status=self.readiness)
        self.asked.append(request)
        self.bodies.append(await request.read())
        while self.hangs:
            await asyncio.sleep(0.01)
        if request.path in ("/v1/completions", STATS):
            return await self._stream(request)
        if request.path.startswith("/v1/trserve/requests/"):
            known = request.path.endswith(self.name)
            return web.json_response({"by": self.name}, status=200 if known else 404)
        return web.json_response({"by": self.name, **self.adds}, status=self.status)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"content-type": "text/event-stream", "x-mine": "1"})
        await reply.prepare(request)
        try:
            await reply.write(self.begins)
            while self.never_ends:
                await asyncio.sleep(0.01)
                await reply.write(EVENTS[0])
            await self.hold.wait()
            if self.dies:
                assert request.transport is not None
                request.transport.abort()
                return reply
            for event in EVENTS[1:]:
                await reply.write(event)
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise
        return reply


class Stage:
    """A front server and two groups."""

    def __init__(self, key: str | None = None, endpoint: EndpointPlan = ADMINISTERED) -> None:
        self.groups = [FakeGroup("zero"), FakeGroup("one")]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.front = FrontServer(self._listener, len(self.groups), key, endpoint)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.client = aiohttp.ClientSession()
        self.served: asyncio.Task[int]

    async def begin(self) -> None:
        for index, group in enumerate(self.groups):
            self.front.groups.move(index, await group.start(), "starting")

        async def until() -> int:
            return await asyncio.shield(self.over)

        self.served = asyncio.create_task(self.front.serve(until, BOUND_S))
        while not all(group.ready for group in self.front.groups.all):
            await asyncio.sleep(0.01)

    async def end(self) -> int:
        if not self.over.done():
            self.over.set_result(7)
        code = await asyncio.wait_for(self.served, BOUND_S)
        await self.client.close()
        for group in self.groups:
            await group.stop()
        self._listener.close()
        return code

    def post(
        self, path: str, body: object, **headers: str
    ) -> aiohttp.client._RequestContextManager:
        return self.client.post(self.url + path, data=orjson.dumps(body), headers=headers)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    @property
    def total_asked(self) -> int:
        return sum(len(group.asked) for group in self.groups)


def on_stage(
    act: Callable[[Stage], Awaitable[None]],
    key: str | None = None,
    endpoint: EndpointPlan = ADMINISTERED,
) -> None:
    async def run() -> None:
        stage = Stage(key, endpoint)
        await stage.begin()
        try:
            async with asyncio.timeout(BOUND_S):
                await act(stage)
        finally:
            await stage.end()

    asyncio.run(run())


async def raw(stage: Stage, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*stage.address)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


async def readiness(stage: Stage, index: int, ready: bool = True) -> None:
    while stage.front.groups.all[index].ready is not ready:
        await asyncio.sleep(0.01)


async def status_of(reply: aiohttp.client._RequestContextManager) -> int:
    async with reply as made:
        return made.status
