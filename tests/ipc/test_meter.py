"""Histograms of handoffs and steps in the slab, as writer and reader see them."""

from __future__ import annotations

import itertools
import math

import numpy as np

from trserve.ipc.layout import MAX_METER_BOUNDS
from trserve.ipc.meter import HANDOFF_SECONDS, MeterWriter, read_meter
from trserve.ipc.slab import Slab


def test_values_lie_at_or_below_their_bounds(slab: Slab) -> None:
    writer = MeterWriter(slab, 1)
    values = [1, 100_000, 100_001, 10**10, 10**10 + 1]
    writer.total[2].observe(np.array(values))
    found = read_meter(slab, 1).by_peer["total"][2]
    assert found.bounds == HANDOFF_SECONDS
    assert found.counts == [2, 1, *[0] * (len(HANDOFF_SECONDS) - 3), 1, 1]
    assert found.total == sum(values)
    untouched = read_meter(slab, 1)._replace(by_peer={}, threshold=None)
    assert untouched == read_meter(slab, 0)._replace(by_peer={}, threshold=None)


def test_every_histogram_has_words_of_its_own(slab: Slab) -> None:
    bounds = [float(n) for n in range(1, MAX_METER_BOUNDS + 1)]
    writer = MeterWriter(slab, 2, bounds)
    everything = np.array([bounds[-1] * 1e9, 1e18]).astype(np.int64)
    lists = (writer.steps, writer.send, writer.admission, writer.exec, writer.total)
    single = (writer.batch_rows, writer.router, writer.arrival, writer.away, writer.visit_tokens)
    for histogram in (*single, *itertools.chain(*lists)):
        histogram.observe(everything)
    found = read_meter(slab, 2, bounds)
    histograms = [*found.single.values(), *found.steps, *itertools.chain(*found.by_peer.values())]
    assert len(histograms) == 5 + 8 + 4 * 3
    assert {sum(each.counts) for each in histograms} == {2}
    assert {each.total for each in histograms} == {int(everything.sum())}
    assert set(found.counters.values()) == {0}


def test_steps_have_classes(slab: Slab) -> None:
    rows = np.array([1, 2, 3, 4, 5, 64, 65, 999])
    MeterWriter(slab, 0).observe_steps(rows, np.full(8, 1000))
    found = read_meter(slab, 0).steps
    assert [sum(each.counts) for each in found] == [1, 1, 2, 1, 0, 0, 1, 2]


def test_a_successor_goes_on_and_thresholds_are_replaced(slab: Slab) -> None:
    for threshold in (0.25, -1.5):
        writer = MeterWriter(slab, 0)
        writer.count("append", 2)
        writer.threshold(threshold)
        assert read_meter(slab, 0).threshold == threshold
    writer.threshold(math.nan)
    found = read_meter(slab, 0)
    assert found.threshold is None
    assert found.counters["append"] == 4
