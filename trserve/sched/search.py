"""The best batch thresholds: every feasible vector, exactly if that fits the budget.

The result says which method it comes from:

- ``exact``: T(B) of every feasible vector was solved.
- ``coarse-search``: that would have taken too long. All vectors were solved with a quantum of
  about a tenth of the shortest step, and those that came within 3 % of the best were solved again
  with the quantum that was asked for, best first, while time was left. The values are exact, the
  search is not exhaustive.
- ``simulation``: that would have taken too long too, or too much memory. The chain was simulated,
  see ``halving``. Where there are more vectors than can be simulated in the time, thresholds on
  a roughly geometric grid stand for all.

All of it runs on one thread; give the process one BLAS thread too (OMP_NUM_THREADS=1), because more
only spin. Knows nothing of estimates, hysteresis or workers.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb
from typing import Final

import numpy as np

from trserve.sched.explore import BudgetExceeded
from trserve.sched.halving import halve
from trserve.sched.markov import check, throughput
from trserve.sched.system import System, coarsened
from trserve.sched.vectors import Vector

EXACT: Final = "exact"
COARSE: Final = "coarse-search"
SIMULATION: Final = "simulation"

TIE: Final = 1e-9
MAX_CANDIDATES: Final = 4096
_FEWEST: Final = 48
_VECTORS_PER_S: Final = 250
"""First runs of that many took about half a second on one core."""

_SHARE: Final = 0.7
"""Of the time that is left; what one method does not use is left to the next."""

_CHEAPEST_MEAN: Final = 8
"""Eager's chain is the largest; the mean of all was 4 to 8 times cheaper wherever measured."""

_WORTH_SOLVING: Final = 0.97
"""Of the best coarse value: vectors below it are not solved again."""


@dataclass(frozen=True)
class Solution:
    """The best thresholds at one concurrency.

    ``standard_error`` (tokens/s, of ``tokens_per_s``) is 0 for an exact one. ``values`` holds
    T(B) of every vector, or of those that were left after the last round of simulation.
    """

    concurrency: int
    vector: Vector
    tokens_per_s: float
    eager_tokens_per_s: float
    method: str
    standard_error: float
    values: dict[Vector, float]

    @property
    def gain(self) -> float:
        """How much more than eager execution, as a share of it."""
        return self.tokens_per_s / self.eager_tokens_per_s - 1


def feasible_vectors(models: int, concurrency: int) -> Iterator[Vector]:
    """All vectors with ``sum(B - 1) <= N - 1``, by rising sum, then lexicographically."""
    for total in range(concurrency):
        for cut in itertools.combinations(range(total + models - 1), models - 1):
            edges = (-1, *cut, total + models - 1)
            yield tuple(high - low for low, high in itertools.pairwise(edges))


def feasible_count(models: int, concurrency: int) -> int:
    return comb(concurrency - 1 + models, models)


def best_of(values: dict[Vector, float]) -> Vector:
    """The vector of the largest value; ties within TIE go to the smaller sum, then the smaller."""
    most = max(values.values())
    tied = [vector for vector, value in values.items() if value >= most * (1 - TIE)]
    return min(tied, key=lambda vector: (sum(vector), vector))


def search(
    system: System,
    concurrency: int,
    *,
    budget_s: float | None = None,
    candidates: Sequence[Vector] | None = None,
    seed: int = 0,
) -> Solution:
    """The best of all feasible vectors, or of ``candidates`` (eager is always one).

    ``budget_s``: seconds of this thread's processor time (what others run meanwhile does not change
    the answer), kept to within one round of simulation; None: whatever the exact solution takes
    (which still falls back if memory does not allow it). Raises ValueError for candidates that are
    not feasible.
    """
    deadline = math.inf if budget_s is None else time.thread_time() + budget_s
    eager = (1,) * system.models
    chosen: list[Vector] | None = None
    if candidates is not None:
        check(system, concurrency, candidates)
        chosen = list(dict.fromkeys((eager, *candidates)))
    elif feasible_count(system.models, concurrency) <= MAX_CANDIDATES:
        chosen = list(feasible_vectors(system.models, concurrency))
    for method, attempt in ((EXACT, _exact), (COARSE, _coarse)):
        if chosen is None:
            break
        try:
            values = attempt(system, concurrency, chosen, deadline)
        except BudgetExceeded:
            continue
        best = best_of(values)
        return Solution(concurrency, best, values[best], values[eager], method, 0.0, values)
    most = _affordable(deadline)
    if chosen is None or (candidates is None and len(chosen) > most):
        chosen = _thinned(system.models, concurrency, most)
    rng = np.random.default_rng(seed)
    best, estimates = halve(system, concurrency, chosen, deadline, rng)
    values = {vector: estimate.tokens_per_s for vector, estimate in estimates.items()}
    error = estimates[best].standard_error
    return Solution(concurrency, best, values[best], values[eager], SIMULATION, error, values)


