"""A discrete-event simulation of the workers with their real gates, over any kind of request.

What the Markov model leaves out is in it: visits that are not geometric, routing by position,
requests that end, arrivals, the safety net's openings. Time is in quanta, so that what coincides
in the model coincides here. Knows nothing of processes, clocks or files.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from trserve.sched.estimator import StepEvent
from trserve.sched.gate import Reason, decide, default_max_wait_ms
from trserve.sched.journeys import FINISHED, Journey, Source
from trserve.sched.system import System
from trserve.sched.table import ThresholdTable

BATCHES: Final = 30
"""Batches of the batch-means interval."""

_T_95: Final = 2.045
"""Student's t, two-sided 95 %, for BATCHES - 1 degrees of freedom."""

_WARM_UP: Final = 0.1
"""Share of the simulated time that does not count."""

_FOREVER: Final = 2**62


@dataclass(frozen=True)
class Outcome:
    """What a simulation measured after its warm-up.

    Attributes:
        tokens_per_s: mean, with the 95 % interval ``low`` to ``high`` (batch means).
        steps: steps started, by model.
        rows: requests in those steps, by model.
        openings: how often a gate opened for which reason.
        latency_ms: mean time from a request's arrival to its end; None if none ended.
        mean_live: mean number of live requests.
    """

    tokens_per_s: float
    low: float
    high: float
    steps: tuple[int, ...]
    rows: tuple[int, ...]
    openings: dict[Reason, int]
    latency_ms: float | None
    mean_live: float

    @property
    def half_width(self) -> float:
        """Of the 95 % interval."""
        return (self.high - self.low) / 2


class Control(Protocol):
    """What watches a simulation and may change its thresholds, as the runtime's policy does."""

    def step(self, now_ms: float, live: int, event: StepEvent) -> ThresholdTable | None:
        """A step ended at ``now_ms`` with ``live`` requests; the table from now on, or None."""


def simulate(
    system: System,
    concurrency: int,
    table: ThresholdTable,
    source: Source,
    *,
    seconds: float,
    arrivals_ms: Sequence[float] | None = None,
    max_wait_ms: float | None = None,
    control: Control | None = None,
) -> Outcome:
    """Run ``seconds`` of simulated time.

    Without ``arrivals_ms`` the system is closed: ``concurrency`` requests are always live. With
    it, a request arrives at each of these times, and at most ``concurrency`` are live at once;
    the others wait outside. ``max_wait_ms``: the gate's; None: its default; inf: never.
    ``control`` is told of every step.
    """
    run = _Run(system, concurrency, table, source, seconds, arrivals_ms, max_wait_ms, control)
    run.play()
    return run.outcome()


class _Request:
    __slots__ = ("arrived", "journey")

    def __init__(self, journey: Journey, arrived: int) -> None:
        self.journey = journey
        self.arrived = arrived


