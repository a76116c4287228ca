"""The Markov model against the reference values, closed forms and a plain solver."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.machine_speed import slowness
from tests.sched.systems import agrees, mixture, plain_throughput, r2r, r_stitch
from trserve.sched.explore import BudgetExceeded
from trserve.sched.markov import throughput
from trserve.sched.system import InvalidSystem, coarsened, make_system, to_quanta
from trserve.sched.vectors import is_feasible

# (N, B1 = 1, 2, ...) at p = 0.35, B0 = 1, as printed.
REFERENCE = {
    1: ["63.43"],
    2: ["98.96", "110.32"],
    3: ["142.3", "158.1", "151.9"],
    4: ["187.19", "195.44", "207.95", "190.74"],
    5: ["232.5", "237.1", "253.7", "254.2", "227.8"],
    6: ["278.0", "280.9", "291.3", "304.0", "298.0", "263.6"],
    8: ["369.21", "370.6", "374.4", "386.8", "399.05", "397.75"],
}


@pytest.mark.parametrize("n", REFERENCE)
def test_reference_values(n):
    printed = REFERENCE[n]
    found = throughput(r2r(0.35), n, [(1, b) for b in range(1, len(printed) + 1)])
    assert all(map(agrees, found, printed)), list(zip(found, printed, strict=True))


@pytest.mark.parametrize(
    ("n", "vector", "printed"),
    [(4, (2, 2), "187.6"), (4, (2, 3), "198.04"), (8, (2, 5), "393.85")],
)
def test_reference_values_of_other_vectors(n, vector, printed):
    assert agrees(throughput(r2r(0.35), n, [vector])[0], printed)


def test_a_wrong_threshold_is_costly():
    (found,) = throughput(r2r(0.05), 4, [(1, 3)])
    assert agrees(found, "395.9")


def test_r_stitch_reference_values():
    found = throughput(r_stitch(0.1, 0.8), 4, [(1, 1), (1, 2)])
    assert agrees(found[0], "380.3")
    assert agrees(found[1], "370.7")


@given(p=st.floats(0.001, 1), fast=st.integers(1, 300), slow=st.integers(1, 900))
def test_closed_form_of_one_request(p, fast, slow):
    latency = (fast / 10, slow / 10)
    (found,) = throughput(r2r(p, latency), 1, [(1, 1)])
    assert math.isclose(found, 1000 / (latency[0] + p * latency[1]), rel_tol=1e-9)


@given(p=st.floats(0.001, 1), q=st.floats(0.001, 1))
def test_closed_form_of_one_request_with_longer_visits(p, q):
    (found,) = throughput(r_stitch(p, q), 1, [(1, 1)])
    assert math.isclose(found, 1000 * (q * (1 - p) + p) / (q * 6 + p * 27.9), rel_tol=1e-9)


def test_one_request_of_r_stitch_as_printed():
    assert agrees(throughput(r_stitch(0.1, 0.8), 1, [(1, 1)])[0], "108.037")


def test_a_delay_adds_to_the_round_trip_of_one_request():
    system = r2r(0.35, delay_ms=[[0, 15.0], [7.3, 0]])
    (found,) = throughput(system, 1, [(1, 1)])
    assert math.isclose(found, 1000 / (6 + 0.35 * (27.9 + 22.3)), rel_tol=1e-9)


@st.composite
def small_systems(draw):
    models = draw(st.integers(2, 3))
    n = draw(st.integers(1, 4 if models == 2 else 3))
    shares = st.sampled_from([0.0, 0.2, 0.5, 1.0])
    p = []
    for i in range(models):
        row = [draw(shares) for _ in range(models)]
        total = sum(row)
        p.append([x / total for x in row] if total else [float(i == j) for j in range(models)])
    c = [[draw(st.sampled_from([0.0, 1.0, 2.0])) for _ in range(models)] for _ in range(models)]
    quanta = [[0] + [draw(st.integers(1, 5)) for _ in range(n)] for _ in range(models)]
    delay = [[draw(st.sampled_from([0, 0, 1, 4])) for _ in range(models)] for _ in range(models)]
    vectors = [v for v in itertools.product(range(1, n + 1), repeat=models) if is_feasible(v, n)]
    return p, c, quanta, delay, n, draw(st.sampled_from(vectors))


@given(small_systems())
def test_any_small_system_equals_the_plain_solver(case):
    p, c, quanta, delay, n, vector = case
    curves = [{b: float(row[b]) for b in range(1, n + 1)} for row in quanta]
    system = make_system(p, c, curves, delay_ms=delay, delta_ms=1.0)
    (found,) = throughput(system, n, [vector])
    assert found == pytest.approx(plain_throughput(p, c, quanta, delay, n, vector, 1.0), rel=1e-7)


def test_recurrent_classes_are_weighted_by_where_the_requests_end():
    # From model 0 for ever to 1 (a token in 10 ms) or to 2 (three in 20 ms).
    p = [[0, 0.25, 0.75], [0, 1, 0], [0, 0, 1]]
    system = make_system(p, [[1, 1, 1], [1, 1, 1], [3, 3, 3]], [1.0, 10.0, 20.0])
    (found,) = throughput(system, 1, [(1, 1, 1)])
    # The weights are those of pi, step by step, in the numerator and in the denominator.
    assert found == pytest.approx(1000 * (0.25 * 1 + 0.75 * 3) / (0.25 * 10 + 0.75 * 20))


def test_three_models_are_best_eager():
    for n in (2, 3, 4):
        vectors = [v for v in itertools.product(range(1, n + 1), repeat=3) if is_feasible(v, n)]
        found = dict(zip(vectors, throughput(mixture(), n, vectors), strict=True))
        assert max(found, key=found.get) == (1, 1, 1)


def test_several_vectors_at_once_equal_each_alone():
    system = r2r(0.35, ({1: 6.0, 4: 6.4}, {1: 27.9, 4: 29.9}))
    vectors = [v for v in itertools.product(range(1, 5), repeat=2) if is_feasible(v, 4)]
    together = throughput(system, 4, vectors)
    alone = [throughput(system, 4, [vector])[0] for vector in vectors]
    assert together == pytest.approx(alone, rel=1e-11)


def test_keys_too_long_for_an_integer_change_nothing():
    # 1 us quanta and slots of a link: far more than 63 bits a state.
    coarse = mixture(latency=(2.0, 3.0, 7.0), delay_ms=[[0, 9, 0], [0, 0, 4], [0, 0, 0]])
    fine = mixture(
        latency=(2.0, 3.0, 7.0), delay_ms=[[0, 9, 0], [0, 0, 4], [0, 0, 0]], delta_ms=1e-4
    )
    assert throughput(fine, 2, [(1, 1, 1)]) == pytest.approx(throughput(coarse, 2, [(1, 1, 1)]))


@pytest.mark.parametrize(
    ("p", "latency"), [(1e-6, (6.0, 27.9)), (0.999, (6.0, 27.9)), (0.3, (0.1, 90.0))]
)
def test_extreme_systems_are_solved(p, latency):
    eager, delayed = throughput(r2r(p, latency), 6, [(1, 1), (1, 3)])
    assert 0 < delayed <= 6000 / latency[0]
    assert 0 < eager <= 6000 / latency[0]


@pytest.mark.parametrize("vector", [(1, 5), (3, 3), (0, 1), (1, 1, 1)])
def test_infeasible_vectors_are_refused(vector):
    with pytest.raises(ValueError, match=r"feasible|models"):
        throughput(r2r(0.35), 4, [vector])


def test_the_deadline_is_kept():
    began = time.thread_time()
    with pytest.raises(BudgetExceeded):
        throughput(mixture(latency=(6.13, 9.7, 28.1)), 16, [(1, 1, 1)], deadline=began + 0.3)
    assert time.thread_time() - began < 5 * slowness()


def test_one_large_vector_takes_half_a_second_at_most():
    took = []
    for _ in range(3):
        began = time.process_time()
        throughput(r2r(0.35), 16, [(1, 1)])
        took.append(time.process_time() - began)
    assert min(took) < 0.5


@pytest.mark.parametrize(
    ("ms", "delta", "quanta"),
    [(27.9, 0.1, 279), (0.25, 0.1, 2), (0.35, 0.1, 4), (0.15, 0.1, 2), (2.5, 1, 2), (3.5, 1, 4)],
)
def test_latencies_round_half_to_even(ms, delta, quanta):
    assert to_quanta(ms, delta) == quanta


def test_a_curve_is_linear_inside_and_constant_outside():
    system = r2r(0.5, ({2: 10.0, 4: 20.0}, 5.0), delta_ms=1.0)
    assert system.latency_quanta(6)[0].tolist() == [0, 10, 10, 15, 20, 20, 20]


def test_a_coarser_quantum_keeps_the_throughput():
    system = r2r(0.35)
    rough = coarsened(system)
    assert rough.delta_ms > 3 * system.delta_ms
    assert throughput(rough, 4, [(1, 3)]) == pytest.approx(
        throughput(system, 4, [(1, 3)]), rel=0.02
    )
    assert coarsened(rough) is rough


@pytest.mark.parametrize(
    ("p", "c", "latency", "parameter"),
    [
        ([[0.5, 0.4], [1, 0]], np.ones((2, 2)), [1, 2], "P"),
        ([[1.5, -0.5], [1, 0]], np.ones((2, 2)), [1, 2], "P"),
        ([[1]], np.ones((2, 2)), [1, 2], "P"),
        ([[0.5, 0.5], [1, 0]], [[1, "x"], [1, 1]], [1, 2], "C"),
        ([[0.5, 0.5], [1, 0]], np.ones((2, 2)), [1], "latency_ms"),
        ([[0.5, 0.5], [1, 0]], np.ones((2, 2)), [1, -2], "latency_ms"),
        ([[0.5, 0.5], [1, 0]], np.ones((2, 2)), [1, {}], "latency_ms"),
        ([[0.5, 0.5], [1, 0]], np.ones((2, 2)), [1, {"x": 2}], "latency_ms"),
        ([[0.5, 0.5], [1, 0]], np.ones((2, 2)), [1, True], "latency_ms"),
    ],
)
def test_what_makes_no_sense_is_named(p, c, latency, parameter):
    with pytest.raises(InvalidSystem) as error:
        make_system(p, c, latency)
    assert error.value.parameter == parameter


def test_a_step_shorter_than_a_quantum_is_named():
    with pytest.raises(InvalidSystem, match="delta_ms"):
        throughput(r2r(0.35, (0.01, 27.9)), 2, [(1, 1)])
