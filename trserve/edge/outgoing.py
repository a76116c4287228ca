"""What of each session the far side has, so that only the rest is sent. Knows no sockets.

The far side's row grows by what is sent and by what it writes itself; the latter counts only as far
as it stands in the home's row as well, because an answer may have come too late to be taken.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trserve.edge.cloud import Answer, Visit
from trserve.edge.frames import Contact, Handoff, Need

_NS_PER_MS: Final = 1_000_000


class Outgoing:
    """One session.

    Attributes:
        visit: what is to be sent, or was last.
        sent: tokens of the row that were sent on this connection or confirmed before it.
        acknowledged: those that certainly arrived.
        known: whether the parameters were sent, likewise.
    """

    __slots__ = (
        "_answers",
        "_began",
        "_known_acknowledged",
        "acknowledged",
        "known",
        "sent",
        "visit",
    )

    def __init__(self) -> None:
        self.visit: Visit | None = None
        self.sent = 0
        self.acknowledged = 0
        self.known = False
        self._known_acknowledged = False
        self._began = 0
        self._answers: deque[tuple[int, NDArray[np.int32]]] = deque()

    def handoff(self, visit: Visit, blob: bytes, *, early: bool = False) -> Handoff:
        """What has to be sent for ``visit``; ``blob`` are its parameters."""
        self._count_answers(visit.row)
        length = visit.prompt_len if early else len(visit.row)
        start = min(self.sent, length) if self.known else 0
        contact = None if self.known else Contact(visit.prompt_len, visit.limit, blob)
        return Handoff(
            visit.session,
            visit.hop,
            start,
            visit.row[start:length],
            visit.left,
            visit.extras,
            visit.empty,
            _ms_left(visit.deadline_ns),
            contact,
        )

    def was_sent(self, handoff: Handoff) -> None:
        """It is on its way."""
        self._began = handoff.start
        self.sent = handoff.start + len(handoff.ids)
        self.known = True

    def awaits(self, answer: Answer) -> bool:
        """Whether ``answer`` is of the visit that was sent last."""
        return self.visit is not None and answer.hop == self.visit.hop

    def was_answered(self, answer: Answer) -> None:
        """The far side has what was sent for that visit, and what it wrote."""
        if not self.awaits(answer):
            return
        self.acknowledged, self._known_acknowledged = self.sent, self.known
        if len(answer.ids):
            self._answers.append((answer.start, answer.ids))

    def _count_answers(self, row: NDArray[np.int32]) -> None:
        answers, self._answers = self._answers, deque()
        for start, ids in answers:
            end = start + len(ids)
            fits = start <= self.sent < end <= len(row)
            if not fits or not np.array_equal(row[self.sent : end], ids[self.sent - start :]):
                return
            self.sent = self.acknowledged = end

    def is_needed(self, need: Need) -> bool:
        """The far side has only ``need.have`` tokens; whether its visit is to be sent again.

        It is not if another came after it, or if it was sent from there on meanwhile. It may be no
        news that the tokens are missing: two visits may have been on their way.
        """
        if self.known and need.have < self.sent:
            self.forget(need.have)
        visit = self.visit
        return visit is not None and visit.hop == need.hop and need.have < self._began

    def forget(self, have: int = 0) -> None:
        """Of all that was sent, ``have`` tokens are left."""
        self.sent = self.acknowledged = have
        self.known = self._known_acknowledged = have > 0
        self._answers.clear()

    def reconnect(self) -> None:
        """What was under way when the connection was lost may have been lost with it."""
        self.sent, self.known = self.acknowledged, self._known_acknowledged
        self.visit = None


def _ms_left(deadline_ns: int) -> int:
    """1 at least; 0 for no deadline."""
    if not deadline_ns:
        return 0
    return max(1, (deadline_ns - time.monotonic_ns()) // _NS_PER_MS)
