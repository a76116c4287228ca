"""A link agent: the worker, in this host's slab, whose model is at another host.

What comes is sent on; what is answered is committed and handed on, by the table's rules. While the
far side is out of reach, or a visit takes too long, ``--on-peer-loss`` says what becomes of a
request: it waits, it is taken back and written on alone, or it ends with an error. A far side whose
answer cannot be right is asked again, and done without where it has no other. Knows no frames, and
nothing of how the far side is reached.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from trserve.edge.agent_held import Held
from trserve.edge.agent_table import AgentTable, Verdict
from trserve.edge.cloud import Answer, Cloud, Visit
from trserve.edge.reachability import Reachability
from trserve.ipc.baton import Finish
from trserve.ipc.links import LinkReceiver
from trserve.ipc.slab import Slab, WorkerStatus
from trserve.restarts import DEGRADE, FAIL, WAIT
from trserve.workers.news import News

log = logging.getLogger(__name__)
BELT_S: Final = 1.0
REPEAT_S: Final = 5.0
"""Without a token for so long, a visit is told again: an answer may have been lost."""

_AHEAD_S: Final = 1.0
"""Likewise where one is missing for certain, unless it was told just before."""

_MOST_UNFIT: Final = 3
"""Answers to one visit that cannot be right, until it is done without."""

_AFTERMATH: Final = {
    DEGRADE: "requests are written on without it, and marked so",
    FAIL: "requests that go there end with an error",
    WAIT: "requests that go there wait",
}


class Agent:
    """Takes turns: what has come, what is answered, what is due.

    Args:
        rings: the consuming ends of every link towards this agent.
        locals_: the models of this host, which may write on alone, the entry model first.
        timeout_s: the longest that a request may be away without a token; 0 for any.
        name: what to call the model to people.
    """

    def __init__(
        self,
        slab: Slab,
        table: AgentTable,
        cloud: Cloud,
        reach: Reachability,
        rings: Sequence[LinkReceiver],
        *,
        policy: str,
        locals_: Sequence[int],
        timeout_s: float,
        name: str,
        publish: Callable[[], None],
        remote: Sequence[int],
    ) -> None:
        self._slab = slab
        self._table = table
        self._cloud = cloud
        self._reach = reach
        self._rings = rings
        self._policy = policy
        self._locals = locals_
        self._timeout_s = timeout_s
        self._name = name
        self._publish = publish
        self._news = News(slab, remote)
        self._connections = cloud.connections
        self._now = time.monotonic()
        self._repeat_at = 0.0
        table.on_arrival = self._arrive
        table.on_prompt = self._expect
        table.on_end = cloud.end

    def begin(self) -> None:
        """Take over what there is."""
        self._reach.begin(connected=self._cloud.connected)
        if not self._reach.reachable:
            log.warning(
                "%s cannot be reached (%s): %s until it can",
                *(self._name, self._cloud.reason, _AFTERMATH[self._policy]),
            )
        self._rescan()
        self._publish()

    def turn(self, now: float) -> None:
        """One iteration."""
        self._now = now
        answers = self._cloud.poll(now)
        self._take_in()
        for answer in answers:
            self._answer(answer)
        if self._reach.update(now, connected=self._cloud.connected):
            self._on_change()
        if self._cloud.connections != self._connections:
            self._connections = self._cloud.connections
            # Whatever was under way may have been lost with the connection.
            for held in tuple(self._table.held.values()):
                self._send(held)
        self._tend()
        self._repeat()
        self._publish()

    def due_s(self, now: float) -> float:
        """Seconds until a turn is due although nothing comes."""
        due = [BELT_S, self._cloud.due_s(now)]
        if (changes := self._reach.due_s(now)) is not None:
            due.append(changes)
        for held in self._table.held.values():
            if self._timeout_s and self._policy != WAIT:
                due.append(held.since + self._timeout_s - now)
            if held.params.deadline_ns:
                due.append((held.params.deadline_ns - time.monotonic_ns()) / 1e9)
        return max(0.0, min(due))

    # -- what comes --------------------------------------------------------------------------

    def _take_in(self) -> None:
        missed = self._news.any
        for ring in self._rings:
            missed = ring.overflowed() or missed
            for descriptor in ring.drain():
                self._table.take_in(descriptor)
        if missed:
            self._rescan()

    def _rescan(self) -> None:
        self._news.note()
        self._table.rescan()

    def _arrive(self, held: Held) -> None:
        held.since = self._now
        self._send(held)

    def _send(self, held: Held) -> None:
        held.asked = self._now
        if self._reach.reachable or self._policy == WAIT:
            self._cloud.visit(self._table.visit_of(held))
        else:
            self._do_without(held)

    def _expect(self, visit: Visit) -> None:
        if self._reach.reachable:
            self._cloud.prefill(visit)

    def _answer(self, answer: Answer) -> None:
        verdict = self._table.apply(answer, self._now)
        if verdict in (Verdict.UNFIT, Verdict.APART):
            self._ask_again(self._table.held[answer.session], anew=verdict is Verdict.APART)
            return
        if verdict is Verdict.AHEAD:
            self._say_again(self._table.held[answer.session], _AHEAD_S)
        if self._cloud.connected:
            self._reach.answered(in_time=verdict is Verdict.TAKEN)

    def _ask_again(self, held: Held, *, anew: bool) -> None:
        """What was answered cannot be right: another answer is asked for, but not for ever."""
        if held.unfit >= _MOST_UNFIT:
            log.error("%s has given %d answers that cannot be right", self._name, held.unfit)
            self._give_up(held)
            return
        if anew:
            self._table.begin_anew(held)
            self._publish()
            self._cloud.forget(held.gen)
        self._send(held)

    def _say_again(self, held: Held, after_s: float) -> None:
        """The same visit once more, which changes nothing for a far side that is at it."""
        here = self._cloud.connected and self._reach.reachable
        if here and self._now >= held.asked + after_s:
            self._send(held)

    def _repeat(self) -> None:
        """Of those that get no token: what was answered last may have been lost, and then nothing
        else would come."""
        if self._now < self._repeat_at:
            return
        self._repeat_at = self._now + BELT_S
        for held in self._table.held.values():
            if self._now >= held.since + REPEAT_S:
                self._say_again(held, REPEAT_S)

    # -- when the far side is away -------------------------------------------------------------

    def _on_change(self) -> None:
        if self._reach.reachable:
            log.info("%s can be reached again", self._name)
            return
        why = self._cloud.reason if not self._cloud.connected else "it takes too long"
        log.warning(
            "%s cannot be reached (%s): %s until it can",
            *(self._name, why, _AFTERMATH[self._policy]),
        )
        if self._policy != WAIT:
            for held in tuple(self._table.held.values()):
                self._do_without(held)

    def _give_up(self, held: Held) -> None:
        """The far side is there, but no good for this request, and hardly for the next one."""
        if self._policy == DEGRADE and self._reach.reachable:
            self._reach.rest(self._now, self._timeout_s)
        self._do_without(held)

    def _do_without(self, held: Held) -> None:
        """Take the request back if the policy is to write on, or end it."""
        writes_on = self._policy == DEGRADE and not held.params.pinned
        model = self._stand_in() if writes_on else None
        if model is None:
            self._table.finish(held, Finish.WORKER_LOST)
        else:
            empty = held.length == held.arrival_length
            self._table.hand_over(held, model, extras=held.extras, empty=empty, alone=True)

    def _stand_in(self) -> int | None:
        """A model that can write on."""
        for model in self._locals:
            if self._slab.workers[model].get("status") != WorkerStatus.LOST:
                return model
        return None

    def _tend(self) -> None:
        """End what is over, and see who has been away for too long."""
        for held in self._table.over():
            self._table.finish(held, Finish.ABORT)
        if not self._timeout_s or self._policy == WAIT:
            return
        late = self._now - self._timeout_s
        for held in [held for held in self._table.held.values() if held.since <= late]:
            log.warning("%s has not answered for %g s", self._name, self._timeout_s)
            self._give_up(held)
