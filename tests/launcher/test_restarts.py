"""When a worker is started again: by counts, by ages, by what explains a death."""

from __future__ import annotations

import pytest

from trserve.restarts import (
    DEGRADE,
    FAIL,
    LONGEST_PAUSE_S,
    ON_PEER_LOSS,
    WAIT,
    WITHIN_S,
    Decision,
    Verdict,
    WorkerDeaths,
)

AGAIN = Decision(Verdict.RESTART)
POISON, OTHER = (3, 17), (4, 18)


@pytest.mark.parametrize(
    ("on_peer_loss", "third"),
    [
        (FAIL, Decision(Verdict.END_SERVER)),
        (DEGRADE, Decision(Verdict.GIVE_UP)),
        (WAIT, Decision(Verdict.RESTART, 1.0)),
    ],
)
def test_the_third_death_in_a_minute(on_peer_loss: str, third: Decision) -> None:
    deaths = WorkerDeaths(on_peer_loss)
    assert [deaths.note(at) for at in (100.0, 130.0, 159.9)] == [AGAIN, AGAIN, third]


@pytest.mark.parametrize("on_peer_loss", ON_PEER_LOSS)
def test_deaths_grow_old(on_peer_loss: str) -> None:
    deaths = WorkerDeaths(on_peer_loss)
    assert {deaths.note(WITHIN_S / 2 * n) for n in range(100)} == {AGAIN}


def test_starts_that_fail_do_not_grow_old_until_one_succeeds() -> None:
    deaths = WorkerDeaths(FAIL)
    assert deaths.note(0.0) == AGAIN
    assert deaths.note(500.0, loading=True) == AGAIN
    assert deaths.note(1000.0, loading=True) == AGAIN
    assert deaths.note(1500.0, loading=True).verdict is Verdict.END_SERVER
    deaths = WorkerDeaths(FAIL)
    for n in range(20):
        assert deaths.note(1000.0 * n, loading=True) == AGAIN
        deaths.loaded()


def test_what_a_request_explains_does_not_count() -> None:
    deaths = WorkerDeaths(FAIL)
    assert deaths.note(0.0, in_step={OTHER}) == AGAIN
    assert deaths.note(1.0, in_step={POISON, OTHER}) == AGAIN
    assert deaths.note(2.0, in_step={POISON}, poison={POISON}) == AGAIN
    assert deaths.note(3.0, in_step={OTHER}) == AGAIN  # the second that counts
    assert deaths.note(4.0).verdict is Verdict.END_SERVER


def test_what_anothers_prompt_explains_does_not_count() -> None:
    deaths = WorkerDeaths(FAIL)
    assert {deaths.note(0.0, early={(n, n)}) for n in range(9)} == {AGAIN}
    assert [deaths.note(1.0), deaths.note(1.0)] == [AGAIN, AGAIN]


def test_waiting_is_bounded() -> None:
    deaths = WorkerDeaths(WAIT)
    pauses = [deaths.note(0.0, loading=True).pause_s for _ in range(2000)]
    assert pauses[:9] == [0, 0, 1, 2, 4, 8, 16, 32, 32]
    assert max(pauses) == LONGEST_PAUSE_S
