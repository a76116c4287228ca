"""When a step's router is asked, and what. Knows rows and outputs; samples and commits nothing.

What can be said before the step's output is there is asked while a device computes it: the
parameters of the rows, and all of it where the router decides early.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trserve.router_lib.base import StepResult
from trserve.workers.annotating import write_scores
from trserve.workers.arrivals import Arrivals
from trserve.workers.in_step import InStep
from trserve.workers.metering import WorkerMeter
from trserve.workers.question import DueRows, with_own_tensors
from trserve.workers.routing import Routing
from trserve.workers.runner import ForwardOutput

TIMED_ASKS: Final = 16
"""Every so often the router is timed: two looks at the clock are a hundredth of a handoff."""


class Asking:
    """Asks ``routing`` about the steps of one worker.

    Args:
        submits: whether :meth:`during` comes before the step is over.
        meter: where it is noted once in a while how long the router took, if anybody asks.
    """

    def __init__(
        self,
        routing: Routing,
        in_step: InStep,
        arrivals: Arrivals,
        meter: WorkerMeter | None,
        *,
        submits: bool,
    ) -> None:
        self._routing = routing
        self._in_step = in_step
        self._arrivals = arrivals
        self._meter = meter
        self._early = submits and in_step.asks_host and routing.decides_early
        self._asked = 0

    def during(self, rows: DueRows) -> None:
        """All that needs no output of the step."""
        if rows.pinned or not self._in_step.asks_host:
            return
        self._give_params(rows)
        # Scores that somebody wants to see are written with the tokens.
        if self._early and rows.destinations is None and not self._writes_scores():
            rows.destinations = self._ask(self._shown(rows.early_result()))

    def after(
        self, rows: DueRows, output: ForwardOutput, sampled: NDArray[np.int64]
    ) -> Sequence[int | None]:
        """Where each row goes, as ``Routing.destinations`` says."""
        if output.destinations is not None:
            return output.destinations
        if rows.pinned:
            return [0] * len(rows.requests)
        if rows.destinations is not None:
            found, rows.destinations = rows.destinations, None
            return found
        self._give_params(rows)
        result = self._shown(rows.result(self._in_step.readable(output), sampled))
        if self._writes_scores():
            write_scores(rows.requests, self._routing.scores(result) or ())
        return self._ask(result)

    def _shown(self, result: StepResult) -> StepResult:
        """``result`` for a router: none may change what the engine goes on with."""
        return with_own_tensors(result) if self._routing.may_write else result

    def _give_params(self, rows: DueRows) -> None:
        if rows.params is None:
            rows.params = self._routing.parameter_tensors(rows.requests)

    def _writes_scores(self) -> bool:
        return any(request.params.trace for request in self._arrivals.annotated.values())

    def _ask(self, result: StepResult) -> Sequence[int | None]:
        self._asked += 1
        if self._meter is None or self._asked % TIMED_ASKS != 1:
            return self._routing.destinations(result)
        began_ns, found = monotonic_ns(), self._routing.destinations(result)
        self._meter.asked_ns = monotonic_ns() - began_ns
        return found
