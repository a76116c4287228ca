"""A closed loop: N users, each of whom asks again as soon as an answer ends, seen over a window.

Whatever is measured is a ``User`` (asks, and says when first tokens and answers came) and a
``Probe`` (how many tokens there are so far). Tokens are counted by time, not by finished answers:
the probe is read at the window's edges and between. Knows no server and no protocol.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

FIRST_TOKENS_TIMEOUT_S: Final = 120.0
MOST_BATCHES: Final = 20
FEWEST_BATCHES: Final = 5


@dataclass(frozen=True)
class Counts:
    """Totals since the server began; ``at_s`` is ``time.perf_counter``.

    ``tokens`` are committed ones by model, ``handoffs`` moves of a request from model to model,
    ``extra`` other totals by name. Of now are ``thresholds`` and ``step_ms``: each model's batch
    threshold and step latency, empty where nobody says.
    """

    at_s: float
    tokens: tuple[int, ...]
    handoffs: int = 0
    extra: dict[str, float] = field(default_factory=dict)
    thresholds: tuple[int, ...] = ()
    step_ms: tuple[float, ...] = ()


class Probe(Protocol):
    """Reads the totals."""

    async def read(self) -> Counts: ...


@dataclass
class Record:
    """What the users saw: (when, seconds) of first tokens and of whole answers."""

    first_tokens: list[tuple[float, float]] = field(default_factory=list)
    answers: list[tuple[float, float]] = field(default_factory=list)

    def first_token(self, asked_s: float, came_s: float) -> None:
        self.first_tokens.append((came_s, came_s - asked_s))

    def ended(self, asked_s: float, ended_s: float) -> None:
        self.answers.append((ended_s, ended_s - asked_s))


class User(Protocol):
    """Asks one question after the other until it is cancelled."""

    async def run(self, record: Record) -> None: ...


@dataclass(frozen=True)
class Until:
    """When a window may end: with so many tokens and, if given, so small a standard error.

    ``relative_error`` is of the mean throughput. A window lasts ``least_s`` to ``most_s``.
    """

    tokens: int = 0
    relative_error: float | None = None
    least_s: float = 5.0
    most_s: float = 120.0
    warm_up_s: float = 1.0
    batch_s: float = 0.5

    def reached(self, elapsed_s: float, tokens: int, error: float) -> bool:
        if elapsed_s >= self.most_s:
            return True
        precise = self.relative_error is None or error <= self.relative_error
        return elapsed_s >= self.least_s and tokens >= self.tokens and precise


@dataclass(frozen=True)
class Window:
    """What was measured. ``relative_error`` is that of ``tokens_per_s``, by batch means.

    ``thresholds`` and ``step_ms`` are those at its end.
    """

    concurrency: int
    seconds: float
    tokens: tuple[int, ...]
    handoffs: int
    relative_error: float
    ttft_ms: float | None
    latency_s: float | None
    extra: dict[str, float]
    thresholds: tuple[int, ...] = ()
    step_ms: tuple[float, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / self.seconds

    @property
    def per_user_tokens_per_s(self) -> float:
        """In a closed loop every user is served all the time."""
        return self.tokens_per_s / self.concurrency

    @property
    def share(self) -> float:
        """Of the tokens, those that the first model did not write."""
        return 1 - self.tokens[0] / max(sum(self.tokens), 1)


async def measure(
    make_user: Callable[[int], User], probe: Probe, concurrency: int, until: Until
) -> Window:
    """Run the users ``make_user(0..N-1)`` and look at one window after the warm-up.

    Raises TimeoutError if a user has no first token in time; an error of a user comes as an
    ExceptionGroup.
    """
    record = Record()
    users = [make_user(number) for number in range(concurrency)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(user.run(record)) for user in users]
        try:
            await _all_begun(record, concurrency)
            await asyncio.sleep(until.warm_up_s)
            readings = await _watch(probe, until)
        finally:
            for task in tasks:
                task.cancel()
    return window_of(readings, record, concurrency)


async def _all_begun(record: Record, concurrency: int) -> None:
    async with asyncio.timeout(FIRST_TOKENS_TIMEOUT_S):
        while len(record.first_tokens) < concurrency:
            await asyncio.sleep(0.02)


async def _watch(probe: Probe, until: Until) -> list[Counts]:
    readings = [await probe.read()]
    while True:
        due = readings[0].at_s + len(readings) * until.batch_s
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        readings.append(await probe.read())
        elapsed = readings[-1].at_s - readings[0].at_s
        tokens = sum(readings[-1].tokens) - sum(readings[0].tokens)
        if until.reached(elapsed, tokens, relative_error(readings)):
            return readings


def window_of(readings: Sequence[Counts], record: Record, concurrency: int) -> Window:
    """The window between the first and the last of ``readings``."""
    first, last = readings[0], readings[-1]
    inside = [
        [seconds for at, seconds in seen if first.at_s <= at <= last.at_s]
        for seen in (record.first_tokens, record.answers)
    ]
    # Answers that last longer than the window: the first tokens are those of the beginning.
    ttfts = inside[0] or [seconds for _, seconds in record.first_tokens]
    return Window(
        concurrency,
        last.at_s - first.at_s,
        tuple(b - a for a, b in zip(first.tokens, last.tokens, strict=True)),
        last.handoffs - first.handoffs,
        relative_error(readings),
        statistics.median(ttfts) * 1e3 if ttfts else None,
        statistics.mean(inside[1]) if inside[1] else None,
        {name: value - first.extra.get(name, 0.0) for name, value in last.extra.items()},
        last.thresholds,
        last.step_ms,
    )


def relative_error(readings: Sequence[Counts]) -> float:
    """Standard error of the mean throughput by batch means, over that mean; inf if too few.

    Batches are joined until there are at most MOST_BATCHES, so that they stay long against what
    correlates tokens in time.
    """
    width = math.ceil((len(readings) - 1) / MOST_BATCHES)
    edges = readings[:: max(width, 1)]
    rates = [
        (sum(b.tokens) - sum(a.tokens)) / (b.at_s - a.at_s) for a, b in itertools.pairwise(edges)
    ]
    if len(rates) < FEWEST_BATCHES or not any(rates):
        return math.inf
    return statistics.stdev(rates) / math.sqrt(len(rates)) / statistics.mean(rates)
