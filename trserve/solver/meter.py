"""Tokens per second while N stands still, with a standard error by batch means.

Knows nothing of the slab, of models or of thresholds, other than that they are the same all along.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Hashable
from typing import Final, NamedTuple

BATCH_S: Final = 1.0
BATCHES: Final = 6
_LONGEST_GAP_S: Final = 0.5
_ODD_SHARE: Final = 0.2
"""Looks of a batch that may see another N: one answer ends, and the next is not there yet."""

_NEAR: Final = 8
"""Of so many requests, one more or less is the same N."""


class Measurement(NamedTuple):
    """Tokens per second at N = ``live``."""

    live: int
    tokens_per_s: float
    standard_error: float


class Meter:
    """Feed it every look.

    Attributes:
        tokens_per_s: of the last seconds in which N stood still; 0 before there were two.
    """

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        self._last_s = -math.inf
        self._condition: Hashable = None
        self._begin(0.0)
        self._live = -1
        self._rates: deque[float] = deque(maxlen=BATCHES)
        self._fresh = 0

    def _begin(self, now_s: float) -> None:
        self._began_s = now_s
        self._tokens = 0
        self._seen: list[int] = []

    def add(self, now_s: float, live: int, tokens: int, condition: Hashable) -> Measurement | None:
        """``tokens`` were committed since the last look, and N is ``live`` now.

        Only what came under one ``condition`` is put together; None stands for one that is not to
        be measured. Returns a measurement when BATCHES batches have come since the last.
        """
        gap, self._last_s = now_s - self._last_s, now_s
        if gap > _LONGEST_GAP_S or condition is None or condition != self._condition:
            self._condition = condition
            self._forget()
            self._begin(now_s)
            return None
        self._tokens += tokens
        self._seen.append(live)
        if now_s - self._began_s < BATCH_S:
            return None
        rate = self._tokens / (now_s - self._began_s)
        common = statistics.mode(self._seen)
        odd = sum(not _is_near(live, common) for live in self._seen)
        still = common > 0 and odd <= _ODD_SHARE * len(self._seen)
        self._begin(now_s)
        if not still:
            self._forget()
            return None
        return self._take(common, rate)

    def _forget(self) -> None:
        self._rates.clear()
        self._fresh = 0

    def _take(self, live: int, rate: float) -> Measurement | None:
        if not _is_near(live, self._live):
            self._live = live
            self._forget()
        self._rates.append(rate)
        self._fresh += 1
        if len(self._rates) < 2:
            return None
        self.tokens_per_s = statistics.fmean(self._rates)
        if self._fresh < BATCHES:
            return None
        self._fresh = 0
        error = statistics.stdev(self._rates) / math.sqrt(len(self._rates))
        return Measurement(live, self.tokens_per_s, error)


def _is_near(live: int, other: int) -> bool:
    return abs(live - other) <= max(live, other) // _NEAR
