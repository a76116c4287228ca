"""Sums of steps, and the solver's words, as two processes see them."""

from __future__ import annotations

import numpy as np

from trserve.ipc.estimates import read_report, write_matrices, write_numbers
from trserve.ipc.slab import Slab
from trserve.ipc.tally import TallyWriter, read_tally


def test_sums_of_one_worker_are_its_own(slab: Slab) -> None:
    middle = TallyWriter(slab, 1)
    middle.stayed(4, 4)
    middle.left(0, 1)
    middle.left(2, 0)
    middle.took(5, 1000)
    middle.took(5, 3000)
    middle.took(1, 7)
    found = read_tally(slab, 1)
    assert found.moved.tolist() == [1, 4, 1]
    assert found.committed.tolist() == [1, 4, 0]
    assert found.steps.tolist() == [0, 1, 0, 0, 0, 2]
    assert found.nanoseconds.tolist() == [0, 7, 0, 0, 0, 4000]
    for other in (0, 2):
        assert not any(words.any() for words in vars(read_tally(slab, other)).values())


def test_a_successor_goes_on(slab: Slab) -> None:
    TallyWriter(slab, 0).stayed(2, 2)
    before = read_tally(slab, 0)
    TallyWriter(slab, 0).stayed(3, 1)
    assert read_tally(slab, 0).moved[0] == 5
    assert (read_tally(slab, 0) - before).committed.tolist() == [1, 0, 0]


def test_the_report_is_what_was_written(slab: Slab) -> None:
    assert read_report(slab).predicted_tokens_per_s == 0
    routing = np.arange(9.0).reshape(3, 3)
    write_numbers(slab, live=3.5, predicted_tokens_per_s=100.25, changes=2)
    write_matrices(slab, routing, routing.T, [1.5, 2.5, 3.5])
    report = read_report(slab)
    assert (report.live, report.predicted_tokens_per_s, report.changes) == (3.5, 100.25, 2)
    assert (report.routing == routing).all()
    assert (report.tokens == routing.T).all()
    assert report.latency_ms.tolist() == [1.5, 2.5, 3.5]
