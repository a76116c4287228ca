"""How long handoffs and steps took, and what they cost, summed up in the slab for ``/metrics``.

One writer, the worker; but for ``threshold`` sums only grow, and a restarted worker goes on where
its predecessor ended. What the solver reads is in ``tally.py``; by these sums nothing is decided.
Knows no requests, no clocks and no metric's name.

Words of one worker: the counters of ``METER_COUNTERS`` (``threshold`` holds the bits of a float64),
then the histograms in the order of :class:`Histograms`. All of them have the same number of words,
whatever the bounds, so that bounds can be chosen at launch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trserve.ipc.layout import (
    HISTOGRAMS_BY_PEER,
    METER_COUNTERS,
    METER_HISTOGRAM_WORDS,
    SINGLE_HISTOGRAMS,
    STEP_CLASSES,
)
from trserve.ipc.slab import Slab

Numbers = NDArray[np.int64]

_NS: Final = 1e9
_SUM: Final = METER_HISTOGRAM_WORDS - 1
_BITS: Final = struct.Struct("=q")
_FLOAT: Final = struct.Struct("=d")
_AT: Final = {name: at for at, name in enumerate(METER_COUNTERS)}

HANDOFF_SECONDS: Final = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0),
)
"""Upper bounds of times of handoffs and steps where no others were chosen."""

ROUTER_SECONDS: Final = (
    *(0.000001, 0.000002, 0.000005, 0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005),
    *(0.001, 0.002, 0.005, 0.01),
)
ROWS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
VISIT_TOKENS: Final = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987)

STEP_ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
"""The most rows of each class of steps but the last."""

_MOST_ROWS: Final = np.array(STEP_ROWS)
_SINGLE: Final = ("batch_rows", "router", "arrival", "away", "visit_tokens")
_BY_PEER: Final = ("send", "admission", "exec", "total")
assert len(STEP_ROWS) + 1 == STEP_CLASSES
assert (len(_SINGLE), len(_BY_PEER)) == (SINGLE_HISTOGRAMS, HISTOGRAMS_BY_PEER)


class HistogramWriter:
    """The writing end of one histogram.

    Args:
        bounds: inclusive upper bounds, rising integers.
    """

    __slots__ = ("_at", "_bounds", "_words")

    def __init__(self, words: memoryview, at: int, bounds: Sequence[int]) -> None:
        self._words = words
        self._at = at
        self._bounds = np.array(bounds, np.int64)

    def observe(self, values: Numbers) -> None:
        """Count ``values``, int64 [any]."""
        if not len(values):
            return
        words, at = self._words, self._at
        counts = np.bincount(np.searchsorted(self._bounds, values))
        for place in counts.nonzero()[0].tolist():
            words[at + place] += int(counts[place])
        words[at + _SUM] += int(values.sum())


class HistogramWords(NamedTuple):
    """One look at a histogram: ``counts`` up to each of ``bounds`` and above; ``total`` in ns
    where the bounds are seconds, else in what is counted."""

    bounds: Sequence[float]
    counts: list[int]
    total: float


class _Places:
    """Where the histograms of a worker begin, in words."""

    def __init__(self, models: int) -> None:
        starts = iter(range(len(METER_COUNTERS), 10**9, METER_HISTOGRAM_WORDS))
        self.single = {name: next(starts) for name in _SINGLE}
        self.steps = [next(starts) for _ in range(STEP_CLASSES)]
        self.by_peer = {name: [next(starts) for _ in range(models)] for name in _BY_PEER}


class MeterWriter:
    """The writing end of worker ``index``.

    Args:
        seconds: upper bounds of the times of handoffs and steps; the usual ones if empty.

    Attributes:
        batch_rows: requests in a step. router: nanoseconds of asking the router, a step.
        arrival: from a request's coming to the step that takes it. away: from leaving here to
            coming back. visit_tokens: committed between coming and leaving.
        steps: by class of rows, nanoseconds of those without prompts.
        send: by the model that it went to. admission, exec, total: by the one it came from.
    """

    def __init__(self, slab: Slab, index: int, seconds: Sequence[float] = ()) -> None:
        self._words = words = slab.meter_words(index)
        places = _Places(slab.layout.workers)
        times = _nanoseconds(seconds or HANDOFF_SECONDS)

        def of(at: int, bounds: Sequence[int]) -> HistogramWriter:
            return HistogramWriter(words, at, bounds)

        single = places.single
        self.batch_rows = of(single["batch_rows"], ROWS)
        self.router = of(single["router"], _nanoseconds(ROUTER_SECONDS))
        self.arrival, self.away = of(single["arrival"], times), of(single["away"], times)
        self.visit_tokens = of(single["visit_tokens"], VISIT_TOKENS)
        self.steps = [of(at, times) for at in places.steps]
        self.send, self.admission, self.exec, self.total = (
            [of(at, times) for at in places.by_peer[name]] for name in _BY_PEER
        )

    def observe_steps(self, rows: Numbers, nanoseconds: Numbers) -> None:
        """Count steps without prompts, each by its class."""
        classes = np.searchsorted(_MOST_ROWS, rows)
        for each in np.unique(classes).tolist():
            self.steps[each].observe(nanoseconds[classes == each])

    def count(self, counter: str, times: int = 1) -> None:
        """Add to one of ``METER_COUNTERS``."""
        self._words[_AT[counter]] += times

    def threshold(self, value: float) -> None:
        """The router's first parameter is this now; NaN where it has none."""
        self._words[0] = _BITS.unpack(_FLOAT.pack(value))[0]


assert METER_COUNTERS[0] == "threshold"


class Meter(NamedTuple):
    """One look at a worker's meter.

    Attributes:
        threshold: the value in force, or None.
        counters: by name, ``threshold`` left out.
        single: histograms by name. steps: by class of rows.
        by_peer: by name, a histogram a model.
    """

    threshold: float | None
    counters: dict[str, int]
    single: dict[str, HistogramWords]
    steps: list[HistogramWords]
    by_peer: dict[str, list[HistogramWords]]


def read_meter(slab: Slab, worker: int, seconds: Sequence[float] = ()) -> Meter:
    """The sums of ``worker`` as they are; two words of one step may be a step apart.

    ``seconds`` are the bounds that its writer was given.
    """
    words = slab.meter_words(worker).tolist()
    places = _Places(slab.layout.workers)
    times = seconds or HANDOFF_SECONDS
    bounds: dict[str, Sequence[float]] = {
        "batch_rows": ROWS,
        "router": ROUTER_SECONDS,
        "visit_tokens": VISIT_TOKENS,
    }
    threshold = _FLOAT.unpack(_BITS.pack(words[0]))[0]
    return Meter(
        threshold=None if math.isnan(threshold) else threshold,
        counters={name: words[at] for name, at in _AT.items() if at},
        single={
            name: _histogram(words, at, bounds.get(name, times))
            for name, at in places.single.items()
        },
        steps=[_histogram(words, at, times) for at in places.steps],
        by_peer={
            name: [_histogram(words, at, times) for at in starts]
            for name, starts in places.by_peer.items()
        },
    )


def _histogram(words: Sequence[int], at: int, bounds: Sequence[float]) -> HistogramWords:
    return HistogramWords(bounds, list(words[at : at + len(bounds) + 1]), words[at + _SUM])


def _nanoseconds(seconds: Sequence[float]) -> list[int]:
    return [round(bound * _NS) for bound in seconds]
