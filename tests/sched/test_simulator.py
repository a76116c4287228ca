"""The discrete-event simulator against the Markov model, and what it does beyond it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.sched.systems import mixture, r2r, r_stitch
from trserve.sched.gate import Reason
from trserve.sched.journeys import (
    FINISHED,
    MarkovSource,
    PositionalSource,
    Replay,
    TraceSource,
    Visit,
)
from trserve.sched.markov import throughput
from trserve.sched.simulator import simulate
from trserve.sched.table import ThresholdTable

CELLS = [
    (mixture(), 3, (1, 1, 1)),
    (mixture(), 4, (1, 1, 1)),
    (mixture(), 4, (1, 2, 1)),
    (mixture(), 4, (2, 1, 2)),
    (mixture(latency=({1: 6.0, 4: 9.0}, 10.0, 28.0)), 4, (1, 1, 2)),
    (mixture(delay_ms=[[0, 5, 5], [5, 0, 5], [5, 5, 0]]), 4, (1, 2, 2)),
    (r2r(0.35), 2, (1, 1)),
    (r2r(0.35), 4, (1, 3)),
    (r2r(0.35), 4, (2, 3)),
    (r2r(0.05), 8, (1, 1)),
    (r2r(0.35), 16, (2, 10)),
    (r2r(0.35, delay_ms=[[0, 15.0], [7.3, 0]]), 4, (1, 3)),
    (r_stitch(0.1, 0.8), 4, (1, 2)),
]


def run(system, n, vector, seed=1, seconds=120.0, **more):
    table = ThresholdTable.fixed(vector)
    return simulate(system, n, table, MarkovSource(system, seed), seconds=seconds, **more)


def test_the_model_is_inside_the_95_percent_interval():
    inside = 0
    for system, n, vector in CELLS:
        (exact,) = throughput(system, n, [vector])
        found = run(system, n, vector, max_wait_ms=math.inf)
        inside += found.low <= exact <= found.high
        # Whatever the interval: far off is wrong.
        assert found.tokens_per_s == pytest.approx(exact, rel=0.03)
        assert found.half_width < 0.03 * exact
    # Of 13 intervals of 95 %, all but two are right with a probability of 97.5 %.
    assert inside >= len(CELLS) - 2


def test_intervals_cover_the_truth_as_often_as_they_say(full):
    system = mixture()
    (exact,) = throughput(system, 4, [(1, 1, 1)])
    runs = 200 if full else 40
    found = [run(system, 4, (1, 1, 1), seed, 30.0) for seed in range(runs)]
    covered = sum(outcome.low <= exact <= outcome.high for outcome in found)
    assert 0.85 * runs <= covered <= runs


def test_it_is_repeatable_and_seeds_differ():
    assert run(r2r(0.35), 4, (1, 3), seed=5) == run(r2r(0.35), 4, (1, 3), seed=5)
    assert run(r2r(0.35), 4, (1, 3), seed=5) != run(r2r(0.35), 4, (1, 3), seed=6)


def test_the_default_safety_net_costs_nothing_and_hardly_opens():
    for system, n, vector in [(r2r(0.35), 8, (1, 5)), (r2r(0.35), 16, (2, 10))]:
        free = run(system, n, vector, max_wait_ms=math.inf)
        netted = run(system, n, vector)
        assert netted.tokens_per_s > 0.99 * free.tokens_per_s
        assert netted.openings[Reason.TIMEOUT] < 0.01 * sum(netted.openings.values())
        assert free.openings[Reason.TIMEOUT] == 0


def test_a_wait_of_one_step_erases_part_of_the_gain():
    (exact,) = throughput(r2r(0.6), 8, [(1, 6)])
    short = run(r2r(0.6), 8, (1, 6), max_wait_ms=6.0)
    assert short.tokens_per_s < 0.95 * exact


def test_the_safety_net_needs_no_other_event():
    # One request is away for a second, the other waits for it at B = 2: only a timer can help.
    found = run(r2r(0.1, (1.0, 1000.0)), 2, (2, 1), max_wait_ms=20.0)
    assert found.openings[Reason.TIMEOUT] > 500


def test_a_table_that_is_not_feasible_still_runs():
    table = ThresholdTable(2, {9: (5, 5)})
    system = r2r(0.35)
    # Nine rows of room, three requests live: N indexes the eager rows.
    found = simulate(system, 3, table, MarkovSource(system, 1), seconds=10)
    assert found.tokens_per_s > 100


def test_one_recorded_request_replays_step_by_step():
    journey = Replay([Visit(0, 2, 1.0), Visit(1, 1, 1.0), Visit(0, 1, 1.0)])
    assert journey.entry == 0
    assert journey.step(0) == (0, 0.5)
    assert journey.step(0) == (1, 0.5)
    assert journey.step(1) == (0, 1.0)
    assert journey.step(0) == (FINISHED, 1.0)


def test_a_deterministic_trace_has_a_throughput_known_by_hand():
    # 3 steps of 6 ms, then one of 27.9 ms, that commit 2 + 1 tokens: 45.9 ms a round.
    visits = [Visit(0, 3, 2.0), Visit(1, 1, 1.0)] * 40
    found = simulate(
        r2r(0.35),
        1,
        ThresholdTable.eager(2),
        TraceSource([visits], seed=0),
        seconds=459.0,
    )
    assert found.tokens_per_s == pytest.approx(3000 / 45.9, rel=1e-3)


def test_geometric_traces_replay_like_the_model():
    rng = np.random.default_rng(3)
    requests = []
    for _ in range(200):
        visits = []
        for steps in rng.geometric(0.35, size=60).tolist():
            visits += [Visit(0, steps, steps - 1.0), Visit(1, 1, 1.0)]
        requests.append(visits)
    (exact,) = throughput(r2r(0.35), 4, [(1, 3)])
    found = simulate(
        r2r(0.35), 4, ThresholdTable.fixed((1, 3)), TraceSource(requests, 1), seconds=200
    )
    assert found.tokens_per_s == pytest.approx(exact, rel=0.03)


def test_routing_by_position_lies_between_its_phases():
    early, late = r2r(0.6), r2r(0.05)
    rates = [throughput(system, 4, [(1, 1)])[0] for system in (early, late)]
    source = PositionalSource(early, [(0, early.routing), (100, late.routing)], 200.0, seed=1)
    found = simulate(early, 4, ThresholdTable.eager(2), source, seconds=120)
    assert rates[0] * 1.1 < found.tokens_per_s < rates[1] * 0.9
    assert found.latency_ms is not None
    # Little's law: N requests of 200 tokens each.
    assert found.latency_ms == pytest.approx(4 * 200 / found.tokens_per_s * 1000, rel=0.05)


def test_arrivals_are_served_as_they_come():
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(500, size=400)).tolist()
    system = r2r(0.35)
    found = simulate(
        system,
        16,
        ThresholdTable.fixed((1, 3)),
        PositionalSource(system, [(0, system.routing)], 40.0, seed=1),
        seconds=200,
        arrivals_ms=arrivals,
    )
    assert found.tokens_per_s == pytest.approx(40 * 1000 / 500, rel=0.15)
    assert 0.5 < found.mean_live < 4
    assert found.latency_ms == pytest.approx(found.mean_live * 500, rel=0.15)


def test_arrivals_beyond_the_room_wait_outside():
    system = r2r(0.35)
    found = simulate(
        system,
        2,
        ThresholdTable.eager(2),
        PositionalSource(system, [(0, system.routing)], 40.0, seed=1),
        seconds=100,
        arrivals_ms=[0.0] * 400,
    )
    (full_speed,) = throughput(system, 2, [(1, 1)])
    assert found.mean_live == pytest.approx(2)
    assert found.tokens_per_s == pytest.approx(full_speed, rel=0.05)
    assert max(found.rows[0] / found.steps[0], found.rows[1] / found.steps[1]) <= 2
