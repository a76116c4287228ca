"""Visits that a server is too busy for, and when each is to be asked for again.

Such a refusal says nothing of calls that the server has taken: while any is under way a place will
come free, and the others wait for it, each for longer every time. Where none is, the server is busy
for somebody else's sake, and after a few tries, or if it asks for a long pause, it counts as one
that cannot be reached. Knows numbers of sessions and times; no calls.
"""

from __future__ import annotations

import math
from typing import Final

FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 5.0
LONGEST_SAID_S: Final = 30.0
"""Of the pauses that a server itself asks for."""

MOST_IN_VAIN: Final = 3


class Busy:
    """Those that wait, by session."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[int, float]] = {}
        self._in_vain = 0

    def put_off(self, session: int, said_s: float, now: float, *, alone: bool) -> bool:
        """Whether the visit is worth another try, which is due later then.

        Args:
            said_s: the pause that the server asked for.
            alone: whether no other call is under way.
        """
        self._in_vain += alone
        if alone and (self._in_vain > MOST_IN_VAIN or said_s > LONGEST_PAUSE_S):
            return False
        times = self._waiting.get(session, (0, 0.0))[0]
        own_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(times, 16))
        pause_s = max(own_s, min(LONGEST_SAID_S, said_s))
        self._waiting[session] = times + 1, now + pause_s
        return True

    def took_one(self) -> None:
        """The server has answered a visit."""
        self._in_vain = 0

    def forget(self, session: int) -> None:
        """It waits no more."""
        self._waiting.pop(session, None)

    def due(self, now: float) -> list[int]:
        """Those whose time has come; each is under way until it is put off again, or forgotten."""
        found = [session for session, (_, at) in self._waiting.items() if at <= now]
        for session in found:
            self._waiting[session] = self._waiting[session][0], math.inf
        return found

    def due_s(self, now: float) -> float:
        """Seconds until there is one; infinite for never."""
        return max(0.0, min((at for _, at in self._waiting.values()), default=math.inf) - now)
