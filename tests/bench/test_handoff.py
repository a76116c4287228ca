"""The ladder of media: every path, each placement where it matters, and nothing left pinned."""

from __future__ import annotations

import os

import pytest

from bench.handoff import ladder_targets, print_floor
from bench.handoff_ladder import ladder
from bench.placement import Placement, placements

SLEEPING = ("eventfd-wake", "shm-doorbell", "zmq", "zmq-pickle")


def test_paths_that_sleep_are_measured_at_every_placement(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = os.sched_getaffinity(0)
    rows = ladder(20)
    assert os.sched_getaffinity(0) == before
    found = {(row["path"], row["placement"]) for row in rows}
    expected = {(path, where) for path in SLEEPING for where in placements()}
    expected |= {("shm-poll", placements()[-1]), ("mp-queue", "any"), ("http", "any")}
    assert len(rows) == len(found) and found == expected
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in rows)
    assert len(list(ladder_targets(rows))) == 2 + 3 * len(placements())
    print_floor(rows)
    said = capsys.readouterr().out
    assert all(f"{where}: " in said for where in placements())


def test_two_processes_share_a_core_or_do_not() -> None:
    before = os.sched_getaffinity(0)
    for where in (Placement.ANY, *placements()):
        cores = []
        for process in range(2):
            with where.pinned(process):
                cores.append(os.sched_getaffinity(0))
            assert os.sched_getaffinity(0) == before
        if where is Placement.ANY:
            assert cores == [before, before]
        else:
            assert all(len(own) == 1 for own in cores)
            assert (cores[0] == cores[1]) is (where is Placement.SAME_CORE)
