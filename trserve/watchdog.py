"""Which workers hang: their heartbeat has stood still for too long. Pure; knows no process.

What counts is how long the launcher itself has seen it stand still, in looks that came about when
they should. A machine that slept, or a terminal that stopped the whole server for an hour, made
nobody hang: then the looks were late, and the hour is not counted.
"""

from __future__ import annotations

from typing import Final

LONGEST_LOOK_S: Final = 2.0
"""Of a longer time between two looks only this much is counted."""


class Watchdog:
    """Watches the heartbeats of some workers.

    Args:
        limit_s: how long a heartbeat may stand still; 0 means for ever.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seen: dict[int, int] = {}
        self._still_s: dict[int, float] = {}
        self._last_look_s: dict[int, float] = {}

    def hangs(self, worker: int, heartbeat: int, now_s: float) -> bool:
        """Look at ``worker``, which is up, about once a second; True if it has stood still."""
        passed = min(now_s - self._last_look_s.get(worker, now_s), LONGEST_LOOK_S)
        self._last_look_s[worker] = now_s
        if self._seen.get(worker) != heartbeat:
            self._seen[worker] = heartbeat
            self._still_s[worker] = 0.0
            return False
        self._still_s[worker] += passed
        return 0 < self._limit_s <= self._still_s[worker]

    def forget(self, worker: int) -> None:
        """It is no longer up."""
        for known in (self._seen, self._still_s, self._last_look_s):
            known.pop(worker, None)
