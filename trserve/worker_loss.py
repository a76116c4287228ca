"""What the launcher does in the slab for workers that are gone.

From the reap of a worker to its successor's hello the launcher is that worker: it alone may write
what is the worker's, because nobody else can. For one that is given up it stays so for good. Knows
no processes, no policy and no tokens; a row's content is never looked at, so nothing here grows
with the context.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from trserve.ipc.baton import (
    OWNER_AND_STATE,
    STATE_MASK,
    STATE_SHIFT,
    Baton,
    Finish,
    SlotState,
    live_of,
    unpack,
)
from trserve.ipc.doorbell import ring
from trserve.ipc.extras import read_extras, write_extras
from trserve.ipc.fence import load_fence, store_fence
from trserve.ipc.slab import Slab, WorkerStatus
from trserve.ipc.tally import read_tally
from trserve.params import decode_params
from trserve.restarts import Use

_DONE: Final = int(SlotState.DONE) << STATE_SHIFT


class Step(NamedTuple):
    """What a worker did when it died.

    Attributes:
        requests: those of its step.
        poison: those of them that end workers.
        early: whose prompt it was computing for another worker.
    """

    requests: frozenset[Use]
    poison: frozenset[Use]
    early: frozenset[Use] = frozenset()


class StandIn:
    """The launcher, in the place of workers that were reaped."""

    def __init__(self, slab: Slab, bells: Sequence[int]) -> None:
        self._slab = slab
        self._bells = bells
        self._suspects: dict[Use, int] = {}

    def set_status(self, worker: int, status: WorkerStatus) -> None:
        """Say how ``worker`` is."""
        self._slab.workers[worker].set("status", status)

    def status(self, worker: int) -> WorkerStatus:
        """How ``worker`` is."""
        return WorkerStatus(self._slab.workers[worker].get("status"))

    def heartbeat(self, worker: int) -> int:
        """Its last sign of life, in nanoseconds."""
        return self._slab.workers[worker].get("heartbeat")

    def served(self, worker: int) -> int:
        """How often it has had something for a request, it and its predecessors."""
        return int(read_tally(self._slab, worker).moved.sum())

    def take_over(self, worker: int, *, blamed: bool = True) -> Step:
        """Be ``worker``, which was reaped, from now on; returns what it was doing when it died.

        Nothing, unless it is ``blamed``: one that was killed for another's sake says nothing about
        the requests of its step.

        A request that is in the step at two deaths, and not a token further at the second, is
        ended; after the first it is a suspect, and the successor runs it alone. One that another
        worker writes is never ended for what its prompt did here: that one may write it happily.
        It is a suspect as well, and so nobody computes its prompt early any more.
        """
        if not blamed:
            self._slab.in_step[worker][0] = 0
        step = self._step(worker)
        self.set_status(worker, WorkerStatus.RESTARTING)
        for word in ("buffered", "in_step"):  # nobody's gate waits for a step that is over
            self._slab.workers[worker].set(word, 0)
        for slot, _ in step.poison:
            self._finish(slot, Finish.WORKER_CRASHED)
        for slot, gen in step.requests - step.poison | step.early:
            self._slab.suspect[slot] = gen
        self.close_done(worker)
        self._new_epoch()
        return step

    def _step(self, worker: int) -> Step:
        slab = self._slab
        count, *listed = slab.in_step[worker].tolist()
        slab.in_step[worker][0] = 0  # else a successor that dies while loading would die in it too
        gen, sent = slab.gen, slab.sent
        lengths = {(slot, gen[slot]): baton.length for slot, baton in self._owned(worker)}
        # What the dead had heard of and not closed: none of these slots is used anew before we
        # close it, so these generations are those of the step.
        heard_of = {(slot, gen[slot]) for slot in listed[:count] if sent[slot] >> worker & 1}
        found = heard_of & lengths.keys()
        poison = {use for use in found if self._suspects.get(use) == lengths[use]}
        known = {use: length for use, length in self._suspects.items() if gen[use[0]] == use[1]}
        self._suspects = known | {use: lengths[use] for use in found}
        return Step(frozenset(found), frozenset(poison), frozenset(heard_of - found))

    def _owned(self, worker: int) -> Iterator[tuple[int, Baton]]:
        """The slots whose baton ``worker`` has; nobody else may change that."""
        owners = self._slab.baton_vector & OWNER_AND_STATE
        for slot in np.flatnonzero(owners == live_of(worker)).tolist():
            word = self._slab.baton[slot]
            load_fence()
            yield slot, unpack(word)

    def close_done(self, worker: int) -> None:
        """Close, in the name of ``worker``, what is over: it holds nothing any more.

        ``gen`` is read first: a slot is not used anew before we have closed it.
        """
        slab, closed = self._slab, 0
        for slot in np.flatnonzero(slab.baton_vector & STATE_MASK == _DONE).tolist():
            gen = slab.gen[slot]
            if slab.closed[worker][slot] == gen:
                continue
            load_fence()
            done = slab.baton[slot] & STATE_MASK == _DONE
            load_fence()
            if done and slab.sent[slot] >> worker & 1:
                slab.closed[worker][slot] = gen
                closed += 1
        if closed:
            ring(self._bells[slab.layout.gateway])

    def give_up(self, worker: int, *, pass_on: bool = True) -> None:
        """``worker`` will not come back: nobody sends anything there from now on."""
        self.set_status(worker, WorkerStatus.LOST)
        self.tend(worker, pass_on=pass_on)
        self._new_epoch()

    def tend(self, worker: int, *, pass_on: bool = True) -> None:
        """Pass on what has come to ``worker``, which is given up, and close what is over.

        To be called now and then: somebody may have sent it a request a moment before they knew.
        Without ``pass_on`` its requests end: nobody here would write them for anybody.
        """
        left = [w for w in range(self._slab.layout.workers) if self._is_left(w)]
        owned = list(self._owned(worker))
        for slot, baton in owned:
            if pass_on and left and not decode_params(self._slab.params(slot)).pinned:
                self._pass_on(slot, baton, left[0])
            else:
                self._finish(slot, Finish.WORKER_LOST)
        self.close_done(worker)
        if owned:
            self._new_epoch()

    def _is_left(self, worker: int) -> bool:
        return self.status(worker) is not WorkerStatus.LOST

    def _pass_on(self, slot: int, baton: Baton, worker: int) -> None:
        slab, bank, now = self._slab, baton.bank ^ 1, time.monotonic_ns()
        extras = read_extras(slab.extras(slot, baton.bank))
        away = now - extras.stored_ns if baton.owner else 0
        extras = extras._replace(
            stored_ns=now,
            pending_ns=extras.pending_ns + away,
            empty=False,
            length=baton.length,
            alone=True,
        )
        write_extras(slab.extras(slot, bank), *extras)
        slab.left[baton.owner][slot] = baton.length
        slab.sent[slot] |= 1 << worker
        store_fence()
        slab.baton[slot] = baton._replace(owner=worker, bank=bank, hop=baton.hop + 1).pack()

    def _finish(self, slot: int, reason: Finish) -> None:
        """Whoever else heard of it finds it over when they rescan."""
        baton = unpack(self._slab.baton[slot])
        self._slab.baton[slot] = baton._replace(state=SlotState.DONE, finish=reason).pack()

    def _new_epoch(self) -> None:
        """Have everybody rescan: what the dead had still to send is lost with them."""
        store_fence()
        self._slab.epoch += 1
        for bell in self._bells:
            ring(bell)
