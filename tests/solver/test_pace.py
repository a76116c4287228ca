"""How often it looks, and how often it solves."""

from __future__ import annotations

from trserve.solver.pace import (
    BUSY_LOOK_S,
    FOLLOW_S,
    IDLE_AFTER_S,
    IDLE_LOOK_S,
    LookPace,
    Peak,
    SolvePace,
)


def test_an_idle_server_is_looked_at_once_a_second():
    pace = LookPace()
    assert pace.wait_s(0.0, busy=False) == IDLE_LOOK_S
    assert pace.wait_s(10.0, busy=True) == BUSY_LOOK_S
    assert pace.wait_s(10.0 + IDLE_AFTER_S - 0.1, busy=False) == BUSY_LOOK_S
    assert pace.wait_s(10.0 + IDLE_AFTER_S, busy=False) == IDLE_LOOK_S


def test_what_can_wait_takes_a_small_share_of_the_processor():
    pace, now, solutions = SolvePace(), 0.0, 0
    while now < 600:
        if pace.may_ask(now):
            pace.asked(now)
            if pace.may_solve(now, urgent=False):
                now += 0.4
                solutions += 1
                pace.solved(now, 0.4)
        now += 0.1
    assert 0.02 < solutions * 0.4 / 600 < 0.06


def test_a_change_is_followed_at_once():
    pace = SolvePace()
    pace.solved(10.0, 1.0)
    assert not pace.may_solve(11.0, urgent=False)
    assert pace.may_solve(11.0, urgent=True)
    pace.follow(11.0)
    assert pace.may_solve(11.0 + FOLLOW_S - 0.1, urgent=False)
    assert not pace.may_solve(11.0 + FOLLOW_S, urgent=False)


def test_a_mixture_of_before_and_after_is_waited_out_for_a_second():
    pace = SolvePace()
    pace.follow(10.0)
    assert not pace.may_solve(10.5, urgent=True, settled=False)
    assert pace.may_solve(10.5, urgent=True)
    assert pace.may_solve(11.1, urgent=True, settled=False)


def test_the_peak_holds_for_five_seconds_and_not_for_fifteen():
    peak = Peak()
    assert peak.add(0.0, 16) == 16
    for tenth in range(1, 50):
        assert peak.add(tenth / 10, 2) == 16
    assert 2 in [peak.add(tenth / 10, 2) for tenth in range(50, 150)]
    assert peak.add(15.0, 2) == 2


def test_a_peak_before_a_long_idle_time_is_forgotten():
    peak = Peak()
    peak.add(0.0, 16)
    assert peak.add(100.0, 3) == 3
