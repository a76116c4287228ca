"""Other hosts' requests at an edge port: taken in, handed to the models here, answered.

One session is one request at its home. It has a slot here from its first contact until it ends, is
idle for too long, or another needs the slot more; then the home is asked for the tokens again. What
is said of a session twice, too late or out of order changes nothing: ``hop`` orders it, and the row
is compared with what is already there. Knows slots and frames; no sockets and no keys.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from trserve.edge.frames import Handoff, Need, encode_answer, encode_need
from trserve.edge.params_check import complaint, without_unknown_ends
from trserve.edge.port_answers import answer_of, refusal
from trserve.edge.port_session import Key, Session
from trserve.edge.port_slots import PortSlots
from trserve.edge.port_unsaid import Unsaid
from trserve.edge.wire import FrameError, UnfitParamsError
from trserve.gateway.slots import Slot
from trserve.ipc.baton import SlotState, unpack
from trserve.ipc.fence import load_fence
from trserve.ipc.layout import PARAMS_BYTES
from trserve.ipc.slab import Slab, WorkerStatus
from trserve.params import decode_params, encode_params

log = logging.getLogger(__name__)
IDLE_S: Final = 600.0
"""How long the KV of a request is kept for a home that says nothing of it."""

MAX_SESSIONS: Final = 4096
MAX_WAITING_TOKENS: Final = 2**25
"""Of the rows that are kept here, 128 MiB of them, for want of a slot."""

_NS_PER_MS: Final = 1_000_000
_NO_IDS: Final = np.zeros(0, np.int32)


class PortSessions:
    """All of them, the one least recently used first.

    Args:
        send: sends a frame to whoever dialled; False if it cannot be sent now.
        vocabulary: ids are below it.
        early_prefill: whether prompts may be computed before their requests come.

    Attributes:
        grammars: whether there is here what follows them.
        is_here: tells of somebody who dialled whether they can be reached now.
        stale: what came too late or twice and changed nothing.
        evicted: sessions that had to give up their slot.
    """

    def __init__(
        self,
        slab: Slab,
        slots: PortSlots,
        send: Callable[[bytes, bytes], bool],
        *,
        vocabulary: int,
        early_prefill: bool = True,
    ) -> None:
        self._slab = slab
        self._slots = slots
        self._send = send
        self._vocabulary = vocabulary
        self._early_prefill = early_prefill
        self.grammars = True
        self.is_here: Callable[[bytes], bool] = bool
        self._sessions: dict[Key, Session] = {}
        self._away: dict[Key, Session] = {}
        self._waiting: dict[Key, Session] = {}
        self._unsaid = Unsaid(send)
        self._unsettled: set[Key] = set()
        self.stale = self.evicted = 0

    @property
    def num_away(self) -> int:
        """Sessions whose visit is under way."""
        return len(self._away)

    @property
    def num_sessions(self) -> int:
        """All that are known."""
        return len(self._sessions)

    def peers(self) -> set[bytes]:
        """Who has sessions."""
        return {peer for peer, _ in self._sessions}

    # -- what comes --------------------------------------------------------------------------

    def on_handoff(self, peer: bytes, model: int, handoff: Handoff, now: float) -> None:
        """A visit, or the same again. FrameError for one that contradicts itself."""
        key, end = (peer, handoff.session), handoff.start + len(handoff.ids)
        self._settle(key)
        self._unsettled.add(key)
        self._unsaid.forget(key)
        if key not in self._sessions and not self._has_room():
            log.error("a request of another host ends: %d others are under way", MAX_SESSIONS)
            self._refuse(key, handoff.hop, end)
            return
        try:
            session = self._sessions.get(key) or self._meet(key, model, handoff)
        except FrameError:  # else it would be waited for
            self._refuse(key, handoff.hop, end)
            raise
        if session is None:
            self._need(key, handoff.hop, 0)
            return
        if not session.contact.prompt_len <= end <= session.contact.limit:
            raise FrameError("a row that is shorter than its prompt, or too long")
        self._touch(session, now)
        if handoff.hop < session.hop:
            self.stale += 1
        elif handoff.hop == session.hop and session.slot is not None:
            self._again(session, session.slot, handoff)
        elif handoff.hop > session.hop or not session.waits_with(end):
            self._visit(session, handoff)

    def on_prefill(self, peer: bytes, model: int, handoff: Handoff, now: float) -> None:
        """A request that may come: its prompt is computed if there is a slot to spare."""
        key = (peer, handoff.session)
        if key in self._sessions or len(self._sessions) >= MAX_SESSIONS or not self._early_prefill:
            return
        session = self._meet(key, model, handoff)
        if session is None or session.params.scores_prompt or not self._can_follow(session):
            return
        self._unsettled.add(key)
        if len(handoff.ids) != session.contact.prompt_len:
            raise FrameError("a prompt of another length")
        session.slot = self._slots.open(
            session.opening(handoff, handoff.ids)._replace(
                owner=self._slots.host, hop=0, early=model, scored=True
            )
        )
        if session.slot is not None:
            session.told = len(handoff.ids)
            self._sessions[key] = session
            self._touch(session, now)

    def on_end(self, peer: bytes, number: int) -> None:
        """Its home is done with it."""
        self._settle((peer, number))
        self._unsaid.forget((peer, number))
        session = self._sessions.get((peer, number))
        if session is not None:
            self._drop(session)

    def _has_room(self) -> bool:
        """For one more session, for which the one least recently used may be forgotten.

        To ask for tokens that there is no room for would be asking for ever.
        """
        if len(self._sessions) < MAX_SESSIONS:
            return True
        idle = next((s for s in self._sessions.values() if not s.away), None)
        if idle is not None:
            self.evicted += 1
            self._drop(idle)
        return idle is not None

    def _meet(self, key: Key, model: int, handoff: Handoff) -> Session | None:
        """A session that is new; None if what came is not its beginning."""
        contact = handoff.contact
        if contact is None or handoff.start:
            return None
        if not contact.prompt_len <= len(handoff.ids) <= contact.limit:
            raise FrameError("a row that is shorter than its prompt, or too long")
        try:
            params = decode_params(contact.blob)
        except (msgspec.DecodeError, ValueError) as error:
            raise FrameError(f"parameters that are none: {error}") from None
        deadline = time.monotonic_ns() + handoff.left_ms * _NS_PER_MS if handoff.left_ms else 0
        if why := complaint(params, self._vocabulary):
            raise UnfitParamsError(f"parameters with {why}")
        params = without_unknown_ends(params, self._vocabulary)
        params = msgspec.structs.replace(params, deadline_ns=deadline)
        blob = encode_params(params)
        if len(blob) > PARAMS_BYTES:
            raise UnfitParamsError("parameters that are too long")
        return Session(key, model, contact._replace(blob=blob), params)

    def _settle(self, key: Key) -> None:
        """What was said of it a moment ago must be in the slab before it is looked at again."""
        if key in self._unsettled:
            self._slots.flush()
            self._unsettled.clear()

    def _touch(self, session: Session, now: float) -> None:
        session.used_s = now
        self._sessions.pop(session.key, None)
        self._sessions[session.key] = session

    def _need(self, key: Key, hop: int, have: int) -> None:
        """Ask for tokens."""
        self._unsaid.say(key, encode_need(Need(key[1], hop, have)))

    def _refuse(self, key: Key, hop: int, end: int) -> None:
        """Say that a visit with a row of ``end`` tokens is over, and its request with it."""
        self._unsaid.say(key, encode_answer(refusal(key[1], hop, end)))

    # -- visits ------------------------------------------------------------------------------

    def _again(self, session: Session, slot: Slot, handoff: Handoff) -> None:
        """A visit that is known: its home may have missed what was answered."""
        row, length = self._slots.row(slot), handoff.start + len(handoff.ids)
        ids = row[handoff.start : length]
        if length > len(row) or not np.array_equal(ids, handoff.ids):
            self.stale += 1
            return
        session.told, session.seen = length, -1
        session.away = True
        self._away[session.key] = session

    def _visit(self, session: Session, handoff: Handoff) -> None:
        slot, start, length = session.slot, handoff.start, handoff.start + len(handoff.ids)
        row = _NO_IDS if slot is None else self._slots.row(slot)
        if start > len(row):
            self._need(session.key, handoff.hop, 0 if slot is None else len(row))
            return
        session.hop, session.began_ns = handoff.hop, time.monotonic_ns()
        session.told, session.away = length, True
        session.pending = None
        if not self._can_follow(session):
            self._end(session, "its grammar needs llguidance: pip install 'trserve[structured]'")
            return
        same = np.array_equal(row[start:length], handoff.ids[: len(row) - start])
        if slot is not None and same and length >= len(row) and self._slots.is_home(slot):
            self._slots.hand_over(
                slot,
                handoff.ids[len(row) - start :],
                owner=session.model,
                hop=handoff.hop,
                left=handoff.left,
                extras=handoff.extras,
                empty=handoff.empty,
            )
            session.seen = self._slab.baton[slot.index]
            self._away[session.key] = session
            return
        # New here, or the home has gone on differently: the KV of what is common is in the cache.
        whole = np.concatenate((row[:start], handoff.ids))
        if slot is not None:
            self._slots.end(slot)
            session.slot = None
        session.pending = handoff._replace(start=0, ids=whole)
        if not self._open(session) and self._too_many_wait():
            self._end(session, "too many wait for one of --edge-sessions")

    def _too_many_wait(self) -> bool:
        rows = [s.pending.ids for s in self._waiting.values() if s.pending is not None]
        return sum(map(len, rows)) > MAX_WAITING_TOKENS

    def _can_follow(self, session: Session) -> bool:
        return self.grammars or not session.params.grammar

    def _open(self, session: Session) -> bool:
        handoff = session.pending
        assert handoff is not None
        opening = session.opening(handoff, handoff.ids)
        session.slot = self._slots.open(opening)
        if session.slot is None:
            self._waiting[session.key] = session
            if opening.pages > self._slots.most_pages:
                self._end(session, "--edge-sessions leaves too little for log probabilities")
            return False
        session.pending = None
        session.seen = -1
        self._waiting.pop(session.key, None)
        self._away[session.key] = session
        return True

    def _end(self, session: Session, why: str) -> None:
        log.error("a request of another host ends: %s", why)
        self._refuse(session.key, session.hop, session.told)
        self._drop(session)

    def _make_room(self) -> None:
        """Have the sessions least recently used give up their slots, one for each that waits.

        Their homes are asked for the tokens again when they come.
        """
        missing = len(self._waiting) - self._slots.num_closing
        for session in tuple(self._sessions.values()):
            if missing <= 0:
                return
            slot = session.slot
            awaited = self.is_here(session.key[0]) or not slot or self._slots.is_lent(slot)
            if slot is not None and not (session.away and awaited):
                self.evicted += 1
                missing -= 1
                self._drop(session)

    def _drop(self, session: Session) -> None:
        for sessions in (self._sessions, self._away, self._waiting):
            sessions.pop(session.key, None)
        if session.slot is not None:
            self._slots.end(session.slot)

    # -- answers -----------------------------------------------------------------------------

    def look(self) -> None:
        """Answer what can be answered; give slots that came free to whoever waits for one.

        Before it the caller publishes what came.
        """
        self._unsettled.clear()
        self._unsaid.retry(self.is_here)
        for session in [each for each in self._away.values() if self.is_here(each.key[0])]:
            slot = session.slot
            if slot is not None and (word := self._slab.baton[slot.index]) != session.seen:
                load_fence()
                self._answer(session, slot, word)
        while self._waiting and self._open(next(iter(self._waiting.values()))):
            pass
        if self._waiting:
            self._make_room()

    def _answer(self, session: Session, slot: Slot, word: int) -> None:
        baton = unpack(word)
        over, back = baton.state is SlotState.DONE, self._slots.is_mine(word)
        if back and self._slab.workers[session.model].get("status") == WorkerStatus.LOST:
            return  # it is nobody's answer; the home is told that the model is lost
        if baton.length > session.told or over or back:
            answer = answer_of(self._slab, session, slot, baton, back=back)
            if not self._send(session.key[0], encode_answer(answer)):
                return
            self._touch(session, time.monotonic())
        session.told, session.seen = baton.length, word
        if over or back:
            session.away = False
            self._away.pop(session.key, None)

    # -- from time to time -------------------------------------------------------------------

    def tend(self, now: float) -> None:
        """Let go of what nobody has spoken of for long."""
        for session in tuple(self._sessions.values()):
            if now - session.used_s < IDLE_S:
                return  # they stand in the order of their use
            # However long it takes: an answer that is still to be made will be waited for.
            if not session.away or (session.slot and not self._slots.is_lent(session.slot)):
                self._drop(session)
