"""How often to look, and how often to solve. Pure; knows no clock and no solver.

An idle server is looked at once a second. Thresholds are worked out at once after a change that
matters, and else seldom enough to leave the processor to the models.
"""

from __future__ import annotations

from typing import Final

BUSY_LOOK_S: Final = 0.1
IDLE_LOOK_S: Final = 1.0
IDLE_AFTER_S: Final = 2.0
FOLLOW_S: Final = 3.0
"""After a change of routing its first estimates are rough: solve again as they get better."""

_SOLVE_EVERY_S: Final = 0.3
_SETTLES_WITHIN_S: Final = 1.0
_REFINE_EVERY_S: Final = 2.0
_SHARE: Final = 20
"""Times that a solution took, until the next one that is only a little more exact."""

_PEAK_S: Final = 5.0


class LookPace:
    """How long to wait for the next look."""

    def __init__(self) -> None:
        self._last_moved_s = -IDLE_AFTER_S

    def wait_s(self, now_s: float, *, busy: bool) -> float:
        """After a look at ``now_s`` that found requests or steps, or neither."""
        if busy:
            self._last_moved_s = now_s
        is_idle = now_s - self._last_moved_s >= IDLE_AFTER_S
        return IDLE_LOOK_S if is_idle else BUSY_LOOK_S


class SolvePace:
    """Whether it is time to solve."""

    def __init__(self) -> None:
        self._at_once_s = 0.0
        self._refine_s = 0.0
        self._follow_until_s = 0.0

    def follow(self, now_s: float) -> None:
        """Something has changed."""
        self._follow_until_s = now_s + FOLLOW_S

    def may_ask(self, now_s: float) -> bool:
        """Whether it is time to look at the estimates at all."""
        return now_s >= self._at_once_s

    def may_solve(self, now_s: float, *, urgent: bool, settled: bool = True) -> bool:
        """Whether a solution may begin.

        ``urgent``: the present one is not for this load; ``settled``: what is known is no mixture
        of before and after a change, which is worth waiting for a little.
        """
        following = now_s < self._follow_until_s
        if not settled and now_s < self._follow_until_s - FOLLOW_S + _SETTLES_WITHIN_S:
            return False
        return urgent or following or now_s >= self._refine_s

    def asked(self, now_s: float) -> None:
        """The estimates were looked at."""
        self._at_once_s = now_s + _SOLVE_EVERY_S

    def solved(self, now_s: float, took_s: float) -> None:
        """A solution ended at ``now_s``."""
        self._refine_s = now_s + max(_REFINE_EVERY_S, _SHARE * took_s)


class Peak:
    """The largest N of the last five to ten seconds, for which the table is to hold."""

    def __init__(self) -> None:
        self._now = self._before = 0
        self._began_s = 0.0

    def add(self, now_s: float, live: int) -> int:
        """N is ``live`` now; returns the peak."""
        if now_s - self._began_s >= _PEAK_S:
            self._before = self._now if now_s - self._began_s < 2 * _PEAK_S else 0
            self._now, self._began_s = 0, now_s
        self._now = max(self._now, live)
        return max(self._now, self._before)
