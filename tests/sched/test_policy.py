"""The policy: it starts eager, moves for sure gains, follows changes, and backs off."""

from __future__ import annotations

import time

import pytest

from tests.machine_speed import slowness
from tests.sched.systems import r2r
from trserve.sched import policy as policy_module
from trserve.sched.estimator import Estimate, Estimator
from trserve.sched.journeys import MarkovSource
from trserve.sched.markov import throughput
from trserve.sched.policy import ThresholdPolicy, _scaled
from trserve.sched.search import search
from trserve.sched.simulator import simulate
from trserve.sched.table import ThresholdTable
from trserve.sched.vectors import is_feasible


def known(p, live, latency=(6.0, 27.9), decisions=3000.0) -> Estimate:
    return Estimate(r2r(p, latency), (decisions, decisions), live, 0)


@pytest.fixture
def policy():
    return ThresholdPolicy(2, 16)


def test_it_starts_eager(policy):
    assert all(policy.table.row(n) == (1, 1) for n in range(40))
    assert policy.predicted(4) is None


@pytest.mark.parametrize(
    ("p", "n"), [(p, n) for p in (0.05, 0.1, 0.2, 0.35, 0.6) for n in (2, 8, 16)]
)
def test_its_rows_are_close_to_the_best(p, n):
    policy = ThresholdPolicy(2, 16)
    policy.update(known(p, n))
    system = r2r(p)
    chosen, eager = throughput(system, n, [policy.table.row(n), (1, 1)])
    assert chosen >= 0.99 * search(system, n).tokens_per_s
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


@pytest.mark.parametrize("live", [4, 16])
def test_the_present_row_can_come_first_and_the_others_come_next(live):
    policy, whole = ThresholdPolicy(2, 32), ThresholdPolicy(2, 32)
    for each in (policy, whole):
        each.update(known(0.05, live))
    before = policy.table
    whole.update(known(0.6, live))
    assert policy.update(known(0.6, live), present_only=True)
    assert policy.table.row(live) == whole.table.row(live) != before.row(live)
    other = 8 if live == 4 else 4
    assert policy.table.row(other) == before.row(other)
    assert policy.predicted(live).tokens_per_s == whole.predicted(live).tokens_per_s
    assert policy.update(known(0.6, live))
    assert policy.table == whole.table
    assert not policy.update(known(0.6, live)), "no news"


def test_the_present_row_takes_less_than_all_of_them(monkeypatch):
    searched = []

    def counted(system, count, **options):
        searched.append(count)
        return search(system, count, **options)

    monkeypatch.setattr(policy_module, "search", counted)
    policy = ThresholdPolicy(2, 32)
    policy.update(known(0.05, 16))
    searched.clear()
    policy.update(known(0.6, 16), present_only=True)
    present = searched.copy()
    searched.clear()
    policy.update(known(0.6, 16))
    assert max(present) == 16 < max(searched)
    assert 0 < len(present) <= len(searched) / 2


