"""From looks at the slab to a table of batch thresholds, and to the words for the metrics.

Puts observing, estimating, measuring and the policy together; knows no process, no messages and
no clock but the times it is given. What solving needs is imported when there is something to
solve: most servers of a test suite never come to that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from trserve.ipc.estimates import beat, read_report, write_matrices, write_numbers
from trserve.ipc.slab import Slab
from trserve.sched.estimator import Estimate, Estimator
from trserve.sched.system import InvalidSystem
from trserve.solver.meter import Meter
from trserve.solver.observer import Look, Observer
from trserve.solver.pace import LookPace, Peak, SolvePace

if TYPE_CHECKING:
    from trserve.sched.policy import ThresholdPolicy
    from trserve.sched.table import ThresholdTable

log = logging.getLogger(__name__)

Rows = dict[str, list[int]]
"""Thresholds by N, as a message holds them."""

_WORTH_IT_S: Final = 1.0
"""Of requests being live, before anything is worked out."""

_WIDTH_KEPT: Final = 0.97
"""Of the mean width, at each step."""


class Solver:
    """Call ``look`` every ``wait_s`` seconds.

    Args:
        slab: read, but for the solver's own words.
        cost_s: how long solving takes, on a clock that only runs on; tests have their own.

    Attributes:
        held: whether an administrator's thresholds are in force, and not those found here.
    """

    def __init__(self, slab: Slab, *, cost_s: Callable[[], float] = time.thread_time) -> None:
        models = slab.layout.workers
        self._slab = slab
        self._cost_s = cost_s
        self._before = read_report(slab)  # a predecessor's, whose counts go on
        self._observer = Observer(slab)
        self._estimator = Estimator(models)
        self._meter = Meter()
        self._peak = Peak()
        self._looks, self._solves = LookPace(), SolvePace()
        self._policy: ThresholdPolicy | None = None
        self._solved: Estimate | None = None
        self._sent: ThresholdTable | None = None
        self._last_s: float | None = None
        self._live_s = 0.0
        self._changes_seen = 0
        self._widths = [1.0] * models
        self._said: set[str] = set()
        self.wait_s = 0.0
        self.held = False

    def look(self, now_s: float) -> Rows | None:
        """Take in what happened; returns the new table's rows if workers are to be told."""
        beat(self._slab)
        look = self._observer.look()
        self.wait_s = self._looks.wait_s(now_s, busy=look.moved or look.live > 0)
        peak = self._peak.add(now_s, look.live)
        self._take_in(look, now_s)
        self._measure(look, now_s)
        if look.live and self._live_s >= _WORTH_IT_S and self._solves.may_ask(now_s):
            self._solves.asked(now_s)
            self._ask(peak, now_s)
        self._report(look)
        return self._news()

    def _take_in(self, look: Look, now_s: float) -> None:
        elapsed_s = now_s - (now_s if self._last_s is None else self._last_s)
        self._last_s = now_s
        self._live_s += elapsed_s if look.live else 0.0
        self._estimator.observe_live(look.live, elapsed_s * 1e3)
        for event in look.events:
            self._estimator.observe(event)
            if event.width:
                width = self._widths[event.model]
                share = 1 - _WIDTH_KEPT**event.steps
                self._widths[event.model] = width + (event.width - width) * share

    def _measure(self, look: Look, now_s: float) -> None:
        policy = self._policy
        row = None if policy is None else policy.table.row(round(self._estimator.live))
        # A measurement of two systems would say nothing of either.
        same = (row, self._estimator.changes)
        condition = same if look.complete and look.live and not self.held else None
        found = self._meter.add(now_s, look.live, look.tokens, condition)
        if found is None or policy is None or not policy.measured(*found):
            return
        log.info(
            "%d requests at %.0f tokens/s, below what eager execution yields: eager for a while",
            found.live,
            found.tokens_per_s,
        )

    # -- solving -----------------------------------------------------------------------------

    def _ask(self, peak: int, now_s: float) -> None:
        """Work the thresholds out with what is known now, if it is time for it."""
        try:
            known = self._estimator.estimate()
            if known is not None:
                self._update(replace(known, live=float(peak)), now_s)
        except InvalidSystem as error:
            self._say_once(f"no thresholds can be worked out from what was measured: {error}")

    def _update(self, known: Estimate, now_s: float) -> None:
        policy = self._policy = self._policy or _new_policy(self._slab)
        write_matrices(
            self._slab, known.system.routing, known.system.tokens, self._latencies(known)
        )
        if known.changes != self._changes_seen:
            self._changes_seen = known.changes
            self._solves.follow(now_s)
        may_solve = self._solves.may_solve(
            now_s, urgent=self._is_urgent(known), settled=known.settled
        )
        before, began_s = policy.solutions, self._cost_s()
        policy.update(known, may_solve=may_solve, present_only=self._is_outdated(known))
        if policy.solutions != before:
            self._solved = known
            self._solves.solved(now_s, self._cost_s() - began_s)
            self._say_methods(policy)

    def _is_urgent(self, known: Estimate) -> bool:
        """Whether the last solution is not for this system: its table may be wrong by much."""
        from trserve.sched.policy import is_surer

        solved, policy = self._solved, self._policy
        if solved is None or policy is None:
            return True
        return self._is_outdated(known) or is_surer(known, solved)

    def _is_outdated(self, known: Estimate) -> bool:
        """Whether the table in force is of another system, or of far fewer requests."""
        solved, policy = self._solved, self._policy
        if solved is None or policy is None:
            return False
        return known.changes != solved.changes or known.live > max(policy.rows)

    def _latencies(self, known: Estimate) -> list[float]:
        widths = [max(1, round(width)) for width in self._widths]
        return [known.system.latency(model, width) for model, width in enumerate(widths)]

    def _say_methods(self, policy: ThresholdPolicy) -> None:
        from trserve.sched.search import EXACT

        for count, row in policy.rows.items():
            if row.method != EXACT:
                self._say_once(
                    f"the model of {count} requests takes too long to solve exactly; its "
                    f"thresholds are from a {row.method}"
                )
                return

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.info(text)

    # -- results -----------------------------------------------------------------------------

    def _report(self, look: Look) -> None:
        live = self._estimator.live if look.live else 0.0
        measured = self._meter.tokens_per_s if look.live else 0.0
        numbers = {"live": live, "measured_tokens_per_s": measured}
        if self._policy is not None:
            promised = self._policy.predicted(live) if look.live and not self.held else None
            numbers |= {
                "predicted_tokens_per_s": promised.tokens_per_s if promised else 0.0,
                "eager_tokens_per_s": promised.eager_tokens_per_s if promised else 0.0,
                "solutions": self._before.solutions + self._policy.solutions,
                "changes": self._before.changes + self._estimator.changes,
            }
        write_numbers(self._slab, **numbers)

    def _news(self) -> Rows | None:
        policy = self._policy
        if policy is None or not policy.solutions or policy.table == self._sent:
            return None
        self._sent = policy.table
        return {str(count): list(row) for count, row in policy.table.rows.items()}


def _new_policy(slab: Slab) -> ThresholdPolicy:
    from trserve.sched.policy import ThresholdPolicy

    # An update is many searches, each with a bound: none of them is a solver that hangs.
    layout = slab.layout
    return ThresholdPolicy(layout.workers, layout.slots, on_search=lambda: beat(slab))
