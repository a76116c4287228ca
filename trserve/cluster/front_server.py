"""The process that takes the clients of several groups: sockets, signals, drain.

Knows when to begin and to end; nothing of routing between groups or of who runs them.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

import aiohttp
from uvicorn.server import ServerState

from trserve.cluster.affinity import Affinity
from trserve.cluster.forwarding import ANYBODYS, Forwarding
from trserve.cluster.groups import Groups
from trserve.endpoint_plan import EndpointPlan
from trserve.gateway.connection import Connection, Timeouts, connection_config

CONNECT_TIMEOUT_S: Final = 5.0
KEEP_ALIVE_S: Final = 60
SILENCE_S: Final = 10
ASK_EVERY_S: Final = 5
MOST_UNANSWERED: Final = 3
"""After so long the kernel asks a group's host whether it is there, so often, and gives it up."""
_LOOK_EVERY_S: Final = 0.05


def _watched_socket(address: tuple[Any, ...]) -> socket.socket:
    """One to a group. A host that vanishes sends nothing, and no answer has a time limit."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_EVERY_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, MOST_UNANSWERED)
    unacknowledged_s = SILENCE_S + ASK_EVERY_S * MOST_UNANSWERED
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * unacknowledged_s)
    return made


class FrontServer:
    """Serves ``listener`` for ``count`` groups.

    Args:
        key, endpoint: see ``Forwarding``.
    """

    def __init__(
        self,
        listener: socket.socket,
        count: int,
        key: str | None,
        endpoint: EndpointPlan = ANYBODYS,
    ) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEP_ALIVE_S / 2, socket_factory=_watched_socket
            ),
            timeout=timeout,
            auto_decompress=False,
        )
        affinity = Affinity()
        self.groups = Groups(count, self._session, affinity.forget)
        self.app = Forwarding(self.groups, affinity, self._session, key, endpoint)
        self._listener = listener
        self._timeouts = Timeouts(endpoint.header_timeout_s, endpoint.body_timeout_s)
        self._state = ServerState()
        self._state.default_headers = []
        self.signals: asyncio.Queue[int] = asyncio.Queue()

    async def serve(self, until: Callable[[], Awaitable[int]], drain_s: float) -> int:
        """Serve until ``until`` returns the exit code, or signals end it; returns the code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.signals.put_nowait, number)
        self._listener.setblocking(False)
        server = await loop.create_server(self._connection, sock=self._listener, backlog=4096)
        watch = loop.create_task(self.groups.watch())
        try:
            code = await self._until_ended(until, drain_s)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            server.close()
            await self._session.close()
        return code

    async def _until_ended(self, until: Callable[[], Awaitable[int]], drain_s: float) -> int:
        ended = asyncio.ensure_future(until())
        asked = asyncio.ensure_future(self.signals.get())
        try:
            await asyncio.wait((ended, asked), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return ended.result()
            return await self._drain(asked.result(), drain_s)
        finally:
            for each in (ended, asked):
                each.cancel()
            await asyncio.gather(ended, asked, return_exceptions=True)

    async def _drain(self, number: int, drain_s: float) -> int:
        """Let what is open end; a second signal, or the limit, cuts it."""
        self.app.drain()
        for connection in tuple(self._state.connections):
            connection.refuse_incomplete()  # type: ignore[union-attr]
        deadline = asyncio.get_running_loop().time() + drain_s
        while self.app.open_requests or self._state.tasks:
            if not self.signals.empty():
                return 128 + self.signals.get_nowait()
            if asyncio.get_running_loop().time() > deadline:
                return 128 + number
            await asyncio.sleep(_LOOK_EVERY_S)
        return 0

    def _connection(self) -> Any:
        config = connection_config(self.app, KEEP_ALIVE_S)
        return Connection(
            config=config, server_state=self._state, app_state={}, timeouts=self._timeouts
        )
