"""Reachable-state search: every state that a chain can meet, and the transitions between them.

One breadth-first search serves many threshold vectors: each array operation then carries the
frontiers of all of them, which is what makes a search over thresholds fast. Knows nothing of
stationary distributions or of what a state is worth.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import comb
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trserve.sched.chain import Chain, Floats, Ints, Outcomes, Rows, outcomes

MAX_TRANSITIONS: Final = 8_000_000
"""About half a gigabyte of arrays; what needs more is not solved exactly."""


MAX_OUTCOMES: Final = 200_000
"""Ways in which the requests of steps of one model can spread, all batch widths together."""


class BudgetExceeded(Exception):
    """The exact solution needs more time or memory than it was given."""


class Graph:
    """The reachable part of a chain: S states, E transitions.

    Attributes:
        vector: [S] index of the state's threshold vector; state v is the start of vector v.
        elapsed: [S] quanta that it lasts.
        completed: [S, M] requests whose step completes at its end.
        rows: [S, W] the states.
        source, target, probability: [E] the transitions.
    """

    def __init__(self, parts: list[_Level]) -> None:
        self.vector = np.concatenate([part.vector for part in parts])
        self.elapsed = np.concatenate([part.elapsed for part in parts])
        self.completed = np.concatenate([part.completed for part in parts])
        self.rows = np.concatenate([part.rows for part in parts])
        self.source = np.concatenate([part.source for part in parts])
        self.target = np.concatenate([part.target for part in parts])
        self.probability = np.concatenate([part.probability for part in parts])


@dataclass
class _Level:
    """The states first met after equally many epochs, and what leaves them."""

    vector: Ints
    rows: Rows
    elapsed: Ints
    completed: Ints
    source: Ints
    target: Ints
    probability: Floats


class _Keys:
    """Rows as sortable scalars: an int64 where it holds them, else bytes."""

    def __init__(self, chain: Chain) -> None:
        self._words: list[list[tuple[int, int]]] = [[]]
        room = 2**62 // max(1, len(chain.vectors))
        for column, radix in enumerate(chain.radices()):
            # The number of requests is constant, so one waiting count says nothing new.
            if column == chain.models - 1:
                continue
            if radix > room:
                self._words.append([])
                room = 2**62
            self._words[-1].append((column, radix))
            room //= radix

    def of(self, rows: Rows, vector: Ints) -> NDArray[Any]:
        packed = np.zeros((len(rows), len(self._words)), np.int64)
        packed[:, 0] = vector
        for word, columns in enumerate(self._words):
            for column, radix in columns:
                packed[:, word] *= radix
                packed[:, word] += rows[:, column]
        if len(self._words) == 1:
            return packed[:, 0]
        return packed.view(f"S{8 * len(self._words)}")[:, 0]


class _Known:
    """The states met so far, by key."""

    def __init__(self, keys: NDArray[Any]) -> None:
        self._order = np.argsort(keys)
        self._keys = keys[self._order]

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: NDArray[Any]) -> tuple[Ints, Ints]:
        """The number of each key's state, and where in ``keys`` the new states are, by number."""
        unique, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        place = np.searchsorted(self._keys, unique)
        found = np.zeros(len(unique), bool)
        inside = place < len(self._keys)
        found[inside] = self._keys[place[inside]] == unique[inside]
        number = np.empty(len(unique), np.int64)
        number[found] = self._order[place[found]]
        fresh = ~found
        number[fresh] = len(self._keys) + np.arange(np.count_nonzero(fresh))
        self._keys = np.insert(self._keys, place[fresh], unique[fresh])
        self._order = np.insert(self._order, place[fresh], number[fresh])
        return number[inverse], first[fresh]


def explore(chain: Chain, *, deadline: float | None = None) -> Graph:
    """Search from "all N wait at the entry model" of every vector.

    ``deadline`` is a ``time.thread_time`` time. Raises BudgetExceeded past it, or past
    MAX_TRANSITIONS.
    """
    for row in chain.system.routing:
        if comb(chain.concurrency + np.count_nonzero(row), chain.concurrency) > MAX_OUTCOMES:
            raise BudgetExceeded("one step has too many outcomes")
    table = [outcomes(chain.system, model, chain.concurrency) for model in range(chain.models)]
    keys = _Keys(chain)
    vector = np.arange(len(chain.vectors))
    rows = chain.start(vector)
    known = _Known(keys.of(rows, vector))
    levels: list[_Level] = []
    transitions = 0
    while len(rows):
        first = len(known) - len(rows)
        epoch = chain.advance(rows)
        transitions += _branching(table, epoch.completed)
        if transitions > MAX_TRANSITIONS:
            raise BudgetExceeded(f"more than {MAX_TRANSITIONS} transitions")
        if deadline is not None and time.thread_time() > deadline:
            raise BudgetExceeded("no time left")
        source, after, probability = _branch(chain, table, epoch.after, epoch.completed)
        chain.dispatch(after, vector[source])
        target, fresh = known.add(keys.of(after, vector[source]))
        levels.append(
            _Level(
                vector, rows, epoch.elapsed, epoch.completed, source + first, target, probability
            )
        )
        vector, rows = vector[source[fresh]], after[fresh]
    return Graph(levels)


def _branching(table: list[Outcomes], completed: Ints) -> int:
    """How many transitions leave these states."""
    ways = np.ones(len(completed))
    for model, outcome in enumerate(table):
        ways *= np.diff(outcome.first)[completed[:, model]]
    return int(ways.sum())


def _branch(
    chain: Chain, table: list[Outcomes], rows: Rows, completed: Ints
) -> tuple[Ints, Rows, Floats]:
    """Every way in which the completed requests spread: (state, row after it, probability)."""
    source = np.arange(len(rows))
    probability = np.ones(len(rows))
    for model, outcome in enumerate(table):
        width = completed[source, model]
        ways = outcome.first[width + 1] - outcome.first[width]
        parent = np.repeat(np.arange(len(source)), ways)
        nth = np.arange(len(parent)) - np.repeat(np.cumsum(ways) - ways, ways)
        chosen = outcome.first[width][parent] + nth
        rows = rows[parent]
        chain.move(rows, model, outcome.counts[chosen])
        probability = probability[parent] * outcome.probability[chosen]
        source = source[parent]
    return source, rows, probability
