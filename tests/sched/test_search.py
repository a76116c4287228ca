"""The search for the best thresholds: reference optima, ties, budgets and fallbacks."""

from __future__ import annotations

import itertools
import time

import pytest

from tests.machine_speed import slowness
from tests.sched.systems import agrees, mixture, r2r
from trserve.sched.markov import throughput
from trserve.sched.search import (
    COARSE,
    EXACT,
    SIMULATION,
    best_of,
    evaluate,
    feasible_count,
    feasible_vectors,
    search,
)
from trserve.sched.table import ThresholdTable
from trserve.sched.vectors import is_feasible


@pytest.mark.parametrize(
    ("n", "vector", "tokens_per_s"),
    [
        (2, (1, 2), "110.32"),
        (3, (1, 2), "158.1"),
        (4, (1, 3), "207.95"),
        (8, (1, 5), "399.05"),
        (16, (2, 10), "785.39"),
    ],
)
def test_reference_optima(n, vector, tokens_per_s):
    began = time.process_time()
    found = search(r2r(0.35), n)
    took = time.process_time() - began
    assert found.vector == vector
    assert agrees(found.tokens_per_s, tokens_per_s)
    assert found.method == EXACT
    assert len(found.values) == feasible_count(2, n)
    assert took < 5
    if n == 16:
        assert agrees(found.eager_tokens_per_s, "733.62")


@pytest.mark.parametrize(
    ("p", "n", "b1", "tokens_per_s", "gain"),
    [
        (0.05, 4, 1, "510.1", 0),
        (0.05, 8, 1, "988.7", 0),
        (0.10, 4, 1, "399.4", 0),
        (0.10, 8, 2, "781.0", 0.015),
        (0.20, 4, 2, "284.5", 0.03),
        (0.20, 8, 3, "549.2", 0.02),
        (0.35, 4, 3, "207.95", 0.11),
        (0.35, 8, 5, "399.05", 0.08),
        (0.60, 4, 3, "150.88", 0.28),
        (0.60, 8, 6, "294.83", 0.25),
    ],
)
def test_the_best_threshold_moves_with_p(p, n, b1, tokens_per_s, gain):
    found = search(r2r(p), n, candidates=[(1, b) for b in range(1, n + 1)])
    assert found.vector == (1, b1)
    assert agrees(found.tokens_per_s, tokens_per_s)
    assert found.gain == pytest.approx(gain, abs=0.0051)


@pytest.mark.parametrize("models", [2, 3, 4])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_feasible_vectors_are_all_there_in_the_order_of_ties(models, n):
    found = list(feasible_vectors(models, n))
    every = itertools.product(range(1, n + 1), repeat=models)
    assert found == sorted((v for v in every if is_feasible(v, n)), key=lambda v: (sum(v), v))
    assert len(found) == feasible_count(models, n)


def test_ties_go_to_the_smaller_sum_then_to_the_smaller_vector():
    values = {(3, 1): 10.0, (1, 3): 10.0 * (1 + 5e-10), (2, 1): 9.99, (1, 2): 10.0 * (1 - 3e-10)}
    assert best_of(values) == (1, 2)
    del values[1, 2]
    assert best_of(values) == (1, 3)
    assert best_of({(1, 4): 1.0, (2, 2): 1.0}) == (2, 2)
    assert best_of({(1, 1): 1.0, (1, 2): 1.0 + 1e-8}) == (1, 2)


def test_without_routing_every_tie_is_eager():
    assert search(r2r(0.0), 4).vector == (1, 1)


def test_one_vector_beside_eager():
    found = evaluate(r2r(0.35), 4, (2, 3))
    assert found.vector == (2, 3)
    assert found.tokens_per_s == pytest.approx(198.04, abs=0.01)
    assert found.eager_tokens_per_s == pytest.approx(187.19, abs=0.01)


def test_past_the_budget_the_search_is_coarse_and_says_so():
    system = r2r(0.35, (6.13, 27.9))
    # Every quantum of the residual times is met, so all 136 chains are three times as large.
    found = search(system, 16, budget_s=1.5)
    assert found.method in (COARSE, SIMULATION)
    exact = throughput(system, 16, [found.vector, (1, 1)])
    assert found.tokens_per_s == pytest.approx(exact[0], rel=0.02)
    assert exact[0] > exact[1]


def test_what_is_too_large_is_simulated_and_says_so():
    began = time.process_time()
    found = search(mixture(), 16, budget_s=2)
    assert found.method == SIMULATION
    assert time.process_time() - began < 8 * slowness()
    assert found.standard_error > 0
    # Eager is best up to 4 requests; here thresholds can win no more than the noise.
    assert found.tokens_per_s == pytest.approx(found.eager_tokens_per_s, rel=0.02)


def test_a_simulated_value_agrees_with_the_exact_one():
    system = r2r(0.35)
    found = search(system, 8, budget_s=1e-9)
    (exact,) = throughput(system, 8, [found.vector])
    assert found.method == SIMULATION
    assert abs(found.tokens_per_s - exact) < 4 * found.standard_error
    assert search(system, 8, budget_s=1e-9) == found


def test_many_models_are_thinned_not_refused():
    shares = [0.4, 0.2, 0.2, 0.1, 0.1]
    system = mixture(shares, (2.0, 4.0, 5.0, 7.0, 9.0))
    began = time.process_time()
    found = search(system, 24, budget_s=1)
    assert time.process_time() - began < 6 * slowness()
    assert feasible_count(5, 24) > 90_000
    assert is_feasible(found.vector, 24)
    assert found.method == SIMULATION


def test_more_models_than_can_be_enumerated_are_answered_in_time():
    shares = [1 / 9] * 9
    began = time.process_time()
    found = search(mixture(shares, [5.0] * 9), 40, budget_s=1)
    assert time.process_time() - began < 10 * slowness()
    assert found.vector == (1,) * 9


def test_a_table_gives_the_next_smaller_row():
    table = ThresholdTable(2, {2: (1, 2), 8: (1, 5)})
    assert [table.row(n) for n in (0, 1, 2, 7, 8, 99)] == [
        (1, 1),
        (1, 1),
        (1, 2),
        (1, 2),
        (1, 5),
        (1, 5),
    ]
    with pytest.raises(ValueError, match="not feasible"):
        ThresholdTable(2, {3: (2, 3)})


@pytest.mark.parametrize("vector", [(1, 1), (1, 3), (3, 3), (2, 1, 5), (7, 1)])
def test_a_fixed_vector_is_lowered_where_it_is_not_feasible(vector):
    table = ThresholdTable.fixed(vector)
    for n in range(1, 20):
        assert is_feasible(table.row(n), n)
        if is_feasible(vector, n):
            assert table.row(n) == vector
