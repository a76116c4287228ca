"""When a worker that died is started again, and when it is given up. Pure; knows no process.

The third death within a minute is one too many, whatever the worker does in between; only time in
which it could serve counts, so that one which loads slowly is given up as well. A death that is
explained by a request does not count against the worker: it died in the step of one that ends the
next worker too, and is then ended itself; or it computed early the prompt of one that another
worker writes, which nobody does again. A worker that serves nobody between such deaths dies of
something else.
"""

from __future__ import annotations

from collections.abc import Set
from enum import Enum, auto
from typing import Final, NamedTuple

FAIL: Final = "fail"
DEGRADE: Final = "degrade"
WAIT: Final = "wait"
ON_PEER_LOSS: Final = (FAIL, DEGRADE, WAIT)
"""What ``--on-peer-loss`` may say; the first is the default."""

MOST_DEATHS: Final = 3
MOST_EXCUSES: Final = 3
WITHIN_S: Final = 60.0
LONGEST_PAUSE_S: Final = 32.0

Use = tuple[int, int]
"""A slot and its generation: one request."""


class Verdict(Enum):
    """What becomes of a worker that died."""

    RESTART = auto()
    GIVE_UP = auto()  # the others go on without it
    END_SERVER = auto()


WHEN_TOO_MANY: Final = {
    FAIL: Verdict.END_SERVER,
    DEGRADE: Verdict.GIVE_UP,
    WAIT: Verdict.RESTART,
}


class Decision(NamedTuple):
    """A verdict, and how long to wait before it is carried out."""

    verdict: Verdict
    pause_s: float = 0.0


class _Death(NamedTuple):
    at_s: float
    in_step: Set[Use]


class WorkerDeaths:
    """The deaths of one worker that count."""

    def __init__(self, on_peer_loss: str) -> None:
        self._when_too_many = WHEN_TOO_MANY[on_peer_loss]
        self._deaths: list[_Death] = []
        self._down_since_s: float | None = None
        self._down_s = 0.0  # the sum of all times in which it could not serve
        self._served = self._excuses = 0

    def loaded(self, now_s: float) -> None:
        """A successor can serve: from now on its deaths grow old."""
        self._away_until(now_s)
        self._down_since_s = None

    def _away_until(self, now_s: float) -> None:
        if self._down_since_s is not None:
            self._down_s += max(0.0, now_s - self._down_since_s)

    def note(
        self,
        now_s: float,
        *,
        served: int = 0,
        in_step: Set[Use] = frozenset(),
        poison: Set[Use] = frozenset(),
        early: Set[Use] = frozenset(),
    ) -> Decision:
        """A death: what is to follow.

        Args:
            now_s: seconds on any clock that does not jump.
            served: how often it has had something for a request, in all of its lives.
            in_step: the requests of the step that it died in.
            poison: those of them that are found to end workers.
            early: the requests of others whose prompt it computed when it died.
        """
        self._away_until(now_s)
        self._down_since_s = now_s
        if not self._is_excused(served, explained=bool(poison or early)):
            poison = early = frozenset()
        if early:
            return Decision(Verdict.RESTART)
        lived_s = now_s - self._down_s
        self._deaths.append(_Death(lived_s, in_step))
        self._deaths = [
            death
            for death in self._deaths
            if lived_s - death.at_s < WITHIN_S and not death.in_step & poison
        ]
        excess = len(self._deaths) - MOST_DEATHS
        if excess < 0:
            return Decision(Verdict.RESTART)
        if self._when_too_many is Verdict.RESTART:
            return Decision(Verdict.RESTART, min(2.0 ** min(excess, 16), LONGEST_PAUSE_S))
        return Decision(self._when_too_many)

    def _is_excused(self, served: int, *, explained: bool) -> bool:
        """Whether a request may explain a death: not the fourth of those between which nobody was
        served, as then it is no request's fault."""
        if served != self._served:
            self._served, self._excuses = served, 0
        self._excuses += explained
        return explained and self._excuses <= MOST_EXCUSES
