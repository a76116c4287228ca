"""Successive halving: which of many threshold vectors is best, by simulation of the chain.

Every vector gets a few runs, those that are clearly worse are dropped, and the rest get twice as
many, until the time is over or all that are left are known well enough. Knows nothing of exact
solutions.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from trserve.sched.montecarlo import Estimate, Sums, simulate
from trserve.sched.system import System
from trserve.sched.vectors import Vector

_FIRST_RUNS: Final = 4
_ENOUGH: Final = 1e-3
"""Relative standard error at which a simulated value needs no more runs."""

_CLEARLY: Final = 3.0
"""Standard errors of the difference that make one vector clearly worse than another."""


def halve(
    system: System,
    concurrency: int,
    vectors: list[Vector],
    deadline: float,
    rng: np.random.Generator,
) -> tuple[Vector, dict[Vector, Estimate]]:
    """The best vector and the estimates of the last round; ``vectors[0]`` stays to the end.

    ``vectors[0]`` is also the answer unless another one is clearly better. ``deadline``
    (``time.thread_time``): no round begins that would end after it; the first one always does.
    """
    sums = Sums(len(vectors))
    alive = np.arange(len(vectors))
    runs = _FIRST_RUNS
    while True:
        began = time.thread_time()
        simulate(system, concurrency, [vectors[n] for n in alive], runs, sums, alive, rng)
        took = time.thread_time() - began
        estimates = {int(n): sums.estimate(int(n)) for n in alive}
        if all(e.standard_error <= _ENOUGH * e.tokens_per_s for e in estimates.values()):
            break
        kept = np.array(_survivors(estimates))
        runs *= 2
        expected = 2 * took * len(kept) / len(alive)
        if time.thread_time() + expected > deadline:
            break
        alive = kept
    best = max(estimates, key=lambda n: estimates[n].tokens_per_s)
    if not _clearly_better(estimates[best], estimates[0]):
        best = 0
    return vectors[best], {vectors[n]: estimate for n, estimate in estimates.items()}


def _clearly_better(one: Estimate, other: Estimate) -> bool:
    error = float(np.hypot(one.standard_error, other.standard_error))
    return one.tokens_per_s - other.tokens_per_s > _CLEARLY * error


def _survivors(estimates: dict[int, Estimate]) -> list[int]:
    """Those that the best is not clearly better than, the better half at most, and eager."""
    best = max(estimates.values(), key=lambda estimate: estimate.tokens_per_s)
    rated = sorted(estimates, key=lambda n: -estimates[n].tokens_per_s)
    half = rated[: max(2, len(rated) // 2)]
    return sorted({0, *(n for n in half if not _clearly_better(best, estimates[n]))})
