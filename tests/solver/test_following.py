"""The solver in the loop: it reaches the best thresholds, and follows jumps of p and of N."""

from __future__ import annotations

import pytest

from tests.sched.systems import r2r
from tests.solver.loop import Watched, new_slab
from trserve.sched.markov import throughput
from trserve.sched.search import search

FOLLOWS_WITHIN_S = 3.0
THEN_S = 30.0


@pytest.fixture
def watched():
    with new_slab() as slab:
        yield Watched(slab)


def check_follows(watched, begin_s, p, live):
    """Three seconds after ``begin_s`` and from there on."""
    system, then_s = r2r(p), begin_s + FOLLOWS_WITHIN_S
    best = search(system, live).tokens_per_s
    row = watched.row(then_s, live)
    (value,) = throughput(system, live, [row])
    assert value >= 0.98 * best, f"{row} yields {value:.1f} of {best:.1f}"
    assert watched.rate(then_s, then_s + THEN_S) >= 0.95 * best


@pytest.mark.parametrize(
    ("before", "after", "live"),
    [
        (0.05, 0.6, 2),
        pytest.param(0.05, 0.6, 16, marks=pytest.mark.slow),
        pytest.param(0.6, 0.05, 16, marks=pytest.mark.slow),
    ],
)
def test_p_jumps(watched, before, after, live):
    watched.run(r2r(before), live, 12)
    watched.run(r2r(after), live, FOLLOWS_WITHIN_S + THEN_S)
    check_follows(watched, 12, after, live)


@pytest.mark.parametrize(
    ("before", "after", "p"),
    [
        (16, 2, 0.35),
        pytest.param(16, 2, 0.6, marks=pytest.mark.slow),
        (2, 16, 0.05),
        pytest.param(2, 16, 0.35, marks=pytest.mark.slow),
    ],
)
def test_the_number_of_requests_jumps(watched, before, after, p):
    watched.run(r2r(p), before, 12)
    watched.run(r2r(p), after, FOLLOWS_WITHIN_S + THEN_S)
    check_follows(watched, 12, p, after)


@pytest.mark.parametrize(
    ("p", "live"), [pytest.param(0.2, 4, marks=pytest.mark.slow), (0.35, 8), (0.05, 16)]
)
def test_from_a_cold_start_it_is_never_below_eager_and_then_near_the_best(watched, p, live):
    system = r2r(p)
    watched.run(system, live, 40)
    best = search(system, live)
    assert watched.row(0.5, live) == (1, 1)
    assert watched.rate(0, 5) >= 0.93 * best.eager_tokens_per_s, "a few hundred tokens"
    assert watched.rate(5, 40) >= 0.97 * best.tokens_per_s
