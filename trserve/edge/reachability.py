"""Whether the model at the far side counts as reachable, and what the workers here are told of it.

Policy over a connection's state and a clock, and the words that say it. A model is out of reach
while its connection is down for longer than a moment; and after a visit that took longer than it
may, or came to nothing, for a while or until it has answered again. Knows no requests and no
sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from trserve.ipc.fence import store_fence
from trserve.ipc.slab import Reach, WorkerWords
from trserve.restarts import DEGRADE, FAIL

SHORTEST_REST_S: Final = 1.0
LONGEST_REST_S: Final = 30.0


class Reachability:
    """Of one link agent.

    Args:
        words: the agent's.
        policy: ``--on-peer-loss``.
        patience_s: how long a connection may be down before that counts.
        tell: rings everybody, upon which they look at the words.

    Attributes:
        reachable: whether requests that come are sent on.
    """

    def __init__(
        self, words: WorkerWords, policy: str, patience_s: float, tell: Callable[[], None]
    ) -> None:
        self._words = words
        self._down = {DEGRADE: Reach.ALONE, FAIL: Reach.FAILS}.get(policy, Reach.WAITS)
        self._patience_s = patience_s
        self._tell = tell
        self._down_since: float | None = None
        self._rest_s, self._in_a_row = SHORTEST_REST_S, 0
        self._rests_until: float | None = None
        self.reachable = words.get("reach") == Reach.HERE

    def begin(self, *, connected: bool) -> None:
        """What holds before the first request: no patience with one that is not there."""
        self._set(connected)

    def update(self, now: float, *, connected: bool) -> bool:
        """Look at the connection and the clock; whether anything has changed."""
        if connected:
            self._down_since = None
            if self._rests_until is not None and now >= self._rests_until:
                self._rests_until = None
            return self._set(self._rests_until is None)
        self._rests_until = None
        if self._down_since is None:
            self._down_since = now
        return now >= self._down_since + self._patience_s and self._set(False)

    def rest(self, now: float, limit_s: float) -> None:
        """A visit took longer than it may, or came to nothing: leave the model alone for a while.

        For ``limit_s`` at least, and longer each time until it answers in time.
        """
        self._rests_until = now + max(limit_s, self._rest_s)
        self._rest_s = min(LONGEST_REST_S, 2 * self._rest_s)
        self._in_a_row += 1
        self._set(False)

    def answered(self, *, in_time: bool) -> None:
        """Something came from there: it can write. One that is always late is left alone longer."""
        if in_time or self._in_a_row <= 1:
            self._rests_until = None
        if in_time:
            self._rest_s, self._in_a_row = SHORTEST_REST_S, 0

    def due_s(self, now: float) -> float | None:
        """Seconds until :meth:`update` may say something else; None for never by itself."""
        if self._rests_until is not None:
            return max(0.0, self._rests_until - now)
        if self._down_since is not None and self.reachable:
            return max(0.0, self._down_since + self._patience_s - now)
        return None

    def _set(self, reachable: bool) -> bool:
        word = Reach.HERE if reachable else self._down
        if self._words.get("reach") == word and self.reachable == reachable:
            return False
        self.reachable = reachable
        self._words.set("reach", word)
        if not reachable:
            # Who begins and finds it counted must find it away, too.
            store_fence()
            self._words.set("outages", self._words.get("outages") + 1)
        # Whoever sees that it changed must see what it is now.
        store_fence()
        self._words.set("reach_changes", self._words.get("reach_changes") + 1)
        self._tell()
        return True
