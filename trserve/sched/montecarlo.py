"""Throughput of delayed batching by simulation of the chain: many runs of many vectors at once.

The approximation for systems whose exact solution is too large. Knows nothing of which vectors
are worth a run, nor of anything outside the chain's assumptions (``simulator`` does).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from trserve.sched.chain import Chain, Floats, Ints
from trserve.sched.markov import check
from trserve.sched.system import System
from trserve.sched.vectors import Vector

WARM_UP_EPOCHS: Final = 300
EPOCHS: Final = 700
"""Epochs of a run that count."""

MAX_ROWS: Final = 1 << 15
"""Runs at once; more only cost memory."""


class Estimate(NamedTuple):
    """Tokens per second and its standard error, from ``runs`` independent runs."""

    tokens_per_s: float
    standard_error: float
    runs: int


class Sums:
    """What the runs of each of V vectors earned: sums over runs of reward and time."""

    def __init__(self, vectors: int) -> None:
        self._runs = np.zeros(vectors)
        self._moments = np.zeros((vectors, 5))

    def add(self, vector: Ints, reward: Floats, time: Floats) -> None:
        """One entry a run: its vector, tokens and seconds."""
        parts = (reward, time, reward * reward, reward * time, time * time)
        self._runs += np.bincount(vector, minlength=len(self._runs))
        for column, part in enumerate(parts):
            self._moments[:, column] += np.bincount(vector, part, minlength=len(self._runs))

    def estimate(self, vector: int) -> Estimate:
        """The ratio of means, with the standard error of a ratio (delta method)."""
        runs = self._runs[vector]
        reward, time, reward2, cross, time2 = (self._moments[vector] / runs).tolist()
        rate = reward / time
        spread = reward2 - 2 * rate * cross + rate * rate * time2
        error = np.sqrt(max(0.0, spread) / max(1.0, runs - 1)) / time
        return Estimate(rate, float(error), int(runs))


def simulate(
    system: System,
    concurrency: int,
    vectors: Sequence[Vector],
    runs: int,
    sums: Sums,
    numbers: Ints,
    rng: np.random.Generator,
) -> None:
    """Add ``runs`` runs of each vector to ``sums``, at its place in ``numbers``.

    A run is WARM_UP_EPOCHS epochs that do not count and EPOCHS that do.
    """
    check(system, concurrency, vectors)
    chain = Chain.of(system, concurrency, np.array(vectors, np.int64))
    whole = np.repeat(np.arange(len(vectors)), runs)
    for begin in range(0, len(whole), MAX_ROWS):
        vector = whole[begin : begin + MAX_ROWS]
        reward, time = _run(chain, vector, rng)
        sums.add(numbers[vector], reward, time)


def _run(chain: Chain, vector: Ints, rng: np.random.Generator) -> tuple[Floats, Floats]:
    per_step = chain.system.tokens_per_step
    rows = chain.start(vector)
    reward, time = np.zeros(len(vector)), np.zeros(len(vector))
    for number in range(WARM_UP_EPOCHS + EPOCHS):
        epoch = chain.advance(rows)
        rows = epoch.after
        for model in range(chain.models):
            draws = rng.multinomial(epoch.completed[:, model], chain.system.routing[model])
            chain.move(rows, model, draws.astype(np.int32))
        chain.dispatch(rows, vector)
        if number >= WARM_UP_EPOCHS:
            # The mean reward instead of the drawn one: the same expectation, less noise.
            reward += epoch.completed @ per_step
            time += epoch.elapsed
    return reward, time * (chain.system.delta_ms / 1000)
