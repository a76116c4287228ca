"""Admission, the doorbell and the end of requests: what stands between HTTP and the slab.

One callback serves all streams: a ring of the gateway's bell means that some baton words changed,
and one comparison of all of them with those last seen says which. No task is woken for a token.
Who waits for a slot is ``slot_queue``'s matter. Knows no HTTP and no JSON.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec
import numpy as np

from trserve.errors import RequestError
from trserve.gateway.generation import Generation
from trserve.gateway.overdue import Overdue
from trserve.gateway.slot_queue import MAX_WAITING, Room, SlotQueue
from trserve.gateway.slots import Slot, SlotTable
from trserve.gateway.tracing import GatewayTrace
from trserve.ipc.baton import FINISH_MASK, FINISH_SHIFT, LENGTH_SHIFT, Finish
from trserve.ipc.doorbell import silence
from trserve.ipc.fence import load_fence
from trserve.ipc.slab import Slab

log = logging.getLogger(__name__)
FEW_STREAMS: Final = 8
"""Up to so many are looked at one by one: cheaper than vector operations over all slots."""


class Job(msgspec.Struct, frozen=True):
    """A request that is checked and ready for a slot.

    Attributes:
        prompt_ids: the prompt.
        params: the encoded parameter blob.
        limit: the longest that its row may get.
        entry: the worker that writes first; ``fixed``: no other may take its place.
        start: makes its generation once the slot is known.
        pages: annotation pages that it needs.
        visits: the models that may want its prompt early.
        deadline_ns: when its time is over (``time.monotonic_ns``); 0 for never.
    """

    prompt_ids: Sequence[int]
    params: bytes
    limit: int
    entry: int
    start: Callable[[Slot], Generation]
    pages: int = 0
    fixed: bool = False
    visits: Sequence[int] = ()
    deadline_ns: int = 0


def _as_asked(entry: int, *, fixed: bool) -> int:
    """Every model can write."""
    return entry


class Dispatcher:
    """Every request that is in the server, waiting or live.

    Args:
        bell: the gateway's doorbell.
        place: the model that takes the place of a job's ``entry`` at the moment that it gets a
            slot; raises RequestError if none can.
        max_waiting: requests that may wait for a slot.
        waits_for_pages: whether those that find too few annotation pages wait as well, for whom
            there is no "try again later"; else they are refused.
    """

    def __init__(
        self,
        slab: Slab,
        slots: SlotTable,
        bell: int,
        place: Callable[..., int] = _as_asked,
        max_waiting: int = MAX_WAITING,
        *,
        waits_for_pages: bool = False,
    ) -> None:
        self._slab = slab
        self._slots = slots
        self._bell = bell
        self._place = place
        self._queue = SlotQueue(slots, max_waiting)
        self._waits_for_pages = waits_for_pages
        self._overdue = Overdue(self._cut)
        self._seen = slab.baton_vector.copy()
        self._row_tokens = slab.layout.row_tokens
        self._tokens, self._sources = slab.tokens.reshape(-1), slab.source.reshape(-1)
        self._live: dict[int, Generation] = {}
        self._turns: dict[Generation, None] = {}  # in their order
        self._trace = GatewayTrace(slab)
        self.on_idle: Callable[[], None] | None = None

    @property
    def live(self) -> Collection[Generation]:
        """Those that hold a slot and are not answered yet."""
        return self._live.values()

    @property
    def num_live(self) -> int:
        """Requests that hold a slot and are not answered yet."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._queue)

    @property
    def num_closing(self) -> int:
        """Answered requests whose slot some worker still holds."""
        return self._slots.num_closing

    # -- admission ---------------------------------------------------------------------------

    async def submit(self, job: Job) -> Generation:
        """:meth:`submit_all` of one job."""
        (generation,) = await self.submit_all([job])
        return generation

    async def submit_all(self, jobs: Sequence[Job]) -> list[Generation]:
        """Give each of ``jobs`` a slot, all at once, first come first served, and publish them.

        There must be at least as many slots as jobs. While a request waits for many slots, none
        behind it gets one, so that it does not wait for ever.

        Raises:
            RequestError: 429, too many wait already; 504, its time was over before it had a
                slot; what :meth:`fail_all` said; or a job is refused, and with it all.
            asyncio.CancelledError: the caller gave up waiting.
        """
        pages = sum(job.pages for job in jobs) if self._waits_for_pages else 0
        await self._queue.turn(Room(len(jobs), pages), jobs[0].deadline_ns)
        now = time.monotonic_ns()
        slots = self._publish(jobs)
        generations = [job.start(slot) for job, slot in zip(jobs, slots, strict=True)]
        for job, slot in zip(jobs, slots, strict=True):
            self._trace.published(slot, len(job.prompt_ids), now)
        # All are started before the first is served: they may share a response.
        for job, generation in zip(jobs, generations, strict=True):
            self._live[generation.slot.index] = generation
            if job.deadline_ns:
                self._overdue.from_then(generation, job.deadline_ns)
        for generation in generations:
            # The worker may have been faster than this line.
            self._catch_up(generation)
        return generations

    def _publish(self, jobs: Sequence[Job]) -> list[Slot]:
        slots: list[Slot] = []
        try:
            for job in jobs:
                entry = self._place(job.entry, fixed=job.fixed)
                slots.append(
                    self._slots.publish(
                        job.prompt_ids,
                        job.params,
                        limit=job.limit,
                        entry=entry,
                        pages=job.pages,
                        expecting=[model for model in job.visits if model != entry],
                    )
                )
        except RequestError:
            for slot in slots:
                self._slots.cancel(slot)
                self._slots.release(slot)
            # The slots are still free, and nothing else would tell whoever waits for them.
            self._queue.admit()
            raise
        return slots

    # -- the doorbell ------------------------------------------------------------------------

    def on_bell(self) -> None:
        """Some baton words changed: serve the streams they belong to."""
        silence(self._bell)  # before the words are read: what is stored from here on rings again
        if len(self._live) <= FEW_STREAMS:
            for generation in tuple(self._live.values()):
                if self._slab.baton[generation.slot.index] != self._seen[generation.slot.index]:
                    self._catch_up(generation)
        else:
            self._serve_changed()
        self._collect()

    def _serve_changed(self) -> None:
        words = self._slab.baton_vector.copy()
        load_fence()
        changed = np.flatnonzero(words != self._seen)
        self._seen = words
        live, batons = self._live, words[changed]
        # Most have one more token, so all of these are read at once; where it is not so, or the
        # row is another request's by now, nobody uses it.
        last = changed * self._row_tokens + np.maximum(batons >> LENGTH_SHIFT, 1) - 1
        tokens, sources = self._tokens[last].tolist(), self._sources[last].tolist()
        for index, word, token, source in zip(
            changed.tolist(), batons.tolist(), tokens, sources, strict=True
        ):
            generation = live.get(index)
            if generation is not None:
                self._advance(generation, word, token, source)

    def resume(self, generation: Generation) -> None:
        """Give it what its row gained, as its client reads again, or others had their turns."""
        if self._live.get(generation.slot.index) is generation:
            self._catch_up(generation)
            self._collect()

    def _take_turn(self) -> None:
        """One of those that want a turn; all others of the loop come before the next one's."""
        generation = next(iter(self._turns))
        del self._turns[generation]
        if self._turns:
            asyncio.get_running_loop().call_soon(self._take_turn)
        self.resume(generation)

    def _catch_up(self, generation: Generation) -> None:
        row = generation.slot.index
        word = self._slab.baton[row]
        load_fence()
        self._seen[row] = word
        if not generation.begun:  # nobody asks for its last token alone
            self._advance(generation, word, 0, 0)
            return
        last = row * self._row_tokens + max(word >> LENGTH_SHIFT, 1) - 1
        self._advance(generation, word, int(self._tokens[last]), int(self._sources[last]))

    def _advance(self, generation: Generation, word: int, token: int, source: int) -> None:
        """Serve one stream, whose last token that ``word`` covers is given.

        A bug that shows in it must not silence the others of this turn.
        """
        begun = generation.begun
        try:
            if begun and generation.grow(word, token, source):
                return
            generation.advance(word)
        except Exception:
            log.exception("a stream failed")
            error = RequestError("internal error; see the server's log", status=500)
            generation.break_off(error)
        if generation.wants_a_turn:
            if not self._turns:
                asyncio.get_running_loop().call_soon(self._take_turn)
            self._turns[generation] = None
        elif generation.begun and not begun:
            self._trace.first_token(generation.slot)
        self._settle(generation)

    def _settle(self, generation: Generation) -> None:
        """Give up the slot of a generation that has ended."""
        slot = generation.slot
        # The slot may be another generation's by now.
        if not generation.ended or self._live.get(slot.index) is not generation:
            return
        del self._live[slot.index]
        self._overdue.forget(generation)
        self._trace.answered(slot, generation.end_reason)
        # After a stop string, or a client that left, whoever has the baton does not know yet.
        self._slots.cancel(slot)
        self._slots.release(slot, generation.counted_length)

    def _collect(self) -> None:
        if self._slots.num_closing and self._slots.collect():
            self._queue.admit()
        self.check_idle()

    def check_idle(self) -> None:
        """Call ``on_idle``, if there is one, when no request is open."""
        if self.on_idle is not None and not (self._live or len(self._queue)):
            self.on_idle()

    # -- the end -----------------------------------------------------------------------------

    def cancel(self, generation: Generation) -> None:
        """The client is gone."""
        generation.abandon()
        self._settle(generation)
        self._collect()

    def abort(self, generation: Generation) -> None:
        """Have it end where it stands; its client gets what there is, and is told."""
        if self._live.get(generation.slot.index) is generation:
            generation.ask_abort()
            self._slots.cancel(generation.slot)
            self._overdue.from_then(generation, time.monotonic_ns())

    def _cut(self, generation: Generation) -> None:
        """It should have ended, and whoever has the baton did not end it."""
        if self._live.get(generation.slot.index) is not generation:
            return
        word = self._slab.baton[generation.slot.index]
        load_fence()
        if not word & FINISH_MASK:
            word |= Finish.ABORT << FINISH_SHIFT  # as the holder would have it
        self._advance(generation, word, 0, 0)
        if not generation.ended:  # its client reads too slowly to be told
            self._overdue.from_then(generation, time.monotonic_ns())
        self._collect()

    def fail_all(self, error: RequestError) -> None:
        """End every request with ``error``, also one that is still on its way here."""
        self._queue.close(error)
        for generation in tuple(self._live.values()):
            word = self._slab.baton[generation.slot.index]
            load_fence()
            try:
                generation.conclude(word, error)
            except Exception:
                log.exception("a stream failed")
                generation.break_off(error)
            self._settle(generation)
        self._collect()
