"""A heartbeat that stands still, as the watchdog sees it."""

from __future__ import annotations

from trserve.watchdog import LONGEST_LOOK_S, Watchdog


def first_hang(watchdog: Watchdog, beats: list[int], *, every_s: float = 1.0) -> int | None:
    """At which look worker 0 was said to hang."""
    for look, beat in enumerate(beats):
        if watchdog.hangs(0, beat, 100.0 + look * every_s):
            return look
    return None


def test_a_heart_that_beats_is_left_alone() -> None:
    assert first_hang(Watchdog(2.0), list(range(100))) is None
    assert first_hang(Watchdog(2.0), [n // 2 for n in range(100)]) is None


def test_one_that_stands_still_is_found_in_time() -> None:
    assert first_hang(Watchdog(2.0), [7] * 10) == 2
    assert first_hang(Watchdog(30.0), [*range(50), *[50] * 50]) == 50 + 30


def test_zero_is_off() -> None:
    assert first_hang(Watchdog(0.0), [7] * 1000) is None


def test_a_launcher_that_slept_kills_nobody_for_it() -> None:
    watchdog = Watchdog(30.0)
    assert not watchdog.hangs(0, 7, 0.0)
    assert not watchdog.hangs(0, 7, 3600.0)
    assert not watchdog.hangs(0, 8, 3601.0)
    assert first_hang(Watchdog(30.0), [7] * 100, every_s=10.0) == 30.0 / LONGEST_LOOK_S


def test_workers_are_told_apart_and_forgotten() -> None:
    watchdog = Watchdog(2.0)
    for at in range(2):
        assert not watchdog.hangs(0, 7, float(at))
    watchdog.forget(0)
    assert not watchdog.hangs(1, 7, 2.0)
    assert not watchdog.hangs(0, 7, 2.0)
    assert not watchdog.hangs(0, 7, 3.0)
    assert watchdog.hangs(0, 7, 4.0)
