"""The gate of one worker: the decision of ``sched/gate.py`` over the words of all workers.

Knows the slab's words and how many requests may run here; no request by name, no step and no
solver. What it says of this worker (``buffered``, ``in_step``, ``batch_threshold``) the peers read
as they please, and a little late: that may delay an opening, and never forbids one for longer than
the wait at most.

With eager thresholds no gate is ever closed, so nobody looks at these words and they rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns
from typing import Final

from trserve.ipc.doorbell import ring
from trserve.ipc.layout import WORKER_WORDS
from trserve.ipc.slab import Slab, WorkerStatus, count_reachable
from trserve.sched.gate import Reason, decide, default_max_wait_ms, nobody_runs, opener
from trserve.sched.table import ThresholdTable
from trserve.workers.tracing import WorkerTrace

_BUFFERED: Final = WORKER_WORDS.index("buffered")
_IN_STEP: Final = WORKER_WORDS.index("in_step")
_THRESHOLD: Final = WORKER_WORDS.index("batch_threshold")
_SLOWEST: Final = WORKER_WORDS.index("slowest_step_ns")
_OPENINGS: Final = {
    Reason.THRESHOLD: WORKER_WORDS.index("gate_threshold"),
    Reason.NOBODY_RUNS: WORKER_WORDS.index("gate_nobody_runs"),
    Reason.TIMEOUT: WORKER_WORDS.index("gate_timeout"),
    Reason.DRAIN: WORKER_WORDS.index("gate_drain"),
}
_BY_THRESHOLD: Final = _OPENINGS[Reason.THRESHOLD]
_STATUS: Final = WORKER_WORDS.index("status")
_NS: Final = 1e9
_OUTLIER: Final = 4
_SMOOTHING: Final = 4
"""A step's time counts for 2**-4 of the mean that the safety net is made from."""


class WorkerGate:
    """Asked before every step of worker ``index``, and told after it.

    Args:
        bells: of all workers; one that should open, and may not know, is rung.
        thresholds: those in force until others come.
        max_rows: a step takes no more requests, so none is worth waiting for.
        max_wait_s: how long the oldest buffered request waits at most; None: the default, which
            follows the slowest model's steps.
        trace: where openings are noted, or None.

    Attributes:
        draining: nothing new will come, so nothing is worth waiting for.
    """

    def __init__(
        self,
        slab: Slab,
        index: int,
        bells: Sequence[int],
        *,
        thresholds: ThresholdTable,
        max_rows: int,
        max_wait_s: float | None = None,
        trace: WorkerTrace | None = None,
    ) -> None:
        self._index = index
        self._bells = bells
        self._batons = slab.baton_vector
        self._workers = slab.workers
        self._all = [words.words for words in slab.workers]
        self._words = self._all[index]
        self._max_rows = max_rows
        self._max_wait_s = max_wait_s
        self._trace = trace
        self._closed_since = 0  # when the gate was first found closed; 0: it was open
        self.draining = False
        self.use(thresholds)
        # A predecessor may have died in a step.
        self._words[_BUFFERED] = self._words[_IN_STEP] = 0

    def use(self, thresholds: ThresholdTable) -> None:
        """Put ``thresholds`` in force."""
        self._table = thresholds
        self._eager = thresholds.is_eager
        self._closed_since = 0
        self._words[_THRESHOLD] = 1
        if self._eager:
            self._words[_BUFFERED] = self._words[_IN_STEP] = 0

    def wait_s(self, buffered: int, now_ns: int) -> float:
        """How long the ``buffered`` requests (1 or more) may wait for others; 0: start now."""
        if self._eager:
            self._words[_BY_THRESHOLD] += 1
            return 0.0
        words = self._words
        words[_BUFFERED] = buffered
        live = count_reachable(self._batons, self._workers)
        thresholds = self._thresholds(live)
        words[_THRESHOLD] = thresholds[self._index]
        if buffered >= thresholds[self._index]:
            self._open(Reason.THRESHOLD, buffered)
            return 0.0
        return self._ask(buffered, live, thresholds, now_ns)

    def _thresholds(self, live: int) -> list[int]:
        return [min(b, self._max_rows) for b in self._table.row(live)]

    def _ask(self, buffered: int, live: int, thresholds: Sequence[int], now_ns: int) -> float:
        since = self._closed_since = self._closed_since or now_ns
        decision = decide(
            self._index,
            buffered=self._of_all(_BUFFERED),
            running=self._of_all(_IN_STEP),
            thresholds=thresholds,
            live=live,
            waited=now_ns - since,
            max_wait=self._max_wait_ns(),
            draining=self.draining,
        )
        if decision.reason is not None:
            self._open(decision.reason, buffered)
            return 0.0
        assert decision.wait is not None
        if decision.opener is not None:
            # It may have looked before we came to rest.
            ring(self._bells[decision.opener])
        return decision.wait / _NS

    def _of_all(self, word: int) -> list[int]:
        return [words[word] for words in self._all]

    def _max_wait_ns(self) -> int:
        wait_s = self._max_wait_s
        if wait_s is None:
            left = [words[_SLOWEST] for words in self._all if words[_STATUS] != WorkerStatus.LOST]
            wait_s = default_max_wait_ms(max(left) / 1e6) / 1e3
        return int(wait_s * _NS)

    def _open(self, reason: Reason, rows: int) -> None:
        self._closed_since = 0
        words = self._words
        words[_OPENINGS[reason]] += 1
        words[_IN_STEP] = rows
        words[_BUFFERED] = 0
        if self._trace is not None:
            self._trace.gate_opened(reason, monotonic_ns())

    def goes_on(self, rows: int) -> None:
        """A step begins that needs no opening, over ``rows`` requests."""
        if not self._eager:
            self._words[_IN_STEP] = rows
            self._words[_BUFFERED] = 0

    def rest(self, buffered: int) -> None:
        """No step runs here, and ``buffered`` requests may run; told when that has changed."""
        if self._eager:
            return
        words = self._words
        had_any = words[_BUFFERED] or words[_IN_STEP]
        words[_BUFFERED] = buffered
        words[_IN_STEP] = 0
        if not buffered:
            self._closed_since = 0
            if had_any:
                self._wake_opener()

    def _wake_opener(self) -> None:
        """Nobody asks here again before something comes: who waits for that may wait in vain."""
        live = count_reachable(self._batons, self._workers)
        buffered = self._of_all(_BUFFERED)
        if live and nobody_runs(buffered, self._of_all(_IN_STEP), live):
            ring(self._bells[opener(buffered, self._thresholds(live))])

    def note_step(self, nanoseconds: int) -> None:
        """A step without prompts took so long."""
        mean = self._words[_SLOWEST]
        # A process that was stopped for a while has not become slow.
        took = min(nanoseconds, mean * _OUTLIER) if mean else nanoseconds
        self._words[_SLOWEST] = mean + (took - mean >> _SMOOTHING) if mean else took
