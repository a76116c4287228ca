"""The semi-Markov chain of delayed batching: its states, and what one epoch does to many of them.

States are rows of an integer array, so that thousands of them, of many threshold vectors at once,
take one epoch together: exact exploration branches over every outcome, simulation draws one.
Knows nothing of how states are found, counted or weighted.

A row holds, for M models and the slots of the links with a delay:

    k[0..M)  requests that wait at a model
    b[0..M)  requests in its running step, 0 when it is idle
    r[0..M)  quanta left of that step
    (count, quanta left) of each batch that travels

It is observed right after dispatch. A link's slots are sorted by the time left, empty ones (0, 0)
first: a batch always leaves last and, the delay being constant, arrives last, so the order is
canonical without a sort.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trserve.sched.system import System

Ints = NDArray[np.int64]
Rows = NDArray[np.int32]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

_NEVER: Final = np.iinfo(np.int32).max


class Outcomes(NamedTuple):
    """Where the requests of one completed step may go, for every batch width 0..N.

    ``counts`` [K, M] and ``probability`` [K] hold the outcomes of width b in
    ``first[b]:first[b + 1]``; impossible ones are left out.
    """

    counts: Rows
    probability: Floats
    first: Ints


class Epoch(NamedTuple):
    """What happens at the next completion or arrival of each of S states."""

    elapsed: Ints
    """[S] quanta until it."""
    completed: Ints
    """[S, M] requests whose step is over."""
    after: Rows
    """[S, W] the states then, arrivals delivered, completed requests nowhere yet."""


class _Link(NamedTuple):
    source: int
    target: int
    delay: int
    slots: int
    column: int


@dataclass(frozen=True)
class Chain:
    """The chain of one system at concurrency N, for the threshold vectors ``vectors`` [V, M]."""

    system: System
    concurrency: int
    vectors: Ints
    latency: Ints
    links: tuple[_Link, ...]

    @classmethod
    def of(cls, system: System, concurrency: int, vectors: Ints) -> Chain:
        latency = system.latency_quanta(concurrency)
        return cls(system, concurrency, vectors, latency, _links(system, latency))

    @property
    def models(self) -> int:
        return self.system.models

    @property
    def width(self) -> int:
        """Columns of a state row."""
        return 3 * self.models + 2 * sum(link.slots for link in self.links)

    def start(self, vector: Ints) -> Rows:
        """All N requests wait at the entry model, then dispatch; a row per entry of ``vector``."""
        rows = np.zeros((len(vector), self.width), np.int32)
        rows[:, 0] = self.concurrency
        self.dispatch(rows, vector)
        return rows

    def advance(self, rows: Rows) -> Epoch:
        """Time passes until a step completes or a travelling batch arrives."""
        models = self.models
        busy = rows[:, models : 2 * models]
        left = np.where(busy > 0, rows[:, 2 * models : 3 * models], _NEVER)
        elapsed = left.min(axis=1)
        for count, time in self._slot_columns():
            np.minimum(elapsed, np.where(rows[:, count] > 0, rows[:, time], _NEVER), out=elapsed)
        if len(elapsed) and elapsed.max() == _NEVER:
            raise RuntimeError("a threshold vector that is not feasible deadlocked the model")
        done = left == elapsed[:, None]
        completed = np.where(done, busy, 0).astype(np.int64)
        after = rows.copy()
        after[:, models : 2 * models][done] = 0
        idle = after[:, models : 2 * models] == 0
        after[:, 2 * models : 3 * models] = np.where(idle, 0, left - elapsed[:, None])
        self._deliver(after, elapsed)
        return Epoch(elapsed.astype(np.int64), completed, after)

    def _slot_columns(self) -> list[tuple[int, int]]:
        return [
            (link.column + 2 * slot, link.column + 2 * slot + 1)
            for link in self.links
            for slot in range(link.slots)
        ]

    def _deliver(self, rows: Rows, elapsed: Rows) -> None:
        for link in self.links:
            for slot in range(link.slots):
                count, time = link.column + 2 * slot, link.column + 2 * slot + 1
                travelling = rows[:, count] > 0
                rows[:, time] -= np.where(travelling, elapsed, 0)
                arrived = travelling & (rows[:, time] == 0)
                rows[:, link.target] += np.where(arrived, rows[:, count], 0)
                rows[arrived, count] = 0

    def move(self, rows: Rows, source: int, counts: Rows) -> None:
        """``counts`` [S, M] requests leave ``source``; those without a delay wait there at once."""
        models = self.models
        rows[:, :models] += counts
        for link in self.links:
            if link.source != source:
                continue
            leaving = counts[:, link.target]
            rows[:, link.target] -= leaving
            sent = np.flatnonzero(leaving > 0)
            end = link.column + 2 * link.slots
            rows[sent, link.column : end - 2] = rows[sent, link.column + 2 : end]
            rows[sent, end - 2] = leaving[sent]
            rows[sent, end - 1] = link.delay

    def dispatch(self, rows: Rows, vector: Ints) -> None:
        """Every idle model with enough requests starts all of them."""
        models = self.models
        for model in range(models):
            waiting = rows[:, model]
            opens = np.flatnonzero(
                (rows[:, models + model] == 0) & (waiting >= self.vectors[vector, model])
            )
            width = waiting[opens]
            rows[opens, models + model] = width
            rows[opens, model] = 0
            rows[opens, 2 * models + model] = self.latency[model, width]

    def radices(self) -> list[int]:
        """Upper bounds (exclusive) of a row's columns."""
        people = self.concurrency + 1
        columns = [people] * (2 * self.models)
        columns += [int(most) + 1 for most in self.latency.max(axis=1)]
        for link in self.links:
            columns += [people, link.delay + 1] * link.slots
        return columns


def _links(system: System, latency: Ints) -> tuple[_Link, ...]:
    links = []
    column = 3 * system.models
    delays = system.delay_quanta()
    for source, target in np.argwhere((delays > 0) & (system.routing > 0)).tolist():
        delay = int(delays[source, target])
        # Two batches of one model leave at least its shortest step apart.
        slots = -(-delay // int(latency[source, 1:].min()))
        links.append(_Link(source, target, delay, slots, column))
        column += 2 * slots
    return tuple(links)


def outcomes(system: System, source: int, concurrency: int) -> Outcomes:
    """The multinomial of row ``source`` of P, for every batch width."""
    counts: list[list[int]] = []
    probability: list[float] = []
    first = [0]
    row = system.routing[source].tolist()
    targets = [target for target, share in enumerate(row) if share > 0]
    for width in range(concurrency + 1):
        for split in _splits(width, len(targets)):
            placed = [0] * system.models
            chance, left = 1.0, width
            for target, count in zip(targets, split, strict=True):
                placed[target] = count
                chance *= comb(left, count) * row[target] ** count
                left -= count
            counts.append(placed)
            probability.append(chance)
        first.append(len(counts))
    return Outcomes(np.array(counts, np.int32), np.array(probability), np.array(first, np.int64))


def _splits(total: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(total,)]
    return [(head, *tail) for head in range(total + 1) for tail in _splits(total - head, parts - 1)]
