"""Load on an endpoint: an open loop (requests come when they come) and a closed one (N users).

Every request is an ``Answer``, whole or failed; nothing of a server's failing ends the run, but
one that answers nothing at all is not asked for ever. Knows no statistics.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np

from bench.http_client import HttpError
from bench.serve_asks import Ask
from bench.serve_stream import Answer, EventConnection
from bench.serve_target import Target

GIVE_UP: Final = 50
"""Failed requests, without a good one, after which no more are sent."""
AHEAD: Final = 64
"""Requests of an open loop that are made before their time."""
PAUSE_S: Final = 0.005
"""A pause between arrivals in which one more can be made."""
_ROUTER: Final = b"\r\nx-trserve-router: "


class Pool:
    """Connections that are kept open; a new one is made when none is free."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._free: list[EventConnection] = []

    async def take(self, *, new: bool = False) -> tuple[EventConnection, bool]:
        """A connection, and whether it was used before; raises OSError or TimeoutError."""
        while self._free and not new:
            found = self._free.pop()
            if not found.closed:
                return found, True
        return await self._target.connect(), False

    def give(self, connection: EventConnection) -> None:
        """Have it back after a whole answer."""
        self._free.append(connection)

    def close(self) -> None:
        for each in self._free:
            each.close()


class Load:
    """What was asked and what came. ``ended`` is called with every answer at its end."""

    def __init__(self, target: Target, timeout_s: float, ended: Callable[[Answer], None]) -> None:
        self.target = target
        self.answers: list[Answer] = []
        self._timeout_s = timeout_s
        self._ended = ended
        self._pool = Pool(target)
        self._good = 0

    @property
    def hopeless(self) -> bool:
        """Whether nothing but failures came."""
        return not self._good and len(self.answers) >= GIVE_UP

    async def send(self, ask: Ask, data: bytes, due_s: float) -> None:
        """Send ``data``, which is ``ask``'s, and read the answer to its end."""
        answer = Answer(due_s, time.perf_counter(), ask.prompt_tokens)
        try:
            await self._exchange(data, answer)
            answer.judge()
        except HttpError as error:
            answer.error = f"http {error}" if error.status else str(error)
        except TimeoutError:
            answer.error = f"no whole answer within {self._timeout_s:g} s"
        except OSError as error:
            answer.error = f"no connection: {error}"
        self._good += answer.error is None
        self.answers.append(answer)
        self._ended(answer)

    async def _exchange(self, data: bytes, answer: Answer) -> None:
        """A connection that the server closed while it was idle is no failure: once more, anew."""
        connection, used = await self._pool.take()
        try:
            await self._stream(connection, data, answer)
        except HttpError as error:
            if error.status or not used or answer.ended_s:
                raise
            connection, _ = await self._pool.take(new=True)
            await self._stream(connection, data, answer)

    async def _stream(self, connection: EventConnection, data: bytes, answer: Answer) -> None:
        try:
            await connection.events(data, self._timeout_s, answer.take)
        except BaseException:
            connection.close()
            raise
        _, found, rest = connection.head.partition(_ROUTER)
        answer.router = rest.partition(b"\r\n")[0].decode() if found else None
        self._pool.give(connection)

    def close(self) -> None:
        """Close the connections that are idle."""
        self._pool.close()


async def closed_loop(
    load: Load, asks: Iterator[Ask], users: int, until_s: float = math.inf
) -> None:
    """``users`` at once, each asks again as soon as an answer ends, until ``asks`` or time do.

    ``until_s`` is ``time.perf_counter``; what is under way then is read to its end.
    """

    async def user() -> None:
        for ask in asks:
            if time.perf_counter() >= until_s or load.hopeless:
                return
            data = load.target.request(ask)
            await load.send(ask, data, time.perf_counter())

    async with asyncio.TaskGroup() as group:
        for _ in range(users):
            group.create_task(user())


async def open_loop(
    load: Load,
    asks: Iterable[tuple[float, Ask]],
    most: int | None = None,
    until_s: float = math.inf,
) -> None:
    """Every ask at its time, in seconds from now, however many are under way; at ``most`` so many.

    Requests are made ahead, so that they are only sent at their times.
    """
    room = asyncio.Semaphore(most) if most else None

    async def one(ask: Ask, data: bytes, due_s: float) -> None:
        try:
            await load.send(ask, data, due_s)
        finally:
            if room is not None:
                room.release()

    ready = _Ahead(load.target, asks)
    await ready.make_until(math.inf)
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        while (following := ready.take()) is not None:
            at_s, ask, data = following
            due_s = begin + at_s
            if due_s >= until_s or load.hopeless:
                break
            await ready.make_until(due_s)
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            if room is not None:
                await room.acquire()
            group.create_task(one(ask, data, due_s))


class _Ahead:
    """Requests made before their time, in the pauses between others."""

    def __init__(self, target: Target, asks: Iterable[tuple[float, Ask]]) -> None:
        self._target = target
        self._asks = iter(asks)
        self._made: deque[tuple[float, Ask, bytes]] = deque()

    def take(self) -> tuple[float, Ask, bytes] | None:
        """The next one with its time; None at the end."""
        if not self._made:
            self._make()
        return self._made.popleft() if self._made else None

    async def make_until(self, due_s: float) -> None:
        """Make more of them, as long as there is time; others run between any two."""
        while len(self._made) < AHEAD and time.perf_counter() < due_s - PAUSE_S and self._make():
            await asyncio.sleep(0)

    def _make(self) -> bool:
        following = next(self._asks, None)
        if following is not None:
            self._made.append((*following, self._target.request(following[1])))
        return following is not None


def arrivals(rate: float, burstiness: float | None, seed: int) -> Iterator[float]:
    """Times of requests in seconds, without end; the first is at 0.

    Gaps are Gamma distributed with the mean 1 / ``rate`` and the shape ``burstiness``: 1 is a
    Poisson process, less comes in bursts, more is steadier, None is one after the other evenly.
    """
    dice = np.random.default_rng(seed)
    at = 0.0
    while True:
        yield at
        at += 1 / rate if burstiness is None else dice.gamma(burstiness, 1 / (rate * burstiness))
