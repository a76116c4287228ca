"""Tokens per second while N stands still."""

from __future__ import annotations

import random

import pytest

from trserve.solver.meter import BATCHES, Meter


def feed(meter, begin_s, seconds, live, per_s, condition="same", step_s=0.1):
    """Looks every ``step_s``; returns what was measured, and when it ended."""
    found = []
    rng = random.Random(3)
    for turn in range(round(seconds / step_s)):
        now = begin_s + turn * step_s
        n = live(turn) if callable(live) else live
        made = meter.add(now, n, round(per_s * step_s + rng.gauss(0, 1)), condition)
        found += [made] if made else []
    return found


def test_it_measures_the_mean_with_its_error():
    meter = Meter()
    found = feed(meter, 0.0, 21, 4, 200.0)
    assert len(found) == 3
    for one in found:
        assert one.live == 4
        assert one.tokens_per_s == pytest.approx(200, rel=0.03)
        assert 0 < one.standard_error < 4
    assert meter.tokens_per_s == pytest.approx(200, rel=0.03)


def test_nothing_is_measured_while_n_moves():
    meter = Meter()
    assert feed(meter, 0.0, 30, lambda turn: turn % 7, 200.0) == []
    assert meter.tokens_per_s == 0
    assert feed(meter, 30.0, 30, lambda turn: 2 + turn // 20 % 2, 200.0) == []


def test_an_answer_that_ends_while_the_next_begins_is_no_move():
    meter = Meter()
    assert feed(meter, 0.0, 14, lambda turn: 3 if turn % 10 == 4 else 4, 200.0)


def test_many_requests_may_be_one_or_two_more_or_less():
    meter = Meter()
    assert feed(meter, 0.0, 14, lambda turn: 16 - turn % 3, 200.0)
    assert feed(meter, 20.0, 14, lambda turn: 16 - 3 * (turn % 3), 200.0) == []


@pytest.mark.parametrize("condition", [None, "other"])
def test_what_came_under_another_condition_is_not_put_together(condition):
    meter = Meter()
    begin = 0.0
    for _ in range(5):
        assert feed(meter, begin, BATCHES - 1.5, 4, 200.0) == []
        assert feed(meter, begin + BATCHES - 1.5, 0.5, 4, 900.0, condition) == []
        begin += BATCHES


def test_a_gap_is_not_averaged_over():
    meter = Meter()
    feed(meter, 0.0, 5, 4, 200.0)
    assert feed(meter, 20.0, 4, 4, 200.0) == []
    assert meter.tokens_per_s == pytest.approx(200, rel=0.05)


def test_nobody_is_not_measured():
    meter = Meter()
    assert feed(meter, 0.0, 20, 0, 0.0) == []
