"""When a worker that died is started again, and when it is given up. Pure; knows no process.

The third death within a minute is one too many, whatever the worker does in between; a death while
a successor still loads does not grow old before one has loaded. A death that is explained by a
request does not count against the worker: it died in the step of one that ends the next worker too,
and is then ended itself; or it computed early the prompt of one that another worker writes, which
nobody does again.
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
    loading: bool
    in_step: Set[Use]


class WorkerDeaths:
    """The deaths of one worker that count."""

    def __init__(self, on_peer_loss: str) -> None:
        self._when_too_many = WHEN_TOO_MANY[on_peer_loss]
        self._deaths: list[_Death] = []

    def loaded(self) -> None:
        """A successor can serve: from now on the starts that failed grow old like other deaths."""
        self._deaths = [death._replace(loading=False) for death in self._deaths]

    def note(
        self,
        now_s: float,
        *,
        loading: bool = False,
        in_step: Set[Use] = frozenset(),
        poison: Set[Use] = frozenset(),
        early: Set[Use] = frozenset(),
    ) -> Decision:
        """A death: what is to follow.

        Args:
            now_s: seconds on any clock that does not jump.
            loading: whether it died before it could serve.
            in_step: the requests of the step that it died in.
            poison: those of them that are found to end workers.
            early: the requests of others whose prompt it computed when it died.
        """
        if early:
            return Decision(Verdict.RESTART)
        self._deaths.append(_Death(now_s, loading, in_step))
        self._deaths = [
            death
            for death in self._deaths
            if (death.loading or now_s - death.at_s < WITHIN_S) and not death.in_step & poison
        ]
        excess = len(self._deaths) - MOST_DEATHS
        if excess < 0:
            return Decision(Verdict.RESTART)
        if self._when_too_many is Verdict.RESTART:
            return Decision(Verdict.RESTART, min(2.0 ** min(excess, 16), LONGEST_PAUSE_S))
        return Decision(self._when_too_many)