@pytest.mark.parametrize(("live", "dips"), [(16, (14, 15)), (8, (7,))])
def test_a_dip_of_n_while_answers_follow_each_other_opens_no_gate(policy, live, dips):
    policy.update(known(0.35, live))
    row = policy.table.row(live)
    assert row != policy.table.row(live * 3 // 4)
    for count in dips:
        assert policy.table.row(count) == row
        system = r2r(0.35)
        chosen, eager = throughput(system, count, [row, (1, 1)])
        assert chosen >= eager


def test_it_solves_again_in_well_under_a_second(policy):
    policy.update(known(0.35, 16))
    began = time.process_time()
    policy.update(known(0.33, 16))
    assert time.process_time() - began < 1.5 * slowness()


def test_noise_does_not_make_it_hop(policy):
    policy.update(known(0.35, 4))
    before = policy.table.row(4)
    for p in (0.34, 0.36, 0.355):
        policy.update(known(p, 4))
        assert policy.table.row(4) == before


def test_what_is_no_news_is_not_solved_again(policy):
    policy.update(known(0.35, 16))
    began = time.process_time()
    for _ in range(100):
        assert not policy.update(known(0.352, 16.3, decisions=1000.0))
    assert time.process_time() - began < 0.2 * slowness()


def test_an_uncertain_gain_is_not_taken():
    sure, unsure = ThresholdPolicy(2, 8), ThresholdPolicy(2, 8)
    sure.update(known(0.2, 4))
    unsure.update(known(0.2, 4, decisions=20.0))
    assert sure.table.row(4) != (1, 1)
    assert unsure.table.row(4) == (1, 1)


@pytest.mark.parametrize("decisions", [60.0, 120.0])
def test_a_gain_that_is_not_certain_does_not_cost_the_row_in_force(decisions):
    policy = ThresholdPolicy(2, 8)
    policy.update(known(0.2, 8))
    before = policy.table.row(8)
    policy.update(known(0.25, 8, decisions=decisions))
    assert before == policy.table.row(8) != (1, 1)
    kept, eager = throughput(r2r(0.25), 8, [before, (1, 1)])
    assert kept > eager


def test_measurements_below_eager_send_it_back_for_a_while():
    policy = ThresholdPolicy(2, 4)
    policy.update(known(0.35, 4))
    eager = policy.predicted(4).eager_tokens_per_s
    assert not policy.measured(4, 0.9 * eager, 0.01 * eager)
    assert not policy.measured(4, 0.9 * eager, 0.01 * eager)
    # A good one in between starts the count again.
    assert not policy.measured(4, 1.1 * eager, 0.01 * eager)
    assert [policy.measured(4, 0.9 * eager, 0.01 * eager) for _ in range(3)] == [False, False, True]
    assert policy.table.row(4) == (1, 1)
    assert policy.predicted(4).tokens_per_s == eager
    updates = 0
    while policy.table.row(4) == (1, 1):
        policy.update(known(0.35, 4))
        updates += 1
        assert updates < 100
    assert updates >= 20


def test_noisy_measurements_do_not(policy):
    policy.update(known(0.35, 4))
    eager = policy.predicted(4).eager_tokens_per_s
    assert not any(policy.measured(4, 0.9 * eager, 0.1 * eager) for _ in range(10))


def test_luck_under_eager_is_no_reason(policy):
    policy.update(known(0.05, 4))
    for _ in range(3):
        policy.measured(4, 2.0 * policy.predicted(4).eager_tokens_per_s, 1.0)
    policy.update(known(0.35, 4))
    promised = policy.predicted(4)
    assert promised.vector != (1, 1)
    assert not any(policy.measured(4, promised.tokens_per_s, 0.1) for _ in range(10))


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
    policy = ThresholdPolicy(2, 48, budget_s=0.2)
    policy.update(known(0.35, 24))
    row = policy.table.row(24)
    assert row[1] >= 10
    assert policy.table.row(48)[1] >= row[1] - 1
    assert policy.predicted(24).tokens_per_s > policy.predicted(24).eager_tokens_per_s


class Auto:
    """Estimator and policy in the loop; solves once a simulated second, late by another one."""

    def __init__(self, most):
        self.estimator, self.policy = Estimator(2), ThresholdPolicy(2, most)
        self.solve_at, self.last_ms, self.pending = 1000.0, 0.0, None
        self.in_force = self.policy.table
        self.tokens = []
        self.rows = []

    def step(self, now_ms, live, event):
        self.estimator.observe(event)
        self.estimator.observe_live(live, now_ms - self.last_ms)
        self.last_ms = now_ms
        self.tokens.append((now_ms, sum(event.committed)))
        self.rows.append((now_ms, self.in_force.row(live)))
        if now_ms < self.solve_at:
            return None
        self.solve_at += 1000
        ready, self.pending = self.pending, None
        known = self.estimator.estimate()
        if known is not None and self.policy.update(known):
            self.pending = self.policy.table
        self.in_force = ready or self.in_force
        return ready

    def rate(self, begin_s, end_s):
        span = [tokens for at, tokens in self.tokens if begin_s * 1000 <= at < end_s * 1000]
        return sum(span) / (end_s - begin_s)


class Jump:
    """Requests whose p changes while they run."""

    entry = 0

    def __init__(self, before, after, clock, at_s):
        self.journeys = [MarkovSource(r2r(p), 1).next() for p in (before, after)]
        self.clock, self.at_ms = clock, at_s * 1000

    def next(self):
        return self

    def step(self, model):
        return self.journeys[self.clock.last_ms >= self.at_ms].step(model)


@pytest.mark.parametrize(
    ("p", "n"), [(0.35, 4), pytest.param(0.05, 8, marks=pytest.mark.slow), (0.6, 2)]
)
def test_in_the_loop_it_reaches_97_percent_of_the_best(p, n):
    auto, system = Auto(n), r2r(p)
    simulate(system, n, ThresholdTable.eager(2), MarkovSource(system, 1), seconds=70, control=auto)
    best = search(system, n)
    assert auto.rate(10, 70) >= 0.97 * best.tokens_per_s
    assert auto.rate(10, 70) >= 0.98 * best.eager_tokens_per_s


@pytest.mark.parametrize(
    ("before", "after"), [pytest.param(0.05, 0.6, marks=pytest.mark.slow), (0.6, 0.05)]
)
def test_in_the_loop_it_follows_a_jump_of_p(before, after):
    auto = Auto(8)
    source = Jump(before, after, auto, 15)
    simulate(r2r(before), 8, ThresholdTable.eager(2), source, seconds=48, control=auto)
    best = search(r2r(after), 8)
    # Three seconds after the jump, and from there on.
    (then,) = throughput(r2r(after), 8, [next(row for at, row in auto.rows if at >= 18_000)])
    assert then >= 0.98 * best.tokens_per_s
    assert auto.rate(18, 48) >= 0.95 * best.tokens_per_s


@pytest.mark.parametrize("models", [2, 3, 4, 6])
def test_candidates_of_many_models_stay_few(models: int) -> None:
    vector = (2,) * (models - 1) + (10,)
    found = _scaled(vector, 4 / 3, 16 * models)
    assert (3,) * (models - 1) + (13,) in found
    assert len(found) == len(set(found)) <= 125
    assert all(is_feasible(candidate, 16 * models) for candidate in found)
