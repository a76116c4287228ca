"""Throughput of delayed batching, exactly: T(B) from the stationary distribution of the chain.

Knows nothing of searches, estimates or clocks other than its own deadline.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
from scipy import sparse

from trserve.sched.chain import Chain, Ints
from trserve.sched.explore import BudgetExceeded, Graph, explore
from trserve.sched.stationary import long_run_distribution
from trserve.sched.system import System
from trserve.sched.vectors import Vector, is_feasible

_CHUNK_TRANSITIONS: Final = 1_000_000
"""Vectors are solved together while their chains are expected to have so many: enough to carry
the cost of an array operation, little enough for memory (about 60 MB)."""


def throughput(
    system: System,
    concurrency: int,
    vectors: Sequence[Vector],
    *,
    deadline: float | None = None,
) -> list[float]:
    """T(B) in tokens per second of each feasible vector, from "all wait at the entry model".

    ``deadline`` (``time.thread_time``): raises BudgetExceeded past it. Raises ValueError for a
    vector that is not feasible or has the wrong length.
    """
    check(system, concurrency, vectors)
    found: list[float] = []
    size = 1
    while len(found) < len(vectors):
        part = np.array(vectors[len(found) : len(found) + size], np.int64)
        chain = Chain.of(system, concurrency, part)
        graph = explore(chain, deadline=deadline)
        found += _solve(chain, graph, deadline)
        size = max(1, _CHUNK_TRANSITIONS * len(part) // len(graph.source))
    return found


def check(system: System, concurrency: int, vectors: Sequence[Vector]) -> None:
    """Raise ValueError unless all vectors fit the system and are feasible."""
    if concurrency < 1:
        raise ValueError(f"the concurrency must be at least 1, not {concurrency}")
    for vector in vectors:
        if len(vector) != system.models:
            raise ValueError(f"{vector} needs one threshold for each of {system.models} models")
        if not is_feasible(vector, concurrency):
            raise ValueError(
                f"{vector} is not feasible with {concurrency} requests: thresholds are at least 1, "
                f"and the sum of B - 1 is at most {concurrency - 1}"
            )


def _solve(chain: Chain, graph: Graph, deadline: float | None) -> list[float]:
    reward = graph.completed @ chain.system.tokens_per_step
    phase = _phase(chain, graph)
    states = _Groups(graph.vector, len(chain.vectors))
    edges = _Groups(graph.vector[graph.source], len(chain.vectors))
    per_second = 1000 / chain.system.delta_ms
    found = []
    for vector in range(len(chain.vectors)):
        if deadline is not None and time.thread_time() > deadline:
            raise BudgetExceeded("no time left")
        mine, leaving = states.members(vector), edges.members(vector)
        matrix = sparse.csr_array(
            (
                graph.probability[leaving],
                (states.position[graph.source[leaving]], states.position[graph.target[leaving]]),
            ),
            shape=(len(mine), len(mine)),
        )
        shares = long_run_distribution(matrix, phase[mine])
        rate = (shares @ reward[mine]) / (shares @ graph.elapsed[mine])
        found.append(float(rate) * per_second)
    return found


class _Groups:
    """Items by group, each group in the order of the items."""

    def __init__(self, group: Ints, groups: int) -> None:
        self._order = np.argsort(group, kind="stable")
        self._first = np.searchsorted(group[self._order], np.arange(groups + 1))
        self.position = np.empty(len(group), np.int64)
        self.position[self._order] = np.arange(len(group)) - self._first[group[self._order]]

    def members(self, which: int) -> Ints:
        return self._order[self._first[which] : self._first[which + 1]]


def _phase(chain: Chain, graph: Graph) -> Ints:
    """Rank of each state in the cycle of the slowest model: just started, nearly over, idle.

    While it runs, every transition goes up.
    """
    models = chain.models
    slowest = int(np.argmax(chain.latency.max(axis=1)))
    busy = graph.rows[:, models : 2 * models] > 0
    left = np.where(busy, -graph.rows[:, 2 * models : 3 * models], 1)
    others = [left[:, model] for model in range(models) if model != slowest]
    order = np.lexsort([*others, left[:, slowest]])
    phase = np.empty(len(order), np.int64)
    phase[order] = np.arange(len(order))
    return phase
