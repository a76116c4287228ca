"""What a step may decide by itself, on its device: each row's token, and where its request goes.

A runner that can (:class:`DecidingRunner`) is told before the step how each row draws and what its
router's score is to be compared with; all of that is known by then. Steps whose rows need more (a
grammar, penalties, biases, end tokens that are banned) are decided on the host, as everywhere else.

Knows runners and per-row parameters; nothing of devices, logits or outcomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from trserve.router_lib.base import BaseRouter
from trserve.workers.request import Request
from trserve.workers.routing import Routing
from trserve.workers.row_sampling import RowSamplings
from trserve.workers.runner import ForwardOutput, Runner
from trserve.workers.sampler import RowSampling
from trserve.workers.steady import SteadyRows
from trserve.workers.step import StepInputs


@dataclass(slots=True)
class StepAsk:
    """What is known of a step's rows before it.

    ``sampling`` has no bans, no grammar and no adjustments. ``bounds``, float32 [B], are those of
    the router's score; None where the host decides.
    """

    sampling: RowSampling
    bounds: NDArray[np.float32] | None = None


@runtime_checkable
class DecidingRunner(Protocol):
    """A runner that can sample and route within a step.

    Attributes:
        routes: whether it has the router's score, so that bounds are of use.
    """

    routes: bool

    def prepare(self, router: BaseRouter) -> None:
        """Get ready for steps, with the router that decides on them; called once."""

    def decide(self, step: StepInputs, ask: StepAsk) -> ForwardOutput:
        """``forward``, with ``tokens`` in the output; ``destinations`` and ``scores`` as well
        where ``ask`` has bounds."""


class InStep:
    """Asks ``runner`` to decide where it can, and to compute alone where it cannot.

    Attributes:
        asks_host: whether no step ever decides where a request goes.
    """

    def __init__(self, runner: Runner, routing: Routing) -> None:
        self._runner = runner
        self._deciding = runner if isinstance(runner, DecidingRunner) else None
        self._routing = routing
        self._samplings = RowSamplings()
        self.asks_host = self._deciding is None or not self._deciding.routes

    def compute(
        self, inputs: StepInputs, requests: Sequence[Request], *, routes: bool
    ) -> ForwardOutput:
        """The step of ``requests``, one a row; with ``routes`` its destinations too if possible."""
        if self._deciding is None:
            return self._runner.forward(inputs)
        sampling = self._samplings.fixed(requests)
        if sampling is None:
            return self._runner.forward(inputs)
        bounds = self._routing.bounds(requests) if routes and self._deciding.routes else None
        return self._deciding.decide(inputs, StepAsk(sampling, bounds))

    def compute_steady(self, rows: SteadyRows) -> ForwardOutput:
        """The next step of ``rows``, as :meth:`compute`."""
        sampling = rows.fixed_sampling() if self._deciding is not None else None
        if self._deciding is None or sampling is None:
            return self._runner.forward(rows.inputs)
        routes = self._deciding.routes and not rows.pinned
        bounds = self._routing.bounds(rows.requests, rows.params) if routes else None
        return self._deciding.decide(rows.inputs, StepAsk(sampling, bounds))

    def readable(self, output: ForwardOutput) -> ForwardOutput:
        """``output`` as the router can read it, when it is asked after the step."""
        runner = self._deciding
        if runner is None or runner.routes or not self._routing.router.reads_model:
            return output
        return output.on_host()
