"""One step of a worker: choose rows, forward, sample, route, commit or hand off.

Routing is decided on raw step outputs before any finish check; ``outcomes`` does what a decision
means for its request. Knows no rings, sockets or processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns
from typing import Final

import torch

from trserve.ipc.baton import Finish
from trserve.ipc.slab import Slab
from trserve.ipc.tally import TallyWriter
from trserve.sched.batching import Turns, choose_step
from trserve.workers.annotating import annotate
from trserve.workers.arrivals import Arrivals
from trserve.workers.asking import Asking
from trserve.workers.candidates import candidates
from trserve.workers.chosen import ChosenRows
from trserve.workers.early_prefill import EarlyPrefill
from trserve.workers.grammar import Grammars
from trserve.workers.in_step import InStep
from trserve.workers.load_words import LoadWords
from trserve.workers.memory import Plan, fit_to_memory
from trserve.workers.metering import WorkerMeter
from trserve.workers.outcomes import Outcomes
from trserve.workers.prompt_scoring import PromptScores
from trserve.workers.recorder import Recorder
from trserve.workers.rehearsal import rehearse
from trserve.workers.request import Request
from trserve.workers.routing import Routing
from trserve.workers.row_sampling import RowSamplings
from trserve.workers.runner import ForwardOutput, Runner, SleepingRunner, SubmittingRunner
from trserve.workers.sampler import Sampler
from trserve.workers.steady import SteadyRows, is_steady
from trserve.workers.step import StepInputs
from trserve.workers.suspects import StepGuard
from trserve.workers.table import RequestTable

SETTLED_STEPS: Final = 4
"""Steps without a change after which more of them are made ready for: that takes as long as it
saves in some steps, and a request that is routed often leaves sooner."""


@dataclass(frozen=True)
class StepLimits:
    """How much one step may take."""

    max_rows: int
    max_tokens: int


class StepCycle:
    """Runs steps over a table's runnable requests.

    Args:
        index: this worker's model.
        inputs: the step's preallocated input arrays, large enough for ``limits``.
        early_prefill: whether prompts that may come are computed in every turn, and not only in
            those that have nothing else to do.
        tally: where it is summed up where requests went.
        recorder: keeps what was computed for each sampled token, if anybody asked for that.
        grammars: makes the constraints of requests that have a grammar.
        meter: where it is summed up how long things took, if anybody asks.

    Attributes:
        on_note: called by :meth:`note`, for what else is to be said then.
        on_submitted: called in each step of a runner that submits it, while its device computes.
        on_detour: called before something that may take long and is no step.
        submits: whether it is called at all.
        width: rows of the last turn's step if none of them was a prompt's, else 0.
        has_rest: whether the last step left a request in the middle of its prompt or suffix.
    """

    def __init__(
        self,
        *,
        index: int,
        slab: Slab,
        table: RequestTable,
        routing: Routing,
        runner: Runner,
        sampler: Sampler,
        inputs: StepInputs,
        limits: StepLimits,
        tally: TallyWriter,
        recorder: Recorder | None = None,
        early_prefill: bool = False,
        grammars: Grammars | None = None,
        meter: WorkerMeter | None = None,
    ) -> None:
        self._index = index
        self._slab = slab
        self._table = table
        self._routing = routing
        self._runner = runner
        self._sampler = sampler
        self._inputs = inputs
        self._limits = limits
        self._tally = tally
        self._began_ns = 0
        if meter is not None:
            routing.on_failure = meter.failed
        self.on_note: Callable[[], None] = _nothing_more
        self.on_submitted: Callable[[], None] = _nothing_more
        self.on_detour: Callable[[], None] = _nothing_more
        self._unsettled: ChosenRows | None = None
        self._computed: ChosenRows | SteadyRows | None = None  # by a device now
        self.submits = isinstance(runner, SubmittingRunner)
        if isinstance(runner, SubmittingRunner):
            runner.on_submitted = self._while_it_computes
        if isinstance(runner, SleepingRunner):
            runner.on_waking = self._rehearse
        self.width = 0
        self.has_rest = False
        self._recorder = recorder
        self._load = LoadWords(slab.workers[index], table)
        runner.on_layer = self._load.beat_now
        runner.heartbeat = self._load.heartbeat_address
        self._guard = StepGuard(slab, index)
        self._early = EarlyPrefill(slab, index, table, runner, inputs)
        self._always_early = early_prefill
        self._row_sampling = RowSamplings()
        self._in_step = InStep(runner, routing)
        self._short_of_blocks = False
        self._turns = Turns()
        self._unnoted = False
        self._version_before = -1  # the table's, at the last step that was chosen
        self._unchanged = 0  # steps chosen since that moved
        self._steady: SteadyRows | None = None
        self._arrivals = Arrivals(index, slab, table, routing, self._guard, grammars)
        self._arrivals.on_detour = lambda: self.on_detour()
        self._asking = Asking(routing, self._in_step, self._arrivals, meter, submits=self.submits)
        self._outcomes = Outcomes(table, routing, tally)

    @property
    def rows(self) -> int:
        """Rows of the last step."""
        return self._inputs.num_rows

    def look_around(self) -> None:
        """After a worker has ended: who may have been the reason runs alone; who is lost?"""
        self._steady = None
        self._guard.look(self._table.runnable)
        self._outcomes.lost = self._arrivals.lost_models()

    def run(self, now_ns: int) -> None:
        """One step, if anything is runnable. The caller publishes its results."""
        self._load.beat(now_ns)
        self.width = 0
        early = self._table.ahead and (self._always_early or not self._table.runnable)
        self._runner.began_ns = self._began_ns = now_ns
        if early:
            self._steady = None  # its inputs are overwritten
            self._early.run(self._guard)
            self._runner.began_ns = self._began_ns = now_ns = monotonic_ns()
        steady = self._steady
        if steady is not None and steady.version == self._table.version and steady.take_blocks():
            noteworthy = steady.starts_blocks
            self._run_steady(steady)
            if not noteworthy and steady.version == self._table.version:
                return
        elif self._table.runnable:
            self._steady = None
            self._step(now_ns)
        if early:
            self.width = 0  # the turn's time is that of a prompt's chunk as well
        self._unnoted = True

    def rest(self, now_ns: int) -> None:
        """A turn without a step."""
        self._load.beat(now_ns)
        self.width = 0
        self.has_rest = False
        self._unnoted = True

    def note(self) -> None:
        """Say what there is after a step that changed it; called when nobody waits for that."""
        self.on_note()
        if self._table.trace is not None:
            self._table.trace.write()
        if self._unnoted:
            self._unnoted = False
            self._load.note()
            self._early.note()

    def _step(self, now_ns: int) -> None:
        same = self._version_before == self._table.version
        self._version_before = self._table.version
        self._unchanged = self._unchanged + 1 if same else 0
        alone = self._guard.next_suspect(self._table.runnable)
        wanted = choose_step(
            alone or candidates(self._table, all_of_them=self._short_of_blocks),
            max_rows=self._limits.max_rows,
            max_tokens=self._limits.max_tokens,
            now_ns=now_ns,
            # Where there are too few blocks the oldest go first: they are the first to give some.
            turns=None if self._short_of_blocks else self._turns,
        )
        plan, too_large = fit_to_memory(wanted, self._table)
        # Then whoever is to compute a prefix for others may not come to it for long.
        self._short_of_blocks = len(plan) < len(wanted)
        if too_large is not None:
            self._table.finish(too_large, Finish.LENGTH)
        if self._unchanged >= SETTLED_STEPS and plan and self._can_be_steady(plan):
            self._steady = self._make_steady(plan)
            self._run_steady(self._steady)
        elif plan:
            self._run_plan(plan)

    def _can_be_steady(self, plan: Plan) -> bool:
        """Whether to get ready for more steps like this one; records of tokens are made below."""
        return (
            not self._arrivals.annotated and self._recorder is None and is_steady(plan, self._table)
        )

    def _make_steady(self, plan: Plan) -> SteadyRows:
        requests = [request for request, _ in plan]
        self.has_rest = False  # each row samples, and nothing is settled
        self._inputs.clear()
        self._guard.enter([request.slot for request in requests])
        return SteadyRows(
            requests, self._table, self._inputs, self._routing.parameter_tensors(requests)
        )

    def _run_steady(self, rows: SteadyRows) -> None:
        """:meth:`_run_plan` for rows that are known."""
        self._guard.enter_again()
        output = self._in_step.compute_steady(rows)
        self._load.count_step()
        self.width = len(rows.requests)
        rows.note_computed()
        sampled = output.tokens
        if sampled is None:
            sampled = self._sampler.sample(output.logits, rows.sampling())
        rows.show(sampled)
        destinations = rows.stay if rows.pinned else self._asking.after(rows, output, sampled)
        tokens = sampled.tolist()
        if destinations == rows.stay and rows.commit(tokens):
            self._tally.stayed(len(tokens), len(tokens))
        else:
            rows.count_computed()
            self._outcomes.apply(rows.requests, tokens, destinations)
        if rows.version == self._table.version:
            rows.advance(sampled)
        self._guard.leave()

    def _run_plan(self, plan: Plan) -> None:
        self._guard.enter([request.slot for request, _ in plan])
        self._table.rows.fill(plan, self._inputs)
        rows = self._unsettled = ChosenRows(plan, self._table)
        output = self._forward(plan)
        self._settle()
        if rows.due:
            self._decide(rows, output if rows.all_due else output.rows(rows.due))
        for row in rows.over:
            self._end_prompt(plan[row][0], output.logits[row])
        self._guard.leave()

    def _while_it_computes(self) -> None:
        """A device has begun with a step: all that can be done without its output."""
        self._load.beat_now()
        self.on_submitted()
        self._computed = self._unsettled or self._steady
        if self._steady is not None:
            self._asking.during(self._steady)
        self._settle()

    def _rehearse(self) -> None:
        if self._computed is not None:
            rehearse(self._computed, self._table.rows)

    def _settle(self) -> None:
        rows, self._unsettled = self._unsettled, None
        if rows is None:  # a device had the step
            return
        self._load.count_step()
        self.note()
        if (trace := self._table.trace) is not None and trace.unresumed:
            trace.resumed([each for each, _ in rows.plan], self._table.runnable, self._began_ns)
        rows.settle()
        self._asking.during(rows)
        self.width = 0 if rows.prompts else len(rows.plan)
        self.has_rest = rows.has_rest

    def _end_prompt(self, request: Request, logits: torch.Tensor) -> None:
        """End a request that wanted nothing but its prompt."""
        sound = bool(torch.isfinite(logits.max()))
        self._table.finish(request, Finish.LENGTH if sound else Finish.NUMERIC_ERROR)

    def _forward(self, plan: Plan) -> ForwardOutput:
        arrivals, requests = self._arrivals, [request for request, _ in plan]
        if not arrivals.annotated:
            return self._in_step.compute(self._inputs, requests, routes=True)
        annotated = arrivals.annotated.items()
        arrivals.annotated = {slot: each for slot, each in annotated if not each.finished}
        scores = PromptScores(plan)
        if not len(scores.tokens):
            # What the router decides on is written down before it is asked.
            return self._in_step.compute(self._inputs, requests, routes=False)
        output = self._runner.forward(self._inputs, scores.tokens)
        assert output.also is not None
        scores.write(output.also, self._runner)
        return output

    def _decide(self, rows: ChosenRows, output: ForwardOutput) -> None:
        requests, sampled = rows.requests, output.tokens
        if sampled is None:
            sampled = self._sampler.sample(output.logits, self._row_sampling.of(requests))
        self._table.rows.show(requests, sampled, rows.places)
        if self._recorder is not None:
            self._recorder.sampled(requests, output.on_host(), sampled)
        if self._arrivals.annotated:
            annotate(requests, output.on_host().logits, sampled)
        tokens = sampled.tolist()
        destinations = self._asking.after(rows, output, sampled)
        self._outcomes.apply(requests, tokens, destinations)
        if self._recorder is not None:
            self._recorder.decided()


def _nothing_more() -> None:
    """Nothing else is to be said."""