class _Run:
    def __init__(
        self,
        system: System,
        concurrency: int,
        table: ThresholdTable,
        source: Source,
        seconds: float,
        arrivals_ms: Sequence[float] | None,
        max_wait_ms: float | None,
        control: Control | None,
    ) -> None:
        models = system.models
        self._system, self._table, self._source = system, table, source
        self._control = control
        self._most, self._closed = concurrency, arrivals_ms is None
        self._latency: list[list[int]] = system.latency_quanta(concurrency).tolist()
        self._delay: list[list[int]] = system.delay_quanta().tolist()
        self._per_s = 1000 / system.delta_ms
        self._end = round(seconds * self._per_s)
        self._max_wait = self._quanta(
            default_max_wait_ms(system.slowest_ms) if max_wait_ms is None else max_wait_ms
        )
        self._buffers: list[list[tuple[int, _Request]]] = [[] for _ in range(models)]
        self._batches: list[list[_Request]] = [[] for _ in range(models)]
        self._running = [0] * models
        self._live = 0
        self._outside: deque[int] = deque()
        # (time, sequence number, model, request): a step's end without a request, else an arrival
        # at the model; model -1 is an arrival at the server.
        self._events: list[tuple[int, int, int, _Request | None]] = []
        self._number = 0
        self._wake = [_FOREVER] * models
        self._begin = round(self._end * _WARM_UP)
        self._batch_tokens = [0.0] * BATCHES
        self._steps, self._rows = [0] * models, [0] * models
        self._openings: Counter[Reason] = Counter()
        self._ended, self._latency_sum = 0, 0
        self._live_area, self._last = 0, 0
        for at in arrivals_ms or ():
            self._post(self._quanta(at), -1, None)

    def _quanta(self, ms: float) -> int:
        return _FOREVER if math.isinf(ms) else round(ms / self._system.delta_ms)

    def _post(self, at: int, model: int, request: _Request | None) -> None:
        heapq.heappush(self._events, (at, self._number, model, request))
        self._number += 1

    def play(self) -> None:
        if self._closed:
            for _ in range(self._most):
                self._admit(0, 0)
        self._open_gates(0)
        while (now := self._next_time()) < self._end:
            self._count_live(now)
            while self._events and self._events[0][0] == now:
                _, _, model, request = heapq.heappop(self._events)
                self._happen(now, model, request)
            self._open_gates(now)
        self._count_live(self._end)

    def _next_time(self) -> int:
        first = self._events[0][0] if self._events else _FOREVER
        return min(first, *self._wake)

    def _count_live(self, now: int) -> None:
        self._live_area += self._live * (now - max(self._last, self._begin)) * (now > self._begin)
        self._last = now

    def _happen(self, now: int, model: int, request: _Request | None) -> None:
        if model < 0:
            self._arrive(now)
        elif request is None:
            self._complete(now, model)
        else:
            self._buffers[model].append((now, request))

    def _arrive(self, now: int) -> None:
        if self._live < self._most:
            self._admit(now, now)
        else:
            self._outside.append(now)

    def _admit(self, now: int, arrived: int) -> None:
        request = _Request(self._source.next(), arrived)
        self._live += 1
        self._buffers[request.journey.entry].append((now, request))

    def _complete(self, now: int, model: int) -> None:
        batch, self._batches[model], self._running[model] = self._batches[model], [], 0
        moved, earned = [0] * self._system.models, [0.0] * self._system.models
        for request in batch:
            target, committed = request.journey.step(model)
            # A request that ends is one that stays, for whoever estimates P.
            to = model if target == FINISHED else target
            moved[to] += 1
            earned[to] += committed
            if target == FINISHED:
                self._finish(now, request)
            elif delay := self._delay[model][target]:
                self._post(now + delay, target, request)
            else:
                self._buffers[target].append((now, request))
        if now >= self._begin:
            span = max(1, self._end - self._begin)
            self._batch_tokens[(now - self._begin) * BATCHES // span] += sum(earned)
        if self._control is not None:
            delta = self._system.delta_ms
            duration = self._latency[model][len(batch)] * delta
            event = StepEvent(model, duration, len(batch), moved, earned)
            table = self._control.step(now * delta, self._live, event)
            self._table = self._table if table is None else table

    def _finish(self, now: int, request: _Request) -> None:
        self._live -= 1
        if now >= self._begin:
            self._ended += 1
            self._latency_sum += now - request.arrived
        if self._closed:
            self._admit(now, now)
        elif self._outside:
            self._admit(now, self._outside.popleft())

    def _open_gates(self, now: int) -> None:
        thresholds = self._table.row(self._live)
        buffered = [len(buffer) for buffer in self._buffers]
        for model, buffer in enumerate(self._buffers):
            self._wake[model] = _FOREVER
            if self._running[model] or not buffer:
                continue
            decision = decide(
                model,
                buffered=buffered,
                running=self._running,
                thresholds=thresholds,
                live=self._live,
                waited=now - buffer[0][0],
                max_wait=self._max_wait,
            )
            if decision.reason is not None:
                buffered[model] = 0
                self._start(now, model, decision.reason)
            elif decision.wait is not None:
                self._wake[model] = min(_FOREVER, now + decision.wait)

    def _start(self, now: int, model: int, reason: Reason) -> None:
        batch = [request for _, request in self._buffers[model]]
        self._buffers[model] = []
        self._batches[model], self._running[model] = batch, len(batch)
        self._post(now + self._latency[model][len(batch)], model, None)
        if now >= self._begin:
            self._steps[model] += 1
            self._rows[model] += len(batch)
            self._openings[reason] += 1

    def outcome(self) -> Outcome:
        seconds = (self._end - self._begin) / self._per_s
        rates = [tokens * BATCHES / seconds for tokens in self._batch_tokens]
        mean = sum(rates) / BATCHES
        variance = sum((rate - mean) ** 2 for rate in rates) / (BATCHES - 1)
        half = _T_95 * math.sqrt(variance / BATCHES)
        return Outcome(
            mean,
            mean - half,
            mean + half,
            tuple(self._steps),
            tuple(self._rows),
            {reason: self._openings[reason] for reason in Reason},
            self._latency_sum * self._system.delta_ms / self._ended if self._ended else None,
            self._live_area / max(1, self._end - self._begin),
        )
