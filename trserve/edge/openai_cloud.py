"""The far side of a link agent where it is any server that takes token ids: vLLM, SGLang, trserve.

One HTTP call a visit, with the whole row in it (the server's prefix cache finds what it knows), so
it is slower than an edge port, and the router is not asked there: a request comes back after its
``visit_tokens`` tokens. Only ids cross, both ways. What the server refuses of one request alone, or
fails at again after a probe, that request writes at home; a visit that it is too busy for is asked
for again; anything else makes the model unreachable until a probe succeeds.

Knows visits and answers; HTTP is ``openai_calls``'s, JSON ``openai_wire``'s, and whose fault a
failure is ``openai_failures``'s.
"""

from __future__ import annotations

import logging
import math
import struct
import time
from itertools import takewhile
from typing import Any, Final, NamedTuple

import numpy as np

from trserve.edge.cloud import STAYS, Answer, Visit
from trserve.edge.facts import RemoteFacts
from trserve.edge.link_counts import LinkCounts
from trserve.edge.openai_busy import FIRST_PAUSE_S, LONGEST_PAUSE_S, Busy
from trserve.edge.openai_calls import Calls, Outcome, Server
from trserve.edge.openai_facts import MODELS_PATH, PROBE_TIMEOUT_S, read_served
from trserve.edge.openai_failures import (
    Failures,
    is_for_good,
    is_refusal,
    is_too_busy,
    may_be_own,
    problem_of,
)
from trserve.edge.openai_records import records_of
from trserve.edge.openai_setup import VISIT_TOKENS
from trserve.edge.openai_wire import Dialect, WireError, cut_at_end, read_answer, request_body
from trserve.ipc.baton import Finish

log = logging.getLogger(__name__)
CALL_TIMEOUT_S: Final = 120.0
PINNED_TOKENS: Final = 16
"""Of one call for a request that this model writes alone: its stream moves that often."""

_LENGTH: Final = struct.Struct("<i")
"""What one-way routers keep on a hop: the row's length with which the request arrives."""


class _Call(NamedTuple):
    """A visit under way: ``number`` of its call, None until it can be made."""

    visit: Visit
    number: int | None
    began_ns: int


