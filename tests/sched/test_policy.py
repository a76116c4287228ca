"""The policy: it starts eager, moves for sure gains, follows changes, and backs off."""

from __future__ import annotations

import time

import pytest

from tests.sched.systems import r2r
from trserve.sched.estimator import Estimate
from trserve.sched.markov import throughput
from trserve.sched.policy import ThresholdPolicy
from trserve.sched.search import search


def known(p, live, latency=(6.0, 27.9), decisions=3000.0) -> Estimate:
    return Estimate(r2r(p, latency), (decisions, decisions), live, 0)


@pytest.fixture
def policy():
    return ThresholdPolicy(2, 16)


def test_it_starts_eager(policy):
    assert all(policy.table.row(n) == (1, 1) for n in range(40))
    assert policy.predicted(4) is None


@pytest.mark.parametrize("p", [0.05, 0.1, 0.2, 0.35, 0.6])
@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_its_rows_are_close_to_the_best(p, n):
    policy = ThresholdPolicy(2, 16)
    policy.update(known(p, n))
    system = r2r(p)
    chosen, eager = throughput(system, n, [policy.table.row(n), (1, 1)])
    if n <= 8:
        assert chosen >= 0.98 * search(system, n).tokens_per_s
    else:
        best = {0.05: 1960.84, 0.35: 785.39, 0.6: 580.58}.get(p, eager)
        assert chosen >= 0.98 * best
    assert chosen >= 0.999 * eager


def test_what_it_promises_is_what_the_model_says(policy):
    policy.update(known(0.35, 4))
    promised = policy.predicted(4)
    assert promised.vector == policy.table.row(4)
    assert promised.tokens_per_s == pytest.approx(207.95, rel=0.02)
    assert promised.eager_tokens_per_s == pytest.approx(187.19, rel=0.02)


def test_it_follows_jumps_of_p_and_of_n(policy):
    policy.update(known(0.05, 16))
    assert policy.table.row(16)[1] <= 4
    assert policy.update(known(0.6, 16))
    assert policy.table.row(16)[1] >= 9
    # N falls: the row of the new N is in the table already.
    assert sum(policy.table.row(2)) <= 3
    assert policy.update(known(0.05, 2))
    assert policy.table.row(2) == (1, 1)


def test_it_solves_again_in_well_under_a_second(policy):
    policy.update(known(0.35, 16))
    began = time.process_time()
    policy.update(known(0.33, 16))
    assert time.process_time() - began < 1.5


def test_noise_does_not_make_it_hop(policy):
    policy.update(known(0.35, 4))
    before = policy.table.row(4)
    for p in (0.34, 0.36, 0.35, 0.345, 0.355):
        policy.update(known(p, 4))
        assert policy.table.row(4) == before


def test_an_uncertain_gain_is_not_taken():
    sure, unsure = ThresholdPolicy(2, 8), ThresholdPolicy(2, 8)
    sure.update(known(0.2, 4))
    unsure.update(known(0.2, 4, decisions=20.0))
    assert sure.table.row(4) != (1, 1)
    assert unsure.table.row(4) == (1, 1)


def test_measurements_below_eager_send_it_back_for_a_while(policy):
    policy.update(known(0.35, 4))
    eager = policy.predicted(4).eager_tokens_per_s
    assert not policy.measured(4, 0.9 * eager, 0.01 * eager)
    assert not policy.measured(4, 0.9 * eager, 0.01 * eager)
    # A good one in between starts the count again.
    assert not policy.measured(4, 1.1 * eager, 0.01 * eager)
    assert [policy.measured(4, 0.9 * eager, 0.01 * eager) for _ in range(3)] == [False, False, True]
    assert policy.table.row(4) == (1, 1)
    updates = 0
    while policy.table.row(4) == (1, 1):
        policy.update(known(0.35, 4))
        updates += 1
        assert updates < 30
    assert updates >= 5


def test_noisy_measurements_do_not(policy):
    policy.update(known(0.35, 4))
    eager = policy.predicted(4).eager_tokens_per_s
    assert not any(policy.measured(4, 0.9 * eager, 0.1 * eager) for _ in range(10))


def test_an_overhead_that_eager_has_too_is_no_reason():
    policy = ThresholdPolicy(2, 8)
    # p = 0.05: the row is eager, and measures a tenth below the model.
    policy.update(known(0.05, 4))
    for _ in range(40):
        policy.measured(4, 0.9 * policy.predicted(4).eager_tokens_per_s, 1.0)
    policy.update(known(0.35, 4))
    promised = policy.predicted(4)
    assert promised.vector != (1, 1)
    assert not any(policy.measured(4, 0.93 * promised.eager_tokens_per_s, 0.1) for _ in range(10))


def test_many_requests_are_planned_for_too():
    policy = ThresholdPolicy(2, 48, budget_s=0.3)
    policy.update(known(0.35, 32))
    row = policy.table.row(32)
    assert row[1] >= 14
    assert policy.table.row(48)[1] >= row[1] - 1
    assert policy.predicted(32).tokens_per_s > policy.predicted(32).eager_tokens_per_s
