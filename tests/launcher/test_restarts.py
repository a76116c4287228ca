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
def test_deaths_grow_old_while_it_could_serve(on_peer_loss: str) -> None:
    deaths = WorkerDeaths(on_peer_loss)
    for n in range(100):
        assert deaths.note(WITHIN_S * n) == AGAIN
        deaths.loaded(WITHIN_S * (n + 0.5) - 0.001)


@pytest.mark.parametrize("loads_s", [0.0, 1.0, 29.0, 31.0, 600.0])
def test_one_that_dies_at_once_is_given_up_however_slowly_it_loads(loads_s: float) -> None:
    deaths, now, verdicts = WorkerDeaths(DEGRADE), 1000.0, []
    for _ in range(3):
        verdicts.append(deaths.note(now).verdict)
        deaths.loaded(now + loads_s)
        now += loads_s + 2.0
    assert verdicts == [Verdict.RESTART, Verdict.RESTART, Verdict.GIVE_UP]


def test_starts_that_fail_do_not_grow_old_until_one_succeeds() -> None:
    deaths = WorkerDeaths(FAIL)
    assert [deaths.note(500.0 * n) for n in range(2)] == [AGAIN] * 2
    assert deaths.note(1000.0).verdict is Verdict.END_SERVER
    deaths = WorkerDeaths(FAIL)
    for n in range(20):
        assert deaths.note(1000.0 * n) == AGAIN
        assert deaths.note(1000.0 * n + 500.0) == AGAIN
        deaths.loaded(1000.0 * n + 900.0)


def test_what_a_request_explains_does_not_count() -> None:
    deaths = WorkerDeaths(FAIL)
    assert deaths.note(0.0, in_step={OTHER}) == AGAIN
    assert deaths.note(1.0, in_step={POISON, OTHER}) == AGAIN
    assert deaths.note(2.0, in_step={POISON}, poison={POISON}) == AGAIN
    assert deaths.note(3.0, in_step={OTHER}) == AGAIN  # the second that counts
    assert deaths.note(4.0).verdict is Verdict.END_SERVER


def test_what_anothers_prompt_explains_does_not_count() -> None:
    deaths = WorkerDeaths(FAIL)
    assert {deaths.note(0.0, early={(n, n)}, served=n) for n in range(9)} == {AGAIN}
    assert [deaths.note(1.0), deaths.note(1.0)] == [AGAIN, AGAIN]


@pytest.mark.parametrize("serves", [True, False])
def test_one_that_dies_in_every_step_is_not_excused_for_ever(serves: bool) -> None:
    """Each batch of three is found to be poison one by one: so it looks where every step kills."""
    deaths, verdicts, served = WorkerDeaths(DEGRADE), [], 0
    for batch in range(20):
        uses = {(batch, n) for n in range(3)}
        verdicts.append(deaths.note(float(len(verdicts)), in_step=uses, served=served).verdict)
        for use in sorted(uses):
            served += serves
            now = float(len(verdicts))
            decision = deaths.note(now, in_step={use}, poison={use}, served=served)
            verdicts.append(decision.verdict)
    if serves:
        assert set(verdicts) == {Verdict.RESTART}
    else:
        assert verdicts.index(Verdict.GIVE_UP) <= 7


def test_waiting_is_bounded() -> None:
    deaths = WorkerDeaths(WAIT)
    pauses = [deaths.note(0.0).pause_s for _ in range(2000)]
    assert pauses[:9] == [0, 0, 1, 2, 4, 8, 16, 32, 32]
    assert max(pauses) == LONGEST_PAUSE_S
