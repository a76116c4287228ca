"""The home's side of requests at another host: batons that came to an agent, and what it stores.

As a worker's table, level-triggered: ``sync`` looks at a slot and does what its words say. Nothing
here believes an answer: hop, start, every token, every source and the end are checked, and one that
does not fit changes no word of any row. Knows the slab; no sockets, no policy and no clock but for
times that it passes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from trserve.edge.agent_held import Held
from trserve.edge.answer_checks import end_of, is_known, with_handoff, without_known
from trserve.edge.cloud import STAYS, Answer, Visit
from trserve.edge.records import write_records
from trserve.ipc.baton import (
    BANK_SHIFT,
    HOP_MASK,
    LENGTH_SHIFT,
    OWNER_AND_STATE,
    Finish,
    SlotState,
    hand_over,
    live_of,
    pack,
    unpack,
)
from trserve.ipc.extras import write_extras
from trserve.ipc.fence import load_fence
from trserve.ipc.publish import Outbox
from trserve.ipc.rings import Descriptor, Kind
from trserve.ipc.slab import Slab
from trserve.ipc.tally import TallyWriter
from trserve.params import decode_params

log = logging.getLogger(__name__)


class Verdict(Enum):
    """What became of an answer."""

    TAKEN = auto()
    LATE = auto()
    """It was of another visit, or says what is known."""
    AHEAD = auto()
    """Its visit is the present one, but tokens between the row and it have not come."""
    UNFIT = auto()
    """Its visit is the present one, and what it says cannot be right."""
    APART = auto()
    """Likewise; and the far side goes on from a row that is not this one."""


class AgentTable:
    """The requests of link agent ``index``.

    Args:
        writers: the models that may have written what comes in an answer.
        vocabulary: ids are below it.

    Attributes:
        held: those whose baton the agent has, by generation.
        on_arrival: told of each that comes.
        on_prompt: told of each that may come, as a visit of hop 0.
        on_end: told of each generation that is over, or that nobody wants any more.
        dropped: answers that came too late, twice, or did not fit.
    """

    def __init__(
        self,
        slab: Slab,
        outbox: Outbox,
        index: int,
        writers: Collection[int],
        vocabulary: int,
        tally: TallyWriter,
    ) -> None:
        self._slab = slab
        self._outbox = outbox
        self._index = index
        self._mine = live_of(index)
        self._writers = np.array(sorted(writers), np.uint8)
        self._vocabulary = vocabulary
        self._tally = tally
        self._rows = slab.tokens.view()
        self._rows.flags.writeable = False
        self._closed = list(slab.closed[index])
        self._hops: dict[int, tuple[int, int]] = {}
        self.held: dict[int, Held] = {}
        self.on_arrival: Callable[[Held], None] = _nothing
        self.on_prompt: Callable[[Visit], None] = _nothing
        self.on_end: Callable[[int], None] = _nothing
        self.dropped = 0

    # -- taking in ---------------------------------------------------------------------------

    def take_in(self, descriptor: Descriptor) -> None:
        """Look at what it hints at."""
        if descriptor.kind is Kind.PREFILL:
            self._expect(descriptor.slot, descriptor.gen)
        else:
            self.sync(descriptor.slot, descriptor.gen)

    def rescan(self) -> None:
        """Look at every slot that concerns this agent."""
        slab = self._slab
        for slot in range(slab.layout.slots):
            mine = unpack(slab.baton[slot]).owner == self._index
            if mine or slab.sent[slot] >> self._index & 1:
                self.sync(slot, slab.gen[slot])

    def sync(self, slot: int, gen: int) -> None:
        """Do what the words of ``slot`` say, if ``gen`` is still its use and not closed here."""
        slab = self._slab
        if slab.gen[slot] != gen or self._closed[slot] == gen:
            return
        word = slab.baton[slot]
        load_fence()
        if word & OWNER_AND_STATE == self._mine:
            if self._hops.get(slot, (gen, -1)) < (gen, word & HOP_MASK):
                self._arrive(slot, gen, word)
            elif gen in self.held and slab.cancel[slot] == gen:
                self.finish(self.held[gen], Finish.ABORT)
        elif (state := unpack(word).state) is SlotState.DONE:
            self._close(slot, gen)
        elif state is SlotState.LIVE and slab.cancel[slot] == gen:
            self.on_end(gen)  # its KV there is of no more use; it may still come, and ends then

    def _arrive(self, slot: int, gen: int, word: int) -> None:
        self._hops[slot] = (gen, word & HOP_MASK)
        held = self.held[gen] = Held.of(self._slab, slot, gen, word)
        if self._slab.cancel[slot] == gen:
            self.finish(held, Finish.ABORT)
        else:
            self.on_arrival(held)

    def _expect(self, slot: int, gen: int) -> None:
        slab = self._slab
        if slab.gen[slot] != gen or self._closed[slot] == gen or gen in self.held:
            return
        baton = unpack(slab.baton[slot])
        load_fence()
        if baton.state is SlotState.LIVE and baton.owner != self._index:
            params, length = decode_params(slab.params(slot)), slab.prompt_len[slot]
            row = self._rows[slot, :length]
            limit, left = slab.limit[slot], (0,) * slab.layout.workers
            deadline = params.deadline_ns
            self.on_prompt(Visit(gen, 0, row, length, limit, params, left, deadline_ns=deadline))
        else:
            self.sync(slot, gen)

    def visit_of(self, held: Held) -> Visit:
        """The request as it is to be sent."""
        return Visit(
            session=held.gen,
            hop=held.hop,
            row=self._rows[held.slot, : held.length],
            prompt_len=held.prompt_len,
            limit=held.limit,
            params=held.params,
            left=tuple(words[held.slot] for words in self._slab.left),
            extras=held.extras,
            empty=held.empty and held.length == held.arrival_length,
            deadline_ns=held.params.deadline_ns,
        )

    def over(self) -> list[Held]:
        """Those that somebody cancelled, or whose time is over."""
        if not self.held:
            return []
        now, cancel = time.monotonic_ns(), self._slab.cancel
        return [
            held
            for held in self.held.values()
            if cancel[held.slot] == held.gen or 0 < held.params.deadline_ns <= now
        ]

    # -- answers -----------------------------------------------------------------------------

    def apply(self, answer: Answer, now: float) -> Verdict:
        """Commit what ``answer`` says, if it is for the present visit and can be right."""
        held = self.held.get(answer.session)
        if held is None or answer.hop != held.hop:
            self.dropped += 1
            return Verdict.LATE
        row = self._rows[held.slot, : held.length]
        answer = without_known(answer, row)
        if answer.start != held.length and not answer.unreadable:
            return self._elsewhere(held, answer, row)
        tokens = answer.ids.tolist()
        if (complaint := answer.unreadable or self._complaint(held, answer, tokens)) is not None:
            return self._drop(held, complaint)
        held.since = now
        count, end = end_of(held, tokens)
        self._write(held, answer, count)
        slab = self._slab
        if answer.cached >= 0 and slab.cached[held.slot] < 0:
            slab.cached[held.slot] = min(answer.cached, held.prompt_len)
        reason = end or answer.finish
        goes_on = not reason and answer.destination == STAYS
        if count and (goes_on or reason or count > 1):
            kept = count if goes_on or reason else count - 1
            self._tally.stayed(kept, kept)
        if reason:
            self.finish(held, reason, barred=answer.empty)
        elif goes_on:
            if count:
                self._outbox.store_baton(held.slot, held.word | held.length << LENGTH_SHIFT)
        else:
            self._set_left(held, answer)
            self._tally.left(answer.destination, min(count, 1))
            # Of a visit that was begun anew the far side knows only what came after that.
            empty = answer.empty and held.length == held.arrival_length
            self.hand_over(held, answer.destination, extras=answer.extras, empty=empty)
        return Verdict.TAKEN

    def _elsewhere(self, held: Held, answer: Answer, row: NDArray[np.int32]) -> Verdict:
        """Of an answer to the present visit that does not begin where the row ends."""
        if answer.start > held.length or is_known(answer, row):
            self.dropped += 1
            return Verdict.AHEAD if answer.start > held.length else Verdict.LATE
        self._drop(held, "it contradicts what was answered before")
        # Where nothing was committed yet there is no other row, and who comes with a hop above 0
        # is neither asked by the router where it is to begin, nor has its prompt scored.
        begun = held.hop or held.length > held.prompt_len
        return Verdict.APART if begun else Verdict.UNFIT

    def _drop(self, held: Held, complaint: str) -> Verdict:
        self.dropped += 1
        held.unfit += 1
        log.warning("an answer is dropped: %s", complaint)
        return Verdict.UNFIT

    def _complaint(self, held: Held, answer: Answer, tokens: list[int]) -> str | None:
        """Why nothing of ``answer`` can be taken; None if it can."""
        if len(tokens) > held.limit - held.length:
            return "more tokens than the request may have"
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
            return "an id beyond the vocabulary"
        if len(answer.sources) != len(tokens):
            return "tokens without a source"
        if not np.isin(answer.sources, self._writers).all():
            return "a source that is not at the other side"
        to = answer.destination
        if to != STAYS and (to == self._index or to >= self._slab.layout.workers):
            return f"it is to go to model {to}"
        if answer.finish is Finish.STOP and not (tokens and tokens[-1] in held.stop_ids):
            return "it ends without a token that ends it"
        return None

    def _write(self, held: Held, answer: Answer, count: int) -> None:
        slab, start, end = self._slab, held.length, held.length + count
        slab.tokens[held.slot, start:end] = answer.ids[:count]
        slab.source[held.slot, start:end] = answer.sources[:count]
        if answer.records is not None:
            records = with_handoff(held, answer, answer.records)
            write_records(slab, held.slot, held.params, held.prompt_len, records, end)
        held.length = end

    def _set_left(self, held: Held, answer: Answer) -> None:
        for model, length in enumerate(answer.left):
            if model in self._writers and model != self._index:
                self._slab.left[model][held.slot] = length

    # -- sending out -------------------------------------------------------------------------

    def hand_over(
        self, held: Held, model: int, *, extras: bytes, empty: bool, alone: bool = False
    ) -> None:
        """Give the baton to ``model``; nothing of the slot is touched from here on.

        ``alone``: this is no answer, but the request is taken back.
        """
        slab, slot, hop = self._slab, held.slot, held.hop + 1
        self._write_extras(held, extras, empty=empty, alone=alone)
        slab.sent[slot] |= 1 << model
        slab.left[self._index][slot] = held.length
        word = hand_over(held.word | held.length << LENGTH_SHIFT, model, hop)
        self._outbox.store_baton(slot, word)
        self._outbox.send(model, Descriptor(Kind.RUN, slot, held.gen, hop))
        del self.held[held.gen]

    def begin_anew(self, held: Held) -> None:
        """Make the visit another one, so that what the far side still says of this one is late.

        As if the agent had handed the request to itself; what came with it stays in its bank. The
        caller publishes it before it tells the far side: a successor must not know a smaller hop.
        """
        word = hand_over(held.word, self._index, held.hop + 1)
        held.word = word ^ 1 << BANK_SHIFT
        self._hops[held.slot] = (held.gen, held.hop)
        self._outbox.store_baton(held.slot, held.word | held.length << LENGTH_SHIFT)

    def finish(self, held: Held, reason: Finish, *, barred: bool = False) -> None:
        """End a request, and tell every worker that has heard of it."""
        slab, slot, gen = self._slab, held.slot, held.gen
        self._write_extras(held, b"", empty=barred and reason is Finish.NUMERIC_ERROR)
        bank = held.word >> BANK_SHIFT & 1 ^ 1
        word = pack(held.length, self._index, SlotState.DONE, reason, bank, held.hop)
        self._outbox.store_baton(slot, word)
        sent = slab.sent[slot]
        for worker in range(slab.layout.workers):
            if sent >> worker & 1 and worker != self._index:
                self._outbox.send(worker, Descriptor(Kind.DONE, slot, gen, held.hop))
        self._close(slot, gen)

    def _write_extras(self, held: Held, extras: bytes, *, empty: bool, alone: bool = False) -> None:
        now, pending = time.monotonic_ns(), held.pending_ns
        if self._index:
            pending += now - held.stored_ns
        bank = self._slab.extras(held.slot, held.word >> BANK_SHIFT & 1 ^ 1)
        write_extras(bank, now, pending, empty, held.length, extras, alone)

    def _close(self, slot: int, gen: int) -> None:
        self.held.pop(gen, None)
        self._closed[slot] = gen
        self._outbox.close(slot, gen)
        self.on_end(gen)


def _nothing(_: object) -> None:
    """Nobody wants to know."""
