"""The way between two ends of a TCP connection: when what is sent arrives, and a relay that waits.

``netproxy_weather`` says when each packet arrives. Nothing is ever dropped, reordered or changed.
Knows bytes and moments; nothing of what is said, of commands or of processes.

The kernel answers a client's SYN at once, where a network would take a round trip: so the client's
first bytes leave no sooner than one round trip after it dialled.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Self, cast

from bench.netproxy_weather import Clock, Weather

PACKET_BYTES: Final = 1448
"""What a TCP segment carries on an Ethernet path, with timestamps."""

WINDOW_BYTES: Final = 1 << 20
"""More than this under way in one direction, and its sender is no longer read from."""

CONNECT_TIMEOUT_S: Final = 10.0
_AT_ONCE: Final = struct.pack("ii", 1, 0)
"""Of SO_LINGER: closing is a reset."""


LOGGED: Final = 16_384
"""Reads that are remembered between two looks at the log."""


@dataclass
class Counts:
    """Since the start: TCP payload read from those who dialled (``up``) and from the target."""

    up_bytes: int = 0
    down_bytes: int = 0
    up_packets: int = 0
    down_packets: int = 0
    stalls: int = 0
    connections: int = 0
    open: int = 0


class _End(Enum):
    """How a direction ends."""

    EOF = "eof"
    RESET = "reset"


@dataclass
class Path:
    """What all connections share: the weather, its outages and the counts.

    ``began`` and all moments are the loop's. ``blocked`` while new and old connections are cut.
    ``log``: (moment, whether up, bytes) of each read.
    """

    weather: Weather
    began: float
    counts: Counts = field(default_factory=Counts)
    out_until: float = 0.0
    blocked: bool = False
    log: deque[tuple[float, bool, int]] = field(default_factory=lambda: deque(maxlen=LOGGED))

    def clear_at(self, moment: float) -> float:
        """``moment``, or when the outage that it lies in is over."""
        end = max(self.out_until, moment)
        for begin, length in self.weather.outages:
            if begin <= moment - self.began < begin + length:
                end = max(end, self.began + begin + length)
        return end


class _Direction(asyncio.Protocol):
    """The socket at one end, and what it has read on its way to the socket at the other end."""

    def __init__(self, path: Path, *, up: bool, number: int, ready: float) -> None:
        self._path = path
        self._up = up
        self._loop = asyncio.get_running_loop()
        seed = f"{path.weather.seed} {number} {'up' if up else 'down'}"
        self.clock = Clock(path.weather, random.Random(seed), ready)
        self._queue: deque[tuple[float, bytes | _End]] = deque()
        self._held = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False
        self._full = False
        self._made = False
        self._transport: asyncio.Transport | None = None
        self.other: Self | None = None
        self.gone: Callable[[], None] = _nothing

    # -- the socket's own callbacks ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._made = True
        if self.other is not None:
            self.other.deliver()

    def data_received(self, data: bytes) -> None:
        now, counts, before = self._loop.time(), self._path.counts, self.clock.stalls
        for at in range(0, len(data), PACKET_BYTES):
            packet = data[at : at + PACKET_BYTES]
            self._queue.append((self.clock.arrival(now, len(packet)), packet))
        packets = -(-len(data) // PACKET_BYTES)
        self._path.log.append((now, self._up, len(data)))
        if self._up:
            counts.up_bytes += len(data)
            counts.up_packets += packets
        else:
            counts.down_bytes += len(data)
            counts.down_packets += packets
        counts.stalls += self.clock.stalls - before
        self._held += len(data)
        if self._held > WINDOW_BYTES and self._transport is not None:
            self._transport.pause_reading()
        self.deliver()

    def eof_received(self) -> bool:
        self._end(_End.EOF)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end(_End.RESET)
        self.gone()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        if self.other is not None:
            self.other.deliver()

    # -- the way to the other socket -----------------------------------------------------------

    def reset(self) -> None:
        """End this socket at once, with a reset."""
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE
            )
            self._transport.abort()

    def deliver(self) -> None:
        """Give the other end what has arrived, and wait for what has not."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        to = self.other
        if to is None or not to._made or to._full or not self._queue:
            return
        now = self._loop.time()
        due = max(self._queue[0][0], self._past_outage(now))
        if due > now:
            self._timer = self._loop.call_at(due, self.deliver)
            return
        self._give(to, now)
        self.deliver()

    def _past_outage(self, now: float) -> float:
        """What an outage held up comes one way after its end."""
        clear = self._path.clear_at(now)
        return clear + 1e-3 * self._path.weather.delay_ms if clear > now else now

    def _give(self, to: Self, now: float) -> None:
        """All packets that are due, as one write; or the end."""
        ready = bytearray()
        while self._queue and self._queue[0][0] <= now:
            item = self._queue.popleft()[1]
            if isinstance(item, _End):
                to._write(bytes(ready))
                to._finish(item)
                return
            ready += item
        self._held -= len(ready)
        if self._held <= WINDOW_BYTES // 2 and self._transport is not None:
            self._transport.resume_reading()
        to._write(bytes(ready))

    def _write(self, data: bytes) -> None:
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _finish(self, how: _End) -> None:
        """The other end has said all that it will."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._ended:
            transport.close()
        elif how is _End.RESET:
            self.reset()
        elif transport.can_write_eof():
            transport.write_eof()

    def _end(self, how: _End) -> None:
        if not self._ended or how is _End.RESET:
            self._ended = True
            self._queue.append((self.clock.arrival(self._loop.time(), 0), how))
            self.deliver()


class Relay:
    """Listens, and joins each connection to one to ``target`` through the weather."""

    def __init__(self, target: tuple[str, int], weather: Weather) -> None:
        self._target = target
        self.path = Path(weather, asyncio.get_running_loop().time())
        self._pairs: dict[int, tuple[_Direction, _Direction]] = {}
        self._dialling: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """Returns the port; raises OSError where there is none to be had."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    def set_weather(self, weather: Weather) -> None:
        """For whatever is sent from now on."""
        self.path.weather = weather
        for pair in self._pairs.values():
            for each in pair:
                each.clock.weather = weather

    def outage(self, seconds: float) -> None:
        """Nothing arrives for so long, in neither direction; connections stay."""
        now = asyncio.get_running_loop().time()
        self.path.out_until = max(self.path.out_until, now + seconds)

    def cut(self, blocked: bool) -> None:
        """``blocked``: reset all connections, and every new one, until told otherwise."""
        self.path.blocked = blocked
        if blocked:
            self.reset()

    def reset(self) -> None:
        """End all connections at once."""
        for pair in list(self._pairs.values()):
            for each in pair:
                each.reset()

    async def close(self) -> None:
        """Stop listening, end everything."""
        if self._server is not None:
            self._server.close()
        for task in list(self._dialling):
            task.cancel()
        self.reset()

    def _accept(self) -> _Direction:
        counts = self.path.counts
        counts.connections += 1
        counts.open += 1
        number, loop = counts.connections, asyncio.get_running_loop()
        one_way = 1e-3 * self.path.weather.delay_ms
        dialled = self.path.clear_at(loop.time())
        up = _Direction(self.path, up=True, number=number, ready=dialled + 2 * one_way)
        down = _Direction(self.path, up=False, number=number, ready=0.0)
        up.other, down.other = down, up
        self._pairs[number] = up, down
        up.gone = lambda: self._forget(number)
        task = loop.create_task(self._dial(up, down, dialled + one_way))
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)
        return up

    def _forget(self, number: int) -> None:
        if self._pairs.pop(number, None):
            self.path.counts.open -= 1

    async def _dial(self, up: _Direction, down: _Direction, due: float) -> None:
        """Connect to the target once the client's SYN would have come there."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, due - loop.time()))
        if self.path.blocked:
            up.reset()
            return
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.create_connection(lambda: down, *self._target)
        except OSError:  # a timeout is one too
            await asyncio.sleep(1e-3 * self.path.weather.delay_ms)
            up.reset()


def _nothing() -> None:
    """Nobody waits for the end of this one."""
