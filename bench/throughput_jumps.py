"""Does a serving server follow its load? Jumps of p and of N, on one emulated server on ``auto``.

p goes from 0.05 to 0.6 by ``POST /v1/trserve/routing``, under sixteen requests that go on; then
fourteen of their users leave. For each jump: the seconds until the thresholds that the workers have
in force are the best of the new system, or yield at least 98 % of what those do; and the
throughput of the 30 seconds that begin when that is asked to have happened, over T(B*) at the
realised p. Knows no tables.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import uvloop

from bench.closed_loop import Counts, Record
from bench.common import Row
from bench.endpoint import Address, Asked, MetricsProbe, StreamUser, launched, set_router
from bench.prediction import best
from bench.systems import Vector, gate_arguments
from bench.throughput_pair import LONG, Verdict, pair_at, setup_at

FIRST_P: Final = 0.05
FIRST_N: Final = 16
FOLLOWS_S: Final = 3.0
YIELDS: Final = 0.98
THEN_S: Final = 30.0
LEAST: Final = 0.95
SETTLES_S: Final = 12.0
_LOOK_EVERY_S: Final = 0.1


@dataclass(frozen=True)
class Jump:
    """The system from then on; its best thresholds and T(B) of all, at the asked p."""

    name: str
    p: float
    live: int
    best: Vector
    values: Mapping[Vector, float]

    def is_followed_by(self, thresholds: Vector) -> bool:
        """Whether ``thresholds`` are the best, or near enough."""
        return self.values.get(thresholds, 0.0) >= YIELDS * self.values[self.best]


def jump(name: str, p: float, live: int) -> Jump:
    """A jump to ``p`` and N = ``live``."""
    solution = best(pair_at(p), live)
    return Jump(name, p, live, solution.vector, solution.values)


def follows_jumps(quick: bool) -> tuple[list[Row], list[Verdict]]:
    """Part 5."""
    jumps = [
        jump(f"p {FIRST_P:g} to 0.6, N={FIRST_N}", 0.6, FIRST_N),
        jump(f"N {FIRST_N} to 2, p=0.6", 0.6, 2),
    ]
    key = secrets.token_hex(16)
    setup = setup_at(FIRST_P)
    arguments = [
        *setup.arguments(setup.models),
        *setup.algorithm.router_arguments(setup.device),
        *gate_arguments("delayed-auto", None, len(setup.models)),
    ]
    with launched(arguments, {"TRSERVE_ADMIN_KEY": key}) as address:
        rows = uvloop.run(_serve(address, key, jumps, quick=quick))
    return rows, [verdict for row in rows for verdict in _verdicts(row)]


async def _serve(address: Address, key: str, jumps: list[Jump], *, quick: bool) -> list[Row]:
    settles_s, then_s = (SETTLES_S / 2, THEN_S / 5) if quick else (SETTLES_S, THEN_S)
    rows, p = [], FIRST_P
    probe = await MetricsProbe.open(address)
    try:
        async with _users(address) as users:
            await asyncio.sleep(settles_s)
            for each in jumps:
                if each.p != p:
                    await set_router(address, key, {"p": each.p})
                    p = each.p
                while len(users) > each.live:
                    users.pop().cancel()
                rows.append(await _watch(probe, each, then_s))
    finally:
        probe.close()
    return rows


@asynccontextmanager
async def _users(address: Address) -> AsyncIterator[list[asyncio.Task[None]]]:
    """FIRST_N users that ask without end; who is cancelled leaves."""
    record, asked = Record(), Asked(LONG)
    async with asyncio.TaskGroup() as group:
        users = [
            group.create_task(StreamUser(address, asked, number, FIRST_N).run(record))
            for number in range(FIRST_N)
        ]
        try:
            yield users
        finally:
            for user in users:
                user.cancel()


async def _watch(probe: MetricsProbe, to: Jump, then_s: float) -> Row:
    """The row of a jump that happened just now."""
    jumped = time.perf_counter()
    followed: float | None = None
    begin: Counts | None = None
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        now = await probe.read()
        since = now.at_s - jumped
        if followed is None and to.is_followed_by(now.thresholds):
            followed = since
        if begin is None and since >= FOLLOWS_S:
            begin = now
        if begin is not None and now.at_s - begin.at_s >= then_s:
            return _row(to, followed, begin, now)


def _row(to: Jump, followed: float | None, begin: Counts, end: Counts) -> Row:
    small, large = (b - a for a, b in zip(begin.tokens, end.tokens, strict=True))
    seconds = end.at_s - begin.at_s
    rate, p = (small + large) / seconds, large / (small + large)
    expected = best(pair_at(p), to.live).tokens_per_s
    return {
        "system": "delayed-auto",
        "jump": to.name,
        "concurrency": to.live,
        "follows_s": followed,
        "batch_threshold": list(end.thresholds),
        "best_batch_threshold": list(to.best),
        "tokens_per_s": rate,
        "predicted_tokens_per_s": expected,
        "ratio": rate / expected,
        "p": p,
        "tokens": small + large,
        "seconds": seconds,
    }


def _verdicts(row: Row) -> list[Verdict]:
    follows, ratio, name = row["follows_s"], row["ratio"], row["jump"]
    return [
        Verdict(
            f"{name}: seconds until B* or {YIELDS:g} of T(B*)",
            follows,
            f"at most {FOLLOWS_S:g}",
            follows is not None and follows <= FOLLOWS_S,
        ),
        Verdict(
            f"{name}: the next {row['seconds']:.0f} s over T(B*)",
            ratio,
            f"at least {LEAST:g}",
            ratio >= LEAST,
        ),
    ]