class OpenAiCloud:
    """Implements :class:`~trserve.edge.cloud.Cloud`.

    Args:
        url: of the server, with or without ``/v1``.
        index: of the model that it has, among the home's.
        model: what the home calls it. Where the server serves one of that name it is the one, else
            the one that the server names first.
        values: the home's values of its router's parameters.
        key: sent as a bearer token; empty for none.
        vocabulary: ids are below it.

    Attributes:
        counts: bytes and calls, as of a link.
    """

    def __init__(
        self,
        url: str,
        *,
        index: int = 1,
        model: str = "",
        values: dict[str, float] | None = None,
        key: str = "",
        vocabulary: int = 2**31,
    ) -> None:
        self._server = Server(url)
        self._calls = Calls(self._server, {"Authorization": f"Bearer {key}"} if key else {})
        self._index = index
        self._vocabulary = vocabulary
        self._wanted, self._model = model, model
        self._values = dict(values or {})
        self._dialect = Dialect.COMPLETIONS
        self._facts: RemoteFacts | None = None
        self._under_way: dict[int, _Call] = {}
        self._session_of: dict[int, int] = {}
        self._busy = Busy()
        self._failures = Failures()
        self._probe: int | None = None
        self._probe_at = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._connected = self._refused = self._answered = False
        self._returned: list[Answer] = []
        self._reason = f"{self._server.url} was not reached yet"
        self._connections = 0
        self.counts = LinkCounts()

    # -- what the agent sees -----------------------------------------------------------------

    @property
    def fd(self) -> int:
        """Readable when an answer has come."""
        return self._calls.fd

    @property
    def connected(self) -> bool:
        """Whether visits are taken."""
        return self._connected

    @property
    def reason(self) -> str:
        """Why not."""
        return self._reason

    @property
    def refused(self) -> bool:
        """Whether the server said so."""
        return self._refused

    @property
    def connections(self) -> int:
        """How often it could be reached again."""
        return self._connections

    def facts(self) -> RemoteFacts | None:
        """What the server has said of its model."""
        return self._facts

    def configure(self, values: dict[str, float]) -> None:
        """Other values of the home's router."""
        self._values |= values

    def start(self, now: float) -> None:
        """Ask what it serves."""
        self._probe = self._calls.begin(MODELS_PATH, None, PROBE_TIMEOUT_S)

    def visit(self, visit: Visit) -> None:
        """Call, unless this visit's call is under way."""
        known = self._under_way.get(visit.session)
        if known is not None and known.visit.hop == visit.hop:
            return
        self._cancel(visit.session)
        call = _Call(visit, None, time.monotonic_ns())
        if visit.params.grammar:
            self._returned.append(self._nothing(call, "it is to follow a grammar"))
            self._calls.wake()
        elif self._connected:
            self._call(visit, call.began_ns)

    def prefill(self, visit: Visit) -> None:
        """Nothing: such a server computes a prompt only to write behind it."""

    def forget(self, session: int) -> None:
        """Nothing: every call brings the whole row."""

    def end(self, session: int) -> None:
        """Nothing of it is kept here either."""
        self._failures.forget(session)
        self._cancel(session)

    def _cancel(self, session: int) -> None:
        """Its call is of no use, if one is under way."""
        self._busy.forget(session)
        known = self._under_way.pop(session, None)
        if known is not None and known.number is not None:
            self._session_of.pop(known.number, None)
            self._calls.cancel(known.number)

    def poll(self, now: float) -> list[Answer]:
        """Take in what has come; probe when it is time."""
        answers, self._returned = self._returned, []
        for outcome in self._calls.outcomes():
            if outcome.number == self._probe:
                self._probe = None
                self._take_probe(outcome, now)
            elif (session := self._session_of.pop(outcome.number, None)) is not None:
                answers += self._take(self._under_way.pop(session), outcome, now)
        for session in self._busy.due(now):
            call = self._under_way[session]
            self._call(call.visit, call.began_ns)
        if not self._connected and self._probe is None and now >= self._probe_at:
            self.start(now)
        return answers

    def due_s(self, now: float) -> float:
        """Seconds until a call has run out of time, is to be repeated, or a probe is to be made."""
        due = min(CALL_TIMEOUT_S, self._calls.due_s(), self._busy.due_s(now))
        if self._connected or self._probe is not None:
            return due
        return max(0.0, min(due, self._probe_at - now))

    def close(self) -> None:
        """Cancel everything."""
        self._calls.close()

    # -- probes ------------------------------------------------------------------------------

    def _take_probe(self, outcome: Outcome, now: float) -> None:
        if problem := problem_of(outcome):
            self._lose(problem, now, refused=is_for_good(outcome))
            return
        try:
            served = read_served(outcome.body, self._wanted)
        except WireError as error:
            self._lose(str(error), now)
            return
        if served is None:
            self._lose("serves no model", now, refused=True)
            return
        self._model, self._dialect, self._facts = served
        self._connected, self._refused = True, False
        self._connections += 1
        log.info("%s serves %s", self._server.url, self._model)

    def _lose(self, problem: str, now: float, *, refused: bool = False) -> None:
        """The model cannot be reached; visits under way are given again once it can be."""
        reason = f"{self._server.url} {problem}" if refused else f"{self._server.url}: {problem}"
        if self._connected or reason != self._reason:
            log.warning("%s", reason)
        self._connected, self._reason, self._refused = False, reason, refused
        for session in list(self._under_way):
            self._cancel(session)
        self._probe_at = now + self._pause_s
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)

    # -- calls -------------------------------------------------------------------------------

    def _call(self, visit: Visit, began_ns: int) -> None:
        tokens = max(1, min(self._tokens(visit), visit.limit - len(visit.row)))
        body = request_body(self._dialect, visit, self._model, tokens)
        until = visit.deadline_ns / 1e9 if visit.deadline_ns else math.inf
        number = self._calls.begin(self._dialect.value, body, CALL_TIMEOUT_S, until)
        self.counts.handoffs += 1
        self.counts.handoff_bytes += len(body)
        self._session_of[number] = visit.session
        self._under_way[visit.session] = _Call(visit, number, began_ns)

    def _tokens(self, visit: Visit) -> int:
        if visit.params.pinned:
            return PINNED_TOKENS
        given = visit.params.router.get(VISIT_TOKENS, self._values.get(VISIT_TOKENS, 1.0))
        return int(np.ceil(given))

    def _take(self, call: _Call, outcome: Outcome, now: float) -> list[Answer]:
        """The answer of a call that is over."""
        if self._is_put_off(call, outcome, now):
            return []
        self._busy.forget(call.visit.session)
        if self._is_of_itself(call, outcome):
            return []
        if problem := problem_of(outcome):
            if self._is_its_own(call, outcome):
                return [self._nothing(call, problem)]
            self._lose(problem, now, refused=is_for_good(outcome) or is_refusal(outcome))
            return []
        try:
            said, ids = read_answer(self._dialect, outcome.body)
        except WireError as error:
            self._lose(f"is no such server: {error}", now, refused=True)
            return []
        self._answered, self._pause_s = True, FIRST_PAUSE_S
        self._busy.took_one()
        self._failures.forget(call.visit.session)
        self.counts.answers += 1
        self.counts.answer_bytes += len(outcome.body)
        # A model may have more rows than its tokenizer has ids: what it writes then is no text.
        known = list(takewhile(lambda token: token < self._vocabulary, ids))
        if not known:
            why = f"an id beyond the vocabulary ({ids[0]})" if ids else "an answer without tokens"
            return [self._nothing(call, why)]
        return [self._answer(call, said, known)]

    def _is_put_off(self, call: _Call, outcome: Outcome, now: float) -> bool:
        """Whether the server was only too busy for it, and is asked again later."""
        said_s, session = outcome.retry_after_s, call.visit.session
        if not is_too_busy(outcome):
            return False
        if not self._busy.put_off(session, said_s or 0.0, now, alone=not self._session_of):
            return False
        self._under_way[session] = call._replace(number=None)
        return True

    def _is_of_itself(self, call: _Call, outcome: Outcome) -> bool:
        """Whether it had less time than a call has, which is no reason to end the others."""
        late = 0 < call.visit.deadline_ns <= time.monotonic_ns()
        return late and not outcome.status and bool(self._session_of)

    def _is_its_own(self, call: _Call, outcome: Outcome) -> bool:
        """Whether the server failed because of what this visit asks for."""
        # The first refusal of all may be of whatever is asked; others under way will tell.
        if is_refusal(outcome) and (self._answered or self._under_way):
            return True
        session, hop, answers = call.visit.session, call.visit.hop, self.counts.answers
        return may_be_own(outcome) and self._failures.is_own(session, hop, answers, self._under_way)

    def _answer(self, call: _Call, said: Any, written: list[int]) -> Answer:
        visit = call.visit
        ids, finish = cut_at_end(written, visit, visit.params.sampling)
        end = len(visit.row) + len(ids)
        stays = visit.params.pinned and finish is Finish.NONE
        if stays:
            row = np.concatenate((visit.row, np.array(ids, np.int32)))
            self._call(visit._replace(row=row), call.began_ns)
        return Answer(
            session=visit.session,
            hop=visit.hop,
            start=len(visit.row),
            ids=np.array(ids, np.int32),
            sources=np.full(len(ids), self._index, np.uint8),
            destination=STAYS if stays else 0,
            finish=finish,
            extras=_LENGTH.pack(end),
            remote_ns=time.monotonic_ns() - call.began_ns,
            left=tuple(end if i == self._index else n for i, n in enumerate(visit.left)),
            records=records_of(self._dialect, said, ids, len(visit.row), visit.params),
        )

    def _nothing(self, call: _Call, problem: str) -> Answer:
        """Back home with nothing written: the model there writes the token itself.

        A request that may be written here alone ends.
        """
        log.warning("%s: a visit ends without a token: %s", self._server.url, problem)
        visit = call.visit
        return Answer(
            session=visit.session,
            hop=visit.hop,
            start=len(visit.row),
            ids=np.empty(0, np.int32),
            sources=np.empty(0, np.uint8),
            destination=0,
            finish=Finish.WORKER_LOST if visit.params.pinned else Finish.NONE,
            extras=_LENGTH.pack(len(visit.row)),
            empty=True,
            remote_ns=time.monotonic_ns() - call.began_ns,
        )
