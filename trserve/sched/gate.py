"""The gate: whether an idle worker starts a step now. A pure decision over numbers.

Knows no clock, no slab and no request; the caller has drained all its rings and reads the peers'
words (each has one writer, so a word may be a little old, never torn).

Why it cannot hang the server: if any request is buffered and no step runs and nothing travels,
every worker computes the same opener from the same words, and that worker opens. While something
does run or travels, it ends or arrives, and the worker that takes it in looks at its gate again.
Words that are old or disagree can delay an opening, but only until the oldest buffered request has
waited ``max_wait``, which depends on no other worker.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, NamedTuple

MAX_WAIT_STEPS: Final = 4
"""One step of the slowest peer would erase delayed batching; four of the slowest model cost
nothing (simulated)."""

MIN_MAX_WAIT_MS: Final = 20.0


class Reason(enum.Enum):
    """Why a gate opened; every opening is counted by it."""

    THRESHOLD = "threshold"
    NOBODY_RUNS = "nobody-runs"
    TIMEOUT = "timeout"
    DRAIN = "drain"


class Decision(NamedTuple):
    """What a gate says.

    Attributes:
        reason: why it is open; None when it is closed.
        wait: time until it opens by itself; None when it is open, or when nothing is buffered.
        opener: the worker whose gate opens instead because nobody runs: it may have looked before
            that came to be so, and should look again.
    """

    reason: Reason | None
    wait: int | None
    opener: int | None = None

    @property
    def is_open(self) -> bool:
        return self.reason is not None


_NOTHING_TO_DO: Final = Decision(None, None)
_BY_THRESHOLD: Final = Decision(Reason.THRESHOLD, None)
_BY_NOBODY: Final = Decision(Reason.NOBODY_RUNS, None)
_BY_TIMEOUT: Final = Decision(Reason.TIMEOUT, None)
_BY_DRAIN: Final = Decision(Reason.DRAIN, None)


def decide(
    worker: int,
    *,
    buffered: Sequence[int],
    running: Sequence[int],
    thresholds: Sequence[int],
    live: int,
    waited: int,
    max_wait: int,
    draining: bool = False,
) -> Decision:
    """Whether idle worker ``worker`` starts a step, and why, or how long it may wait.

    Args:
        buffered, running: requests in each worker's buffer and running step.
        thresholds: each worker's B in force; below 1 counts as 1.
        live: N, requests that are published and not finished.
        waited: how long the oldest request in this worker's buffer has waited; the unit is the
            caller's, and that of ``max_wait`` and of the decision.
        draining: the worker takes no new work, so nothing is worth waiting for.
    """
    mine = buffered[worker]
    if mine <= 0:
        return _NOTHING_TO_DO
    if mine >= thresholds[worker]:
        return _BY_THRESHOLD
    chosen = opener(buffered, thresholds) if nobody_runs(buffered, running, live) else None
    if chosen == worker:
        return _BY_NOBODY
    if waited >= max_wait:
        return _BY_TIMEOUT
    if draining:
        return _BY_DRAIN
    return Decision(None, max_wait - waited, chosen)


def nobody_runs(buffered: Sequence[int], running: Sequence[int], live: int) -> bool:
    """Every live request is in some buffer, so none is in a step, in a ring or on a link.

    More may be buffered than are live: a request that was cancelled stays until it is noticed.
    """
    return not any(running) and sum(buffered) >= live


def opener(buffered: Sequence[int], thresholds: Sequence[int]) -> int:
    """The worker with the largest ``buffered / B``; the lower index of two."""
    best = 0
    for worker in range(1, len(buffered)):
        # Integers, so that two workers never disagree by a rounding.
        mine = buffered[worker] * max(1, thresholds[best])
        if mine > buffered[best] * max(1, thresholds[worker]):
            best = worker
    return best


def default_max_wait_ms(slowest_step_ms: float) -> float:
    """``max_wait`` for a system whose slowest model's step takes ``slowest_step_ms``."""
    return max(MIN_MAX_WAIT_MS, MAX_WAIT_STEPS * slowest_step_ms)
