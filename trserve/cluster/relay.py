"""A fixed local address for a peer that moves: what one side dials while the other changes hosts.

A model's host may be lost and come up elsewhere; the link to it dials one address for good. Bytes
pass as they are. Knows no protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from typing import Final

log = logging.getLogger(__name__)
_CONNECT_TIMEOUT_S: Final = 5.0
_PIECE: Final = 65_536


class Relay:
    """Listens on a port of this host's own and passes on to wherever the peer is; in a thread."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._target: tuple[str, int] | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, daemon=True, name="relay").start()

    def connect(self, host: str, port: int) -> None:
        """The peer is at this address from now on; what was open to another one is cut."""
        self._loop.call_soon_threadsafe(self._move, (host, port))

    def _move(self, target: tuple[str, int]) -> None:
        if target == self._target:
            return
        self._target = target
        for task in self._open:
            task.cancel()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._listener)
        await server.serve_forever()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._pass_on(reader, writer)
        except (OSError, TimeoutError) as error:
            log.info("the peer does not take a connection: %r", error)
        except asyncio.CancelledError:
            log.info("the peer has moved; its connections begin anew")
        finally:
            self._open.discard(task)
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._target is None:
            return
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            there, back = await asyncio.open_connection(*self._target)
        for stream in (writer, back):
            peer = stream.get_extra_info("socket")
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ways = [asyncio.ensure_future(each) for each in (_pump(reader, back), _pump(there, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            back.close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while piece := await source.read(_PIECE):
            sink.write(piece)
            await sink.drain()
