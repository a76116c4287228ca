"""Online estimates of P, C, L(b) and N from what happened: exponentially weighted, with warm-up.

One estimator holds the whole system; it is fed one event a step, or one for several alike. Two
windows of the same counts run side by side: a long one, whose values are given out, and a short
one that only watches. When they differ by more than chance allows, the long one starts afresh, so
that a change is followed within a few hundred decisions and a steady state is still averaged over
a thousand and more.
Knows nothing of clocks, thresholds or solvers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from trserve.sched.system import DEFAULT_DELTA_MS, Latency, Matrix, System, make_system

LONG_HALF_LIFE: Final = 1000
"""Decisions (requests' steps at one model) after which one counts half."""

SHORT_HALF_LIFE: Final = 60
STEP_HALF_LIFE: Final = 64
"""Steps of one width after which a duration counts half."""

LIVE_HALF_LIFE_MS: Final = 1000.0
MIN_DECISIONS: Final = 50
MIN_STEPS: Final = 20
_FORGOTTEN: Final = 4 * SHORT_HALF_LIFE
_FINEST_PARTS: Final = 32
"""Quanta that the shortest step has at least: steps of a small model on a CPU take 0.2 ms."""

_SURPRISE: Final = 5.0
"""Standard errors between the windows that are taken for a change."""


@dataclass(frozen=True)
class StepEvent:
    """One step of one model, or several of one width.

    Attributes:
        model: who ran it.
        duration_ms: how long; of several the mean.
        width: requests in the batch; 0 if only ``moved`` and ``committed`` are told.
        moved: [M] requests that it sent to each model; ``moved[model]`` stayed.
        committed: [M] tokens that it committed for those.
        pure_decode: False if the step had prompt chunks, whose time says nothing about L(b).
    """

    model: int
    duration_ms: float
    width: int
    moved: Sequence[int]
    committed: Sequence[float]
    pure_decode: bool = True
    steps: int = 1


class _Window:
    """Exponentially weighted counts of where requests went and what they committed."""

    def __init__(self, models: int, half_life: float) -> None:
        self._keep = 0.5 ** (1 / half_life)
        self.moved = np.zeros(models)
        self.committed = np.zeros(models)
        # The sum of squared weights, from which the number of independent decisions follows.
        self._squares = 0.0

    @property
    def total(self) -> float:
        return float(self.moved.sum())

    @property
    def decisions(self) -> float:
        """How many equally weighted decisions would be as certain."""
        return self.total**2 / self._squares if self._squares else 0.0

    def add(self, moved: Sequence[int], committed: Sequence[float]) -> None:
        count = sum(moved)
        keep = self._keep**count
        self.moved = self.moved * keep + moved
        self.committed = self.committed * keep + committed
        self._squares = self._squares * keep * keep + count


class _Row:
    """Where one model's requests go."""

    def __init__(self, models: int) -> None:
        self._models = models
        self._long = _Window(models, LONG_HALF_LIFE)
        self._short = _Window(models, SHORT_HALF_LIFE)
        self._since_change = 0
        self.changes = 0

    def add(self, moved: Sequence[int], committed: Sequence[float]) -> None:
        self._long.add(moved, committed)
        self._short.add(moved, committed)
        self._since_change += sum(moved)
        # Before that the short window still holds what was before the last change.
        if self._since_change >= _FORGOTTEN and self._has_changed():
            self._long = _Window(self._models, LONG_HALF_LIFE)
            self._since_change = 0
            self.changes += 1

    @property
    def best(self) -> _Window:
        """The long window, but for the first decisions after a change."""
        return self._long if self.settled else self._short

    @property
    def settled(self) -> bool:
        """Whether enough decisions have come since the last change; or there was none."""
        return not self.changes or self._long.decisions >= MIN_DECISIONS

    def _has_changed(self) -> bool:
        short, long = self._short, self._long
        for now, before in zip(short.moved.tolist(), long.moved.tolist(), strict=True):
            p, q = now / short.total, before / long.total
            # Of the pooled rate, and never 0: one rare event in the short window is no surprise.
            rate = max((now + before) / (short.total + long.total), 1 / short.decisions)
            if abs(p - q) > _SURPRISE * math.sqrt(rate * (1 - min(rate, 0.5)) / short.decisions):
                return True
        return False


class _Curve:
    """Step durations by batch width."""

    def __init__(self) -> None:
        self._mean: dict[int, float] = {}
        self._weight: dict[int, float] = {}
        self.steps = 0

    def add(self, width: int, duration_ms: float, steps: int) -> None:
        self.steps += steps
        keep = 0.5 ** (steps / STEP_HALF_LIFE)
        new = (1 - keep) / (1 - 0.5 ** (1 / STEP_HALF_LIFE))
        weight = self._weight.get(width, 0.0) * keep + new
        mean = self._mean.get(width, 0.0)
        self._mean[width] = mean + (duration_ms - mean) * new / weight
        self._weight[width] = weight

    def points(self) -> dict[int, float]:
        """A curve that never falls: wider steps that seem shorter are pooled with their left."""
        pools: list[tuple[float, float, list[int]]] = []
        for width in sorted(self._mean):
            mean, weight, members = self._mean[width], self._weight[width], [width]
            while pools and pools[-1][0] > mean:
                left_mean, left_weight, left = pools.pop()
                mean = (mean * weight + left_mean * left_weight) / (weight + left_weight)
                weight, members = weight + left_weight, left + members
            pools.append((mean, weight, members))
        return {width: mean for mean, _, members in pools for width in members}


@dataclass(frozen=True)
class Estimate:
    """What is known at one moment.

    Attributes:
        system: P, C and L(b), for the solver.
        decisions: [M] by how many independent decisions row i of P is known.
        live: N, averaged over about a second.
        changes: how often a row of P was found to have changed.
        settled: whether all that is said is from after the last change.
    """

    system: System
    decisions: tuple[float, ...]
    live: float
    changes: int
    settled: bool = True

    def leave_error(self, model: int) -> float:
        """The standard error of the probability that a step leaves ``model``."""
        if self.decisions[model] <= 0:
            return 0.0
        stays = float(self.system.routing[model, model])
        return math.sqrt(stays * (1 - stays) / self.decisions[model])


class Estimator:
    """Feed it ``observe`` for every step and ``observe_live`` now and then; ask ``estimate``."""

    def __init__(self, models: int, *, entry: int = 0, delta_ms: float = DEFAULT_DELTA_MS) -> None:
        self._models = models
        self._entry = entry
        self._delta_ms = delta_ms
        self._rows = [_Row(models) for _ in range(models)]
        self._curves = [_Curve() for _ in range(models)]
        self._live = 0.0
        self._live_ms = 0.0

    def observe(self, event: StepEvent) -> None:
        """A step is over, or several. O(M)."""
        if event.width > 0 and event.pure_decode and event.duration_ms > 0:
            self._curves[event.model].add(event.width, event.duration_ms, event.steps)
        if sum(event.moved):
            self._rows[event.model].add(event.moved, event.committed)

    def observe_live(self, live: int, elapsed_ms: float) -> None:
        """N was ``live`` for the last ``elapsed_ms``."""
        self._live_ms += elapsed_ms
        # Until a half-life has passed, a plain average.
        decay = 1 - 0.5 ** (elapsed_ms / LIVE_HALF_LIFE_MS)
        share = max(decay, elapsed_ms / self._live_ms) if self._live_ms > 0 else 0.0
        self._live += (live - self._live) * min(1.0, share)

    @property
    def live(self) -> float:
        """N, averaged over about a second."""
        return self._live

    @property
    def changes(self) -> int:
        """How often a row of P was found to have changed."""
        return sum(row.changes for row in self._rows)

    @property
    def is_warm(self) -> bool:
        """Whether every model that requests reach has been seen often enough to plan with."""
        return not self._cold()

    def _cold(self) -> list[int]:
        reached = {self._entry}
        for row in self._rows:
            reached |= set(np.flatnonzero(row.best.moved).tolist())
        return [
            model
            for model in sorted(reached)
            if self._rows[model].best.decisions < MIN_DECISIONS
            or self._curves[model].steps < MIN_STEPS
        ]

    def estimate(self) -> Estimate | None:
        """What is known, or None during warm-up."""
        if self._cold():
            return None
        latencies = [self._latency(model) for model in range(self._models)]
        system = make_system(
            self._matrix("moved").tolist(),
            self._matrix("committed").tolist(),
            latencies,
            delta_ms=min(self._delta_ms, _shortest(latencies) / _FINEST_PARTS),
        )
        return Estimate(
            system,
            tuple(row.best.decisions for row in self._rows),
            self._live,
            self.changes,
            all(row.settled for row in self._rows),
        )

    def _matrix(self, what: str) -> Matrix:
        """P (``moved``) or C (``committed``)."""
        made = np.zeros((self._models, self._models))
        for model, row in enumerate(self._rows):
            window = row.best
            if what == "committed":
                # Where nobody went, what was committed does not matter.
                made[model] = window.committed / np.maximum(window.moved, 1e-12)
            elif window.total > 0:
                made[model] = window.moved / window.total
            else:
                # Nobody was there, so nobody can say; it cannot be reached either.
                made[model, self._entry] = 1.0
        return made

    def _latency(self, model: int) -> Latency:
        points = self._curves[model].points()
        return (
            points
            if points
            else min(ms for curve in self._curves for ms in curve.points().values())
        )


def _shortest(latencies: Sequence[Latency]) -> float:
    return min(min(curve.values()) if isinstance(curve, Mapping) else curve for curve in latencies)
