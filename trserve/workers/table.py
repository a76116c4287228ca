"""The requests of one worker, kept in step with the slab. Knows no model, router or sampler.

Everything here is level-triggered: ``sync`` looks at a slot and does what its words say, whatever
brought the hint. A descriptor that is lost, doubled or late therefore changes nothing; ``hop``
tells whether a baton was handled before, and a rescan finds what no ring brought.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from trserve.ipc.baton import (
    BANK_SHIFT,
    HOP_MASK,
    OWNER_AND_STATE,
    Finish,
    SlotState,
    hand_over,
    live_of,
    pack,
    unpack,
)
from trserve.ipc.extras import read_extras, write_extras
from trserve.ipc.fence import load_fence
from trserve.ipc.publish import Outbox
from trserve.ipc.rings import Descriptor, Kind
from trserve.ipc.slab import Slab
from trserve.params import decode_params
from trserve.workers.blocks import BlockPool
from trserve.workers.deadlines import Deadlines
from trserve.workers.news import News
from trserve.workers.request import Request
from trserve.workers.rows import RowWriter
from trserve.workers.states import Event, State
from trserve.workers.tracing import WorkerTrace

log = logging.getLogger(__name__)
# What a handoff needs of enums and tuples, without the look-ups and checks of their classes.
_RUN: Final = Kind.RUN
_HANDED_OFF: Final = Event.HANDED_OFF
_WAITING: Final = State.WAITING
_new: Final = tuple.__new__


def _nothing_more(request: Request) -> None:
    """Arrivals need nothing beyond the table."""


class RequestTable:
    """Resident requests by slot, and those that may run, in the order they became runnable.

    Args:
        index: this worker.

    Attributes:
        rows: writes what is not committed yet.
        kv_drops, kv_repairs: how often a request lost its KV here, and blocks did not add up.
        waiting: those of ``runnable`` that have not started, or have lost their KV.
        ahead: requests written elsewhere whose prompt may be computed here before they come.
        early_tokens_used: of the prompt tokens so computed, those of requests that came.
        version: grows whenever the requests that may run change, or one of them loses its KV.
        on_arrival: called once per baton that arrives; may finish the request or hand it on.
        trace: where arrivals, handoffs and ends are noted, or None.
        news: whether something happened to the workers since the last rescan.
    """

    def __init__(self, slab: Slab, outbox: Outbox, pool: BlockPool, index: int) -> None:
        self._slab = slab
        self._outbox = outbox
        self._index = index
        self._mine = live_of(index)
        self.on_arrival: Callable[[Request], None] = _nothing_more
        self.trace: WorkerTrace | None = None
        # Our own copy of what is closed here, ahead of the slab's by what is not yet published:
        # a second hint at a request that just ended must not bring it back.
        self._closed = list(slab.closed[index])
        self._left = slab.left[index]
        self._sent = slab.sent
        self._cancel_vector = np.frombuffer(slab.cancel, np.int64)
        self.news = News(slab)
        self._rows = slab.tokens.view()
        self._rows.flags.writeable = False
        self.blocks_per_row = -(-slab.layout.row_tokens // pool.block_size)
        self.block_tables = np.zeros((slab.layout.slots, self.blocks_per_row), dtype=np.int32)
        self.rows = RowWriter(slab, index, self.block_tables)
        self.pool = pool
        self.kv_drops = self.kv_repairs = self.version = 0
        self.resident: dict[int, Request] = {}
        self._deadlines = Deadlines()
        self.runnable: dict[int, Request] = {}
        self.waiting: dict[int, Request] = {}
        self.ahead: dict[int, Request] = {}
        self.early_tokens_used = 0

    # -- taking in ---------------------------------------------------------------------------

    def sync(self, slot: int, gen: int) -> None:
        """Do what the words of ``slot`` say, if ``gen`` is still its use and not closed here."""
        slab = self._slab
        if slab.gen[slot] != gen or self._closed[slot] == gen:
            return
        word = slab.baton[slot]
        load_fence()
        request = self.resident.get(slot)
        if word & OWNER_AND_STATE == self._mine:
            self._sync_own(slot, gen, request, word)
        elif (state := unpack(word).state) is SlotState.DONE:
            self._close(slot, gen, request)
        elif state is SlotState.LIVE and request is not None and slab.cancel[slot] == gen:
            self.drop_kv(request)

    def expect(self, slot: int, gen: int) -> None:
        """Hear of a request that another worker writes, and that may come."""
        slab = self._slab
        if slab.gen[slot] != gen or self._closed[slot] == gen or slot in self.resident:
            return
        baton = unpack(slab.baton[slot])
        load_fence()
        if baton.state is SlotState.LIVE and baton.owner != self._index:
            self.ahead[slot] = self._create(slot, gen)
        else:
            self.sync(slot, gen)

    def _sync_own(self, slot: int, gen: int, request: Request | None, word: int) -> None:
        if request is None:
            request = self._create(slot, gen)
        if word & HOP_MASK > request.hop:
            self._take_baton(request, word)
        # Not runnable: handed on a moment ago, with the word still to be published.
        if self._slab.cancel[slot] == gen and slot in self.runnable:
            self.finish(request, Finish.ABORT)

    @property
    def outdated(self) -> bool:
        """Whether a worker was reaped since the last rescan; its last hints were lost with it."""
        return self.news.any

    def rescan(self) -> None:
        """Look at every slot that concerns this worker: at start, and after hints were lost.

        A slot's use is read before its baton, which may be of a later use, but not of an earlier.
        """
        slab = self._slab
        self.news.note()
        for slot in range(slab.layout.slots):
            gen, mine = slab.gen[slot], unpack(slab.baton[slot]).owner == self._index
            load_fence()
            if mine or slab.sent[slot] >> self._index & 1:
                self.sync(slot, gen)

    def cancelled(self) -> list[Request]:
        """Runnable requests whose cancel word is set, or whose time is over.

        A CANCEL descriptor that was lost thus costs one step, not the rest of the request.
        """
        late = self._deadlines.late(self.runnable)
        if not np.count_nonzero(self._cancel_vector):
            return late
        cancel = self._slab.cancel
        runnable = self.runnable.values()
        return late + [r for r in runnable if cancel[r.slot] == r.gen and r not in late]

    def _create(self, slot: int, gen: int) -> Request:
        slab = self._slab
        request = Request(
            slot=slot,
            gen=gen,
            params=decode_params(slab.params(slot)),
            prompt_len=slab.prompt_len[slot],
            limit=slab.limit[slot],
            row=self._rows[slot],
            block_table=self.block_tables[slot],
            banks=(slab.extras(slot, 0), slab.extras(slot, 1)),
            peers_left=slab.left[: self._index] + slab.left[self._index + 1 :],
        )
        self.resident[slot] = request
        self._deadlines.add(request)
        return request

    def _take_baton(self, request: Request, word: int) -> None:
        slot = request.slot
        (
            request.last_store_ns,
            request.pending_ns,
            request.arrived_empty,
            length,
            request.extras,
            request.arrived_alone,
        ) = read_extras(request.banks[word >> BANK_SHIFT & 1])
        request.take_baton(word, length, time.monotonic_ns())
        self.version += 1
        self.runnable[slot] = request
        if request.num_early:
            self.early_tokens_used += request.num_early if request.num_blocks else 0
            request.num_early = 0
        self.ahead.pop(slot, None)
        if request.state is _WAITING:
            self.waiting[slot] = request
        if self.trace is not None:
            self.trace.arrived(request)
        self.on_arrival(request)

    # -- sending out -------------------------------------------------------------------------

    def commit(self, request: Request) -> None:
        """Make the token that ``rows.show`` wrote final; the caller publishes it."""
        request.length += 1

    def stay(self, request: Request) -> None:
        """Publish what was committed of a request that goes on here."""
        self._outbox.store_baton(request.slot, request.word)

    def stay_all(self, slots: Sequence[int], words: Sequence[int]) -> None:
        """:meth:`stay` for many requests, whose words are given."""
        self._outbox.store_batons(slots, words)

    def hand_off(
        self, request: Request, model: int, *, empty: bool, router_extras: bytes = b""
    ) -> None:
        """Give the baton to ``model``; nothing of the slot is touched from here on.

        ``empty`` says that a sampled token was discarded and nothing committed since the baton
        came: two such hops in a row never happen.
        """
        slot, hop = request.slot, request.hop + 1
        now = self._write_extras(request, router_extras, empty=empty)
        length = request.length
        self._sent[slot] |= 1 << model
        self._left[slot] = length
        self._outbox.store_baton(slot, hand_over(request.word, model, hop))
        self._outbox.send(model, _new(Descriptor, (_RUN, slot, request.gen, hop)))
        request.visible = length
        request.move(_HANDED_OFF)
        self.version += 1
        self.runnable.pop(slot, None)
        self.waiting.pop(slot, None)
        if self.trace is not None:
            self.trace.sent(request, hop, now, model)

    def finish(self, request: Request, reason: Finish) -> None:
        """End a request whose baton is here, and tell every worker that has heard of it."""
        slot, gen = request.slot, request.gen
        barred = reason is Finish.NUMERIC_ERROR and request.is_barred
        self._write_extras(request, b"", empty=barred)
        state, bank = SlotState.DONE, request.bank ^ 1
        word = pack(request.length, self._index, state, reason, bank, request.hop)
        self._outbox.store_baton(slot, word)
        sent = self._slab.sent[slot]
        for worker in range(self._slab.layout.workers):
            if sent >> worker & 1 and worker != self._index:
                self._outbox.send(worker, Descriptor(Kind.DONE, slot, gen, request.hop))
        self._close(slot, gen, request)
        if self.trace is not None:
            self.trace.finished(request, reason)
        if reason is Finish.NUMERIC_ERROR and not barred:
            # Nothing says where the NaN began: if in the KV of a prefix, it must not live on.
            self.pool.forget_cached()

    def _write_extras(self, request: Request, router_extras: bytes, *, empty: bool) -> int:
        now, pending = time.monotonic_ns(), request.pending_ns
        if self._index:
            pending += now - request.last_store_ns
        bank = request.banks[request.bank ^ 1]
        write_extras(bank, now, pending, empty, request.length, router_extras)
        return now

    def _close(self, slot: int, gen: int, request: Request | None) -> None:
        if request is not None:
            self.pool.release(request)
            request.move(Event.FINISHED)
            self.version += 1
            del self.resident[slot]
            self._deadlines.forget(slot)
            self.ahead.pop(slot, None)
            self.runnable.pop(slot, None)
            self.waiting.pop(slot, None)
        self._closed[slot] = gen
        self._outbox.close(slot, gen)

    # -- KV ----------------------------------------------------------------------------------

    def start(self, request: Request) -> None:
        """Take a waiting request into a step."""
        slot, slab = request.slot, self._slab
        self.version += 1
        del self.waiting[slot]
        self.pool.started(request)
        if slab.cached[slot] < 0:
            slab.cached[slot] = min(request.num_computed, request.prompt_len)
        request.move(Event.SCHEDULED)

    def drop_kv(self, request: Request) -> None:
        """Take the KV blocks of a request; its row is untouched and will be computed again."""
        self.kv_drops += 1
        self.version += 1
        self.ahead.pop(request.slot, None)
        self.pool.release(request)
        if request.state is not State.WAITING:
            request.move(Event.KV_LOST)
        if request.state is State.WAITING:
            self.waiting[request.slot] = request
            request.dropped_at = self.version

    def check_blocks(self, *, strict: bool) -> None:
        """Recount the blocks while nothing is runnable; repair what does not add up.

        Then everybody loses their KV, which costs time and no output. With ``strict``, for tests,
        it looks at each block, and raises AssertionError instead.
        """
        check = self.pool.check if strict else self.pool.check_sums
        try:
            check(self.resident.values())
        except AssertionError as error:
            if strict:
                raise
            log.error("KV blocks do not add up (%s): all are free again, KV is recomputed", error)
            self.kv_repairs += 1
            self.version += 1
            for request in self.resident.values():
                request.num_blocks = request.num_computed = request.num_cached = 0
            self.pool.reset()
