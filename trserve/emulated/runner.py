"""The forward pass of an emulated model: it takes the profile's time and makes up a token a row.

Everything around it is real. Knows a step's arrays, a latency curve and a source of tokens; nothing
of requests or routing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from trserve.emulated.clock import set_timer_slack, wait_until
from trserve.emulated.profile import EmulatedModel
from trserve.emulated.tokens import TokenSource, printable_ids
from trserve.gateway.tokenizer import Tokenizer
from trserve.plan import ServerPlan
from trserve.router_lib.base import BaseRouter
from trserve.sched.system import interpolate
from trserve.workers.in_step import StepAsk
from trserve.workers.row_sampling import greedy
from trserve.workers.runner import ForwardOutput
from trserve.workers.sampler import Sampler
from trserve.workers.step import StepInputs

PEAK: Final = 1e6
"""The logit of the token made up, where all others have 0: whatever a request asks for, within the
ranges of the API, it stays the largest, and a draw finds nothing else."""

_MS: Final = 1_000_000


class StepClock:
    """How long a step of ``model`` takes, for steps of up to ``max_rows`` rows."""

    def __init__(self, model: EmulatedModel, max_rows: int) -> None:
        curve = model.step.curve
        widths = range(1, max_rows + 1)
        self._step_ns = [0, *(round(interpolate(curve, width) * _MS) for width in widths)]
        self._token_ns = 1e9 / model.prefill.tokens_per_s
        self._free = model.prefill.free_tokens

    def duration_ns(self, rows: int, tokens: int) -> int:
        """Of a step over ``rows`` rows that computes ``tokens`` tokens, one a row or more."""
        charged = tokens - rows - self._free
        took = self._step_ns[rows]
        return took if charged <= 0 else took + round(charged * self._token_ns)


class EmulatedRunner:
    """Takes the place of ``TorchRunner``.

    Args:
        tokenizer_size: columns of the logits.

    A core that waits for a device is its worker's own there. Here all processes share a few, and
    what follows a sleep takes several times as long, with everything out of the caches; so the end
    of the wait goes through the motions of it.

    Attributes:
        on_layer: called before each sleep, a few times a second: a long step is no hung worker.
        on_submitted: called in each step, once it is made up and only its time is to pass.
        on_waking: called before the part of that which is spun.
        routes: no step has the router's score.
        heartbeat: unused; compiled steps have it.
        began_ns: when the next step began (``time.monotonic_ns``), if before its forward.
    """

    def __init__(
        self, clock: StepClock, source: TokenSource, *, tokenizer_size: int, max_rows: int
    ) -> None:
        self.heartbeat = 0
        self.began_ns = 0
        self.on_layer: Callable[[], None] = _nothing_more
        self.on_submitted: Callable[[], None] = _nothing_more
        self.on_waking: Callable[[], None] = _nothing_more
        self.routes = False
        self._clock = clock
        self._source = source
        self._logits = torch.zeros(max_rows, tokenizer_size)
        self._hidden = torch.zeros(max_rows, 1)
        # The same memory, for operations that numpy does in a third of the time.
        self._flat = self._logits.numpy().reshape(-1)
        self._ids = self._hidden.numpy().reshape(-1)
        self._starts = np.arange(max_rows) * tokenizer_size
        self._set = np.zeros(0, np.int64)
        self._sampler = Sampler()
        self._outputs = [
            ForwardOutput(self._logits[:rows], self._hidden[:rows]) for rows in range(max_rows + 1)
        ]

    def prepare(self, router: BaseRouter) -> None:
        """Nothing is captured, and no router's score is part of a step."""

    def forward(self, step: StepInputs, also: NDArray[np.int64] | None = None) -> ForwardOutput:
        """As ``TorchRunner.forward``; returns when the step's time is over.

        ``hidden`` is [B, 1]: the id of the token made up, which is all that there is to know.
        """
        deadline = self._deadline_ns(step)
        rows = step.num_rows
        self._show(self._last(step))
        output = self._outputs[rows]
        output.tokens = None
        if also is not None:
            further = torch.from_numpy(self._after(step, also).astype(np.float32)[:, None])
            output = ForwardOutput(output.logits, output.hidden, further)
        self._wait(deadline, output)
        return output

    def decide(self, step: StepInputs, ask: StepAsk) -> ForwardOutput:
        """:meth:`forward` with the tokens, which are what any draw from the logits would find."""
        deadline = self._deadline_ns(step)
        output, tokens = self._outputs[step.num_rows], self._last(step)
        self._show(tokens)
        output.tokens = tokens
        self._wait(deadline, output)
        return output

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits [K, tokenizer size] of ``hidden`` [K, 1]."""
        logits = torch.zeros(len(hidden), self._logits.shape[1])
        return logits.scatter_(1, hidden.long(), PEAK)

    def _deadline_ns(self, step: StepInputs) -> int:
        began, self.began_ns = self.began_ns or time.monotonic_ns(), 0
        return began + self._clock.duration_ns(step.num_rows, step.num_tokens)

    def _wait(self, deadline_ns: int, output: ForwardOutput) -> None:
        self.on_submitted()
        wait_until(deadline_ns, self.on_layer, partial(self._warm_up, output))

    def _warm_up(self, output: ForwardOutput) -> None:
        self.on_waking()
        rows = len(output.logits)
        tokens = output.tokens
        if tokens is None:
            tokens = self._sampler.sample(output.logits, greedy(rows))
        torch.from_numpy(tokens).tolist()
        torch.from_numpy(np.full(rows, 0.5, np.float32)).tolist()

    def _last(self, step: StepInputs) -> NDArray[np.int64]:
        return self._after(step, step.query_start[1 : step.num_rows + 1] - 1)

    def _after(self, step: StepInputs, places: NDArray[np.integer]) -> NDArray[np.int64]:
        return self._source.after(step.token_ids[places], step.positions[places])

    def _show(self, tokens: NDArray[np.int64]) -> None:
        """Make ``tokens`` the rows' own; only what the step before set is cleared."""
        rows = len(tokens)
        self._flat[self._set] = 0.0
        self._set = self._starts[:rows] + tokens
        self._flat[self._set] = PEAK
        self._ids[:rows] = tokens


def create_runner(plan: ServerPlan, index: int) -> EmulatedRunner:
    """The runner of ``plan``'s model ``index``; this thread, which waits, gets its timers exact."""
    assert plan.profile is not None
    torch.set_num_threads(1)
    set_timer_slack()
    model = plan.profile.models[index]
    tokenizer = Tokenizer.load(Path(plan.tokenizer_path))
    source = TokenSource(
        printable_ids(tokenizer, plan.eos_token_ids),
        model=index,
        agreement=model.agreement.probability,
        seed=plan.profile.seed,
    )
    return EmulatedRunner(
        StepClock(model, plan.max_rows),
        source,
        tokenizer_size=plan.tokenizer_size,
        max_rows=plan.max_rows,
    )


def _nothing_more() -> None:
    """Nobody waits for a sign of life."""
