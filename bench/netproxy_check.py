"""The proxy's own delay, measured: messages that carry the moment at which they were sent.

Knows the way and nothing of commands.
"""

from __future__ import annotations

import asyncio
import selectors
import statistics
import struct
import time
from dataclasses import replace
from typing import Any, Final

from bench.netproxy_path import Relay
from bench.netproxy_weather import Weather

ALLOWED_MS: Final = 2.0
"""By how much the median delay of a direction may differ from what was asked for."""

PINGS: Final = 40
_PING_EVERY_S: Final = 0.01
_STAMP: Final = struct.Struct("<d")


def loop_factory() -> asyncio.AbstractEventLoop:
    """A loop whose timers are exact to microseconds: epoll and uvloop round to milliseconds.

    select() takes descriptors below 1024, which leaves room for hundreds of connections.
    """
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


async def measure(weather: Weather, pings: int = PINGS) -> tuple[list[float], list[float]]:
    """Milliseconds from sending to arrival of ``pings`` small messages: up, and down."""
    times: tuple[list[float], list[float]] = [], []

    def note(data: bytes, into: list[float]) -> None:
        sent = (stamp for (stamp,) in _STAMP.iter_unpack(data))
        into.extend(1e3 * (time.perf_counter() - each) for each in sent)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(pings):
            note(await reader.readexactly(_STAMP.size), times[0])
            writer.write(_STAMP.pack(time.perf_counter()))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    target = server.sockets[0].getsockname()[:2]
    relay = Relay((target[0], target[1]), weather)
    port = await relay.listen("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    # What is sent before the handshake would be over waits for it; that is no delay of the way.
    await asyncio.sleep(3e-3 * weather.delay_ms)

    async def hear() -> None:
        for _ in range(pings):
            note(await reader.readexactly(_STAMP.size), times[1])

    heard = asyncio.create_task(hear())
    for _ in range(pings):
        writer.write(_STAMP.pack(time.perf_counter()))
        await asyncio.sleep(_PING_EVERY_S)
    await heard
    writer.close()
    await relay.close()
    server.close()
    return times


def check(weather: Weather) -> list[dict[str, Any]]:
    """A row a direction: the delay asked for, what was measured, whether it is near enough.

    Jitter is looked at by its spread; stalls and outages are left out.
    """
    calm = replace(weather, stall_chance=0.0, outages=())
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        measured = runner.run(measure(replace(calm, jitter_ms=0.0)))
        shaken = runner.run(measure(calm)) if calm.jitter_ms else measured
    rows = []
    for direction, steady, swung in zip(("up", "down"), measured, shaken, strict=True):
        median = statistics.median(steady)
        rows.append(
            {
                "direction": direction,
                "asked_ms": calm.delay_ms,
                "p50_ms": median,
                "worst_ms": max(steady),
                "jitter_asked_ms": calm.jitter_ms,
                "jitter_seen_ms": (max(swung) - min(swung)) / 2,
                "ok": abs(median - calm.delay_ms) <= ALLOWED_MS,
            }
        )
    return rows
