"""Gates that keep all workers in step with each other: what delayed batching is compared with.

Two ways of synchronous serving, as the literature describes them: *model-sync* runs one model at a
time, and all requests of the others wait; *step-sync* lets every model with requests take a step,
and none another before all have finished. Both start anything only when every live request is
buffered somewhere, so both wait for the slowest. Knows the words of all workers; no step and no
request.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns
from typing import Final

from trserve.ipc.doorbell import ring
from trserve.ipc.layout import WORKER_WORDS
from trserve.ipc.slab import Slab, count_reachable
from trserve.sched.gate import Reason, nobody_runs, opener
from trserve.sched.table import ThresholdTable
from trserve.workers.tracing import WorkerTrace

_BUFFERED: Final = WORKER_WORDS.index("buffered")
_IN_STEP: Final = WORKER_WORDS.index("in_step")
_ROUND: Final = WORKER_WORDS.index("round")
_SYNCHRONOUS: Final = WORKER_WORDS.index("gate_nobody_runs")
_TIMEOUT: Final = WORKER_WORDS.index("gate_timeout")
_NET_S: Final = 1.0
"""A worker that died leaves requests in no buffer; the others then go on by themselves."""


class LockstepGate:
    """As ``WorkerGate``, for one of the two ways.

    Args:
        steps: step-sync; else model-sync.
    """

    def __init__(
        self,
        slab: Slab,
        index: int,
        bells: Sequence[int],
        *,
        steps: bool,
        trace: WorkerTrace | None = None,
    ) -> None:
        self._index = index
        self._bells = [bell for worker, bell in enumerate(bells) if worker != index]
        self._batons = slab.baton_vector
        self._workers = slab.workers
        self._all = [words.words for words in slab.workers]
        self._words = self._all[index]
        self._even = [1] * len(self._all)
        self._steps = steps
        self._trace = trace
        self._closed_since = 0
        self.draining = False
        self._words[_BUFFERED] = self._words[_IN_STEP] = 0
        self._words[_ROUND] = self._newest_round()

    def use(self, thresholds: ThresholdTable) -> None:
        """Thresholds mean nothing here."""

    def wait_s(self, buffered: int, now_ns: int) -> float:
        """How long the ``buffered`` requests may wait at most; 0: start now."""
        words = self._words
        words[_BUFFERED] = buffered
        since = self._closed_since = self._closed_since or now_ns
        if self._steps and words[_ROUND] != (newest := self._newest_round()):
            words[_ROUND] = newest  # somebody has begun it, and this worker is in it
            self._open(Reason.NOBODY_RUNS, buffered)
        elif self._may_begin():
            words[_ROUND] = self._newest_round() + 1
            self._open(Reason.NOBODY_RUNS, buffered)
            if self._steps:
                self._ring_others()
        elif now_ns - since >= _NET_S * 1e9:
            words[_ROUND] = self._newest_round()
            self._open(Reason.TIMEOUT, buffered)
        else:
            return _NET_S - (now_ns - since) / 1e9
        return 0.0

    def _may_begin(self) -> bool:
        live = count_reachable(self._batons, self._workers)
        buffered = [words[_BUFFERED] for words in self._all]
        running = [words[_IN_STEP] for words in self._all]
        if not nobody_runs(buffered, running, live):
            return False
        if self._steps:
            chosen = next(worker for worker, count in enumerate(buffered) if count)
        else:
            chosen = opener(buffered, self._even)
        if chosen != self._index:
            self._ring_others()
        return chosen == self._index

    def _newest_round(self) -> int:
        return max([words[_ROUND] for words in self._all])

    def _ring_others(self) -> None:
        for bell in self._bells:
            ring(bell)

    def _open(self, reason: Reason, rows: int) -> None:
        self._closed_since = 0
        words = self._words
        words[_TIMEOUT if reason is Reason.TIMEOUT else _SYNCHRONOUS] += 1
        words[_IN_STEP] = rows
        words[_BUFFERED] = 0
        if self._trace is not None:
            self._trace.gate_opened(reason, monotonic_ns())

    def goes_on(self, rows: int) -> None:
        """A step begins that needs no opening, over ``rows`` requests."""
        self._words[_IN_STEP] = rows
        self._words[_BUFFERED] = 0

    def rest(self, buffered: int) -> None:
        """No step runs here, and ``buffered`` requests may run."""
        words = self._words
        words[_BUFFERED] = buffered
        if words[_IN_STEP]:
            words[_IN_STEP] = 0
            if not buffered:
                # Nobody asks here again before something comes, and others may wait for this.
                self._ring_others()
        elif not buffered:
            # A round that began without this worker is not one to join when something comes.
            words[_ROUND] = self._newest_round()

    def note_step(self, nanoseconds: int) -> None:
        """Of no use here."""
