"""Where simulated requests go after each step: by P, by position, or as a recorded trace says.

Knows nothing of time, batches or gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from trserve.sched.system import Matrix, System

FINISHED: Final = -1
"""Instead of a destination: the request is over."""


class Journey(Protocol):
    """One request's way."""

    @property
    def entry(self) -> int:
        """The model that writes first."""

    def step(self, model: int) -> tuple[int, float]:
        """After a step at ``model``: (destination, or FINISHED; the tokens it committed)."""


class Source(Protocol):
    """Where requests come from."""

    def next(self) -> Journey:
        """The next request; there is always one."""


class Uniforms:
    """Seeded numbers in [0, 1), drawn in blocks because one call a number is slow."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._left: list[float] = []

    def next(self) -> float:
        if not self._left:
            self._left = self._rng.random(4096).tolist()
        return self._left.pop()


class MarkovSource:
    """Requests without an end that follow P: what the Markov model assumes."""

    def __init__(self, system: System, seed: int) -> None:
        phases = _cumulative([(0.0, system.routing)])
        self._journey = _Positional(phases, system.tokens.tolist(), None, Uniforms(seed))

    def next(self) -> Journey:
        # No state of its own: one object serves all requests.
        return self._journey


class PositionalSource:
    """Requests whose P depends on how many tokens they have, and that may end.

    Args:
        system: gives C; its P is not used.
        phases: (first position, P) by rising position, the first at 0.
        length: tokens after which a request ends; None: never.
    """

    def __init__(
        self,
        system: System,
        phases: Sequence[tuple[float, Matrix]],
        length: float | None,
        seed: int,
    ) -> None:
        self._phases = _cumulative(phases)
        self._tokens: list[list[float]] = system.tokens.tolist()
        self._length = length
        self._uniforms = Uniforms(seed)

    def next(self) -> Journey:
        return _Positional(self._phases, self._tokens, self._length, self._uniforms)


Phases = list[tuple[float, list[list[float]]]]


def _cumulative(phases: Sequence[tuple[float, Matrix]]) -> Phases:
    return [(start, np.cumsum(matrix, axis=1).tolist()) for start, matrix in phases]


class _Positional:
    def __init__(
        self,
        phases: Phases,
        tokens: list[list[float]],
        length: float | None,
        uniforms: Uniforms,
    ) -> None:
        self.entry = 0
        self._phases = phases
        self._tokens = tokens
        self._length = float("inf") if length is None else length
        self._uniforms = uniforms
        self._position = 0.0
        self._phase = 0

    def step(self, model: int) -> tuple[int, float]:
        row = self._phases[self._phase][1][model]
        draw = self._uniforms.next()
        target = next((j for j, edge in enumerate(row) if draw < edge), len(row) - 1)
        committed = self._tokens[model][target]
        if self._length == float("inf") and len(self._phases) == 1:
            return target, committed
        self._position += committed
        last = len(self._phases) - 1
        while self._phase < last and self._position >= self._phases[self._phase + 1][0]:
            self._phase += 1
        return (FINISHED if self._position >= self._length else target), committed


class Visit(NamedTuple):
    """A request's stay at one model: ``steps`` steps in a row, which committed ``tokens``."""

    model: int
    steps: int
    tokens: float


class TraceSource:
    """Recorded requests, over and over, from a random one on."""

    def __init__(self, requests: Sequence[Sequence[Visit]], seed: int) -> None:
        self._requests = requests
        self._next = int(np.random.default_rng(seed).integers(len(requests)))

    def next(self) -> Journey:
        visits = self._requests[self._next]
        self._next = (self._next + 1) % len(self._requests)
        return Replay(visits)


class Replay:
    """One recorded request; a visit's tokens are spread evenly over its steps."""

    def __init__(self, visits: Sequence[Visit]) -> None:
        self.entry = visits[0].model
        self._visits = visits
        self._visit = 0
        self._left = visits[0].steps

    def step(self, model: int) -> tuple[int, float]:
        visit = self._visits[self._visit]
        committed = visit.tokens / visit.steps
        self._left -= 1
        if self._left:
            return model, committed
        self._visit += 1
        if self._visit == len(self._visits):
            return FINISHED, committed
        following = self._visits[self._visit]
        self._left = following.steps
        return following.model, committed