def _affordable(deadline: float) -> int:
    """How many vectors can have their first runs in about half of the time that is left."""
    left = deadline - time.thread_time()
    return round(min(MAX_CANDIDATES, max(_FEWEST, left * _VECTORS_PER_S)))


def _exact(
    system: System, concurrency: int, vectors: Sequence[Vector], deadline: float
) -> dict[Vector, float]:
    began = time.thread_time()
    until = began + (deadline - began) * _SHARE
    found: list[float] = []
    took = math.inf
    # The first vectors have the largest chains; the very first call also warms up the libraries.
    for vector in vectors[:2]:
        start = time.thread_time()
        found += throughput(system, concurrency, [vector], deadline=until)
        took = min(took, time.thread_time() - start)
    if took * (len(vectors) - 2) / _CHEAPEST_MEAN > until - began:
        raise BudgetExceeded("the largest of the chains took too long to solve them all")
    found += throughput(system, concurrency, vectors[2:], deadline=until)
    return dict(zip(vectors, found, strict=True))


def _coarse(
    system: System, concurrency: int, vectors: Sequence[Vector], deadline: float
) -> dict[Vector, float]:
    rough_system = coarsened(system)
    if rough_system is system:
        raise BudgetExceeded("the quantum is as coarse as it may be")
    rough = _exact(rough_system, concurrency, vectors, deadline)
    least = max(rough.values()) * _WORTH_SOLVING
    near = sorted(vectors, key=lambda vector: -rough[vector])
    promising = [vector for vector in near if rough[vector] >= least]
    solved: dict[Vector, float] = {}
    for vector in dict.fromkeys((promising[0], vectors[0], *promising)):
        try:
            solved[vector] = throughput(system, concurrency, [vector], deadline=deadline)[0]
        except BudgetExceeded:
            if vectors[0] not in solved:
                raise
            break
    return solved


def evaluate(
    system: System, concurrency: int, vector: Vector, *, budget_s: float | None = None
) -> Solution:
    """T of one vector beside eager's; ``vector`` of the solution is the one that was given."""
    solution = search(system, concurrency, budget_s=budget_s, candidates=[vector])
    value = solution.values[vector]
    return Solution(
        concurrency,
        vector,
        value,
        solution.eager_tokens_per_s,
        solution.method,
        solution.standard_error,
        solution.values,
    )


def _thinned(models: int, concurrency: int, most: int) -> list[Vector]:
    """At most ``most`` feasible vectors on the finest grid that has so few, eager first."""
    grid = [1]
    while grid[-1] < concurrency:
        grid.append(max(grid[-1] + 1, round(grid[-1] * 1.5)))
    while True:
        # One more than fits tells a grid that is too fine from one that is not.
        made = list(itertools.islice(_on_grid(grid, models, concurrency - 1), most + 1))
        if len(made) <= most or len(grid) <= 2:
            return made[:most]
        grid = [1, *grid[2::2]]


def _on_grid(grid: list[int], models: int, room: int) -> Iterator[Vector]:
    """Vectors of grid values whose sum of B - 1 is at most ``room``."""
    if models == 0:
        yield ()
        return
    for threshold in grid:
        if threshold - 1 > room:
            return
        for rest in _on_grid(grid, models - 1, room - threshold + 1):
            yield (threshold, *rest)
