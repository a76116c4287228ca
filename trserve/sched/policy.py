"""From estimates to a table B*(N), with the caution that keeps it from doing harm.

Thresholds start at 1 and move only for a gain that the estimates are certain enough of; a wrong B
can cost a quarter of the throughput, a missing one rarely more than a tenth. Three guards:

- a row changes only for a predicted gain of MARGIN over the row in force, or of SIMULATED_MARGIN
  where the prediction is drawn by lot;
- a row other than eager must beat it also when every routing probability is off by two standard
  errors, either way;
- if what is measured under thresholds stays below what eager execution would have yielded, the
  table goes back to eager for a while, longer each time.

Solving takes long compared with a step, so this belongs into a process of low priority. Knows
nothing of clocks, workers or how a table is sent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from trserve.sched.estimator import Estimate
from trserve.sched.search import EXACT, SIMULATION, Solution, search
from trserve.sched.system import System, coarsened
from trserve.sched.table import ThresholdTable
from trserve.sched.vectors import Vector, is_feasible

MARGIN: Final = 0.003
"""Of the throughput: a predicted gain below it is not worth a change. A row in force may be below
the best by as much, and solved with a coarse quantum gains are off by about as much."""

SIMULATED_MARGIN: Final = 0.01
"""The same where the values have errors of their own."""

_NOTEWORTHY: Final = 0.01
"""Of a latency or a throughput: a difference below it says nothing."""

_CERTAINTY: Final = 2.0
"""Standard errors."""

_UNMOVED: Final = 1e-3
"""A change of a probability that no threshold depends on."""

_FULL_SEARCH: Final = 8
"""N up to which every feasible vector is a candidate; above, those near the last row, scaled."""

_SMALL_COUNTS: Final = (1, 2, 3, 4, 6, 8)
"""N that are solved every time, being cheap; larger ones are when the present N is near."""

_BELOW_EAGER: Final = 3
"""Measurements in a row that send the table back to eager."""

_STEP: Final = 4 / 3
_STEPS: Final = (0.7, 0.85, 1.0, 1.15, 1.3)
_MOST_MIXED: Final = 3
"""Models up to which every mixture of these is a candidate: 125, and five times as many a model."""
_CLOSE: Final = 7 / 8
"""Of the present N: between them its row holds too."""

_FIRST_PAUSE: Final = 60
"""Updates for which it then stays there: long enough to measure eager execution. Doubles every
time, up to the longest."""

_LONGEST_PAUSE: Final = 1920

_TRUST_GAINED: Final = 0.2
"""Least weight of a new measurement in the efficiency of eager execution; the first ones are
averaged."""


@dataclass(frozen=True)
class Prediction:
    """One solved row: thresholds, and what the model promises for them and for eager.

    ``method``: the search's, see there.
    """

    vector: Vector
    tokens_per_s: float
    eager_tokens_per_s: float
    method: str = EXACT


class ThresholdPolicy:
    """The table in force, and the model's promises for it.

    Args:
        models: M.
        max_concurrency: the largest N that can be live.
        budget_s: for each solved row; see ``search``.
        on_search: called before each search, of which an update has many.

    Attributes:
        table: the thresholds in force.
        solutions: how often they were worked out.
    """

    def __init__(
        self,
        models: int,
        max_concurrency: int,
        *,
        budget_s: float = 0.5,
        on_search: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_search = on_search
        self._eager = (1,) * models
        self._most = max_concurrency
        self._budget_s = budget_s
        self._predictions: dict[int, Prediction] = {}
        self._solved: Estimate | None = None
        self._efficiency, self._trials = 1.0, 0
        self._below = 0
        self._pause, self._paused = _FIRST_PAUSE, 0
        self.table = ThresholdTable.eager(models)
        self.solutions = 0

    @property
    def rows(self) -> dict[int, Prediction]:
        """The solved rows by N; none before the first solution."""
        return self._predictions

    def update(
        self, estimate: Estimate, *, may_solve: bool = True, present_only: bool = False
    ) -> bool:
        """Solve again with what is known now, if that is news; whether ``table`` changed.

        To be called some three times a second; ``may_solve``: False puts off what can wait.
        ``present_only``: the row of the present N first, in less than half the time; all others
        stay as they are, and are news at the next call.
        """
        was_paused, self._paused = self._paused, max(0, self._paused - 1)
        resumes = was_paused == 1
        if not resumes and not (may_solve and self._is_news(estimate)):
            return False
        self._solved = None if present_only else estimate
        system = coarsened(estimate.system)
        leans = list(_perturbed(system, estimate))
        live = round(estimate.live)
        rows: dict[int, Prediction] = {}
        for count in self._way_to(live) if present_only else self._grid(estimate.live):
            rows[count] = self._row(system, leans, count, rows)
        self._predictions = {**self._predictions, **rows} if present_only else rows
        self.solutions += 1
        before = self.table
        self.table = ThresholdTable(len(self._eager), self._spread(self._predictions, live))
        return self.table != before

    def _spread(self, rows: dict[int, Prediction], live: int) -> dict[int, Vector]:
        """The vectors by N; that of the present N holds a little below it as well.

        Where answers end and others begin, N dips for moments, which must not open gates.
        """
        spread = {count: row.vector for count, row in rows.items()}
        dip = math.ceil(live * _CLOSE)
        if live in spread and dip not in spread and is_feasible(spread[live], dip):
            spread[dip] = spread[live]
        return spread

    def _is_news(self, estimate: Estimate) -> bool:
        return self._solved is None or _is_news(estimate, self._solved)

    def _grid(self, live: float) -> list[int]:
        """The N to solve: small ones, and from there to beyond the present N in steps of a third.

        Above the last of them its row holds too, until N comes near.
        """
        grid = {*_SMALL_COUNTS, round(live)}
        count = _SMALL_COUNTS[-1]
        while count < live:
            count = round(count * _STEP)
            if not live * _CLOSE < count < live:
                grid.add(count)
        return sorted(count for count in grid if 1 <= count <= self._most)

    def _way_to(self, live: int) -> list[int]:
        """The N to solve for the row of ``live`` alone: above the full search, one from another."""
        if live <= _FULL_SEARCH:
            return [live]
        return [count for count in self._grid(live) if _FULL_SEARCH <= count <= live]

    def _row(
        self, system: System, leans: list[System], count: int, below: dict[int, Prediction]
    ) -> Prediction:
        in_force = self.table.row(count)
        solution = self._solve(system, count, in_force, below)
        vector = self._chosen(solution, in_force)
        is_new = vector not in (self._eager, in_force)
        if is_new and not self._paused and not self._is_safe(vector, leans, count):
            stays = solution.values[in_force] > solution.eager_tokens_per_s
            vector = in_force if stays else self._eager
        if self._paused:
            vector = self._eager
        promised = solution.values[vector]
        return Prediction(vector, promised, solution.eager_tokens_per_s, solution.method)

    def _solve(
        self, system: System, count: int, in_force: Vector, below: dict[int, Prediction]
    ) -> Solution:
        candidates = None
        if count > _FULL_SEARCH and below:
            last = max(below)
            candidates = [in_force, *_scaled(below[last].vector, count / last, count)]
        self._on_search()
        solution = search(system, count, budget_s=self._budget_s, candidates=candidates)
        if in_force in solution.values:
            return solution
        # A simulated search drops what is clearly worse; then so is the row in force.
        return replace(solution, values={**solution.values, in_force: 0.0})

    def _chosen(self, solution: Solution, in_force: Vector) -> Vector:
        """The row in force, unless the best one is better by more than the margin.

        Eager is the row of choice when thresholds gain next to nothing.
        """
        margin = SIMULATED_MARGIN if solution.method == SIMULATION else MARGIN
        best = solution.vector if solution.gain > margin else self._eager
        worth = solution.values[in_force] * (1 + margin)
        if solution.values[best] > worth:
            return best
        # What is no better than eager is not worth its waiting.
        return in_force if solution.values[in_force] > solution.eager_tokens_per_s else self._eager

    def _is_safe(self, vector: Vector, leans: list[System], count: int) -> bool:
        """Whether ``vector`` is no worse than eager wherever the truth may lie."""
        for system in leans:
            self._on_search()
            found = search(system, count, budget_s=self._budget_s, candidates=[vector])
            if found.values.get(vector, 0.0) < found.eager_tokens_per_s:
                return False
        return True

    def measured(self, live: float, tokens_per_s: float, standard_error: float) -> bool:
        """Hold a measurement at N = ``live`` against the model; whether ``table`` changed.

        What the model leaves out costs eager execution too, so its promise is scaled by how well
        it was met while eager was in force.
        """
        predicted = self.predicted(live)
        if predicted is None or tokens_per_s <= 0:
            return False
        if self.table.row(round(live)) == self._eager:
            # More than the model promises is chance, or of another system than the one it solved.
            share = min(1.0, tokens_per_s / predicted.eager_tokens_per_s)
            self._trials += 1
            self._efficiency += (share - self._efficiency) * max(_TRUST_GAINED, 1 / self._trials)
            self._below = 0
            return False
        least = predicted.eager_tokens_per_s * self._efficiency * (1 - _NOTEWORTHY)
        self._below = self._below + 1 if tokens_per_s + _CERTAINTY * standard_error < least else 0
        if self._below < _BELOW_EAGER:
            return False
        self._below = 0
        self._paused, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        self.table = ThresholdTable.eager(len(self._eager))
        self._predictions = {
            count: Prediction(self._eager, row.eager_tokens_per_s, row.eager_tokens_per_s)
            for count, row in self._predictions.items()
        }
        return True

    def predicted(self, live: float) -> Prediction | None:
        """What the last solution promises at N = ``live``, interpolated; None before the first."""
        if not self._predictions:
            return None
        counts = sorted(self._predictions)
        rows = [self._predictions[count] for count in counts]
        return Prediction(
            self.table.row(round(live)),
            float(np.interp(live, counts, [row.tokens_per_s for row in rows])),
            float(np.interp(live, counts, [row.eager_tokens_per_s for row in rows])),
        )


def is_surer(estimate: Estimate, solved: Estimate) -> bool:
    """Whether some row of P is known by twice as many decisions as when it was solved."""
    pairs = zip(estimate.decisions, solved.decisions, strict=True)
    return any(now >= 2 * before > 0 for now, before in pairs)


def _is_news(estimate: Estimate, solved: Estimate) -> bool:
    """Whether anything has moved by more than half a standard error, or a latency by 1 %.

    That twice as much is known is news too: a row that was not certain enough may be now.
    """
    if is_surer(estimate, solved):
        return True
    now, before = estimate.system, solved.system
    live = round(estimate.live)
    if live != round(solved.live):
        return True
    for model in range(now.models):
        moved = np.abs(now.routing[model] - before.routing[model]).max()
        if moved > max(_UNMOVED, estimate.leave_error(model) / 2):
            return True
        for width in (1, max(1, live)):
            was = before.latency(model, width)
            if abs(now.latency(model, width) - was) > _NOTEWORTHY * was:
                return True
    return not np.allclose(now.tokens, before.tokens, atol=0.02)


def _perturbed(system: System, estimate: Estimate) -> Iterator[System]:
    """The system with every probability of leaving a model too high, and too low."""
    for sign in (1, -1):
        routing = system.routing.copy()
        for model, row in enumerate(routing):
            leaves = 1 - row[model]
            shifted = leaves + sign * _CERTAINTY * estimate.leave_error(model)
            if 0 < leaves < 1:
                shifted = min(max(shifted, leaves / 2), (1 + leaves) / 2)
                row *= shifted / leaves
                row[model] = 1 - shifted
        yield replace(system, routing=routing)


def _scaled(vector: Vector, factor: float, concurrency: int) -> list[Vector]:
    """Feasible vectors around ``vector`` times ``factor``; of many models, not every mixture."""
    scaled = [[max(1, round(b * factor * step)) for step in _STEPS] for b in vector]
    if len(vector) <= _MOST_MIXED:
        mixtures = list(itertools.product(*(sorted(set(choices)) for choices in scaled)))
    else:
        middle = tuple(choices[len(_STEPS) // 2] for choices in scaled)
        alone = [
            (*middle[:model], b, *middle[model + 1 :])
            for model, choices in enumerate(scaled)
            for b in choices
        ]
        mixtures = list(dict.fromkeys([*zip(*scaled, strict=True), *alone]))
    return [v for v in mixtures if is_feasible(v, concurrency)]
