"""The solver by single looks: what it says when, what it costs, and bad states."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from tests.sched.systems import r2r
from tests.solver.loop import Watched, new_slab, set_live, write_step
from trserve.ipc.estimates import read_report
from trserve.ipc.slab import WorkerStatus
from trserve.sched.estimator import StepEvent
from trserve.sched.table import ThresholdTable
from trserve.solver.solver import Solver


@pytest.fixture
def slab():
    with new_slab() as slab:
        yield slab


def write_r2r(slab, steps, p_percent=35, latency=(6.0, 27.9)):
    """So many steps of four requests at each model, at the shares of R2R."""
    for step in range(steps):
        leaving = (4 * (step + 1) * p_percent) // 100 - (4 * step * p_percent) // 100
        write_step(slab, StepEvent(0, latency[0], 4, (4 - leaving, leaving), (4 - leaving, 0)))
        write_step(slab, StepEvent(1, latency[1], 2, (2, 0), (2, 0)))


def serve(solver, slab, begin_s, seconds, **more):
    """Looks while four requests are live; returns all rows that were told."""
    set_live(slab, 4)
    told = []
    for turn in range(round(seconds * 10)):
        write_r2r(slab, 10, **more)
        told.append(solver.look(begin_s + turn / 10))
    return [rows for rows in told if rows is not None]


def test_a_table_is_told_once_and_is_feasible(slab):
    told = serve(Solver(slab), slab, 0.0, 4)
    assert told
    for rows in told:
        table = ThresholdTable.from_rows(2, rows)  # raises for a row that is not feasible
        assert set(rows) >= {"1", "2", "3", "4", "6", "8"}
    assert table.row(4) == (1, 3)
    assert all(sum(table.row(n)) - 2 <= max(0, n - 1) for n in range(40))


def test_the_same_table_is_not_told_again(slab):
    solver = Solver(slab)
    first = serve(solver, slab, 0.0, 8)
    assert len(first) <= 3
    assert serve(solver, slab, 8.0, 4) == []


def test_a_successor_tells_its_first_table_even_if_it_is_eager(slab):
    """It cannot know what its predecessor had put in force."""
    told = serve(Solver(slab), slab, 0.0, 4, p_percent=5)
    assert told
    assert ThresholdTable.from_rows(2, told[0]).is_eager


def test_the_report_says_what_was_measured_and_promised(slab):
    solver = Solver(slab)
    assert read_report(slab).solutions == 0
    serve(solver, slab, 0.0, 4)
    report = read_report(slab)
    assert report.live == pytest.approx(4)
    assert report.predicted_tokens_per_s == pytest.approx(207.95, rel=0.03)
    assert report.eager_tokens_per_s == pytest.approx(187.19, rel=0.03)
    # Ten steps of both models every tenth of a second.
    assert report.measured_tokens_per_s == pytest.approx(100 * (4 * 0.65 + 2), rel=0.03)
    assert report.routing[0, 1] == pytest.approx(0.35, abs=0.01)
    assert report.tokens.tolist() == [[1, 0], [1, 0]]
    assert report.latency_ms.tolist() == pytest.approx([6.0, 27.9])
    assert report.solutions >= 1
    set_live(slab, 0)
    solver.look(5.0)
    report = read_report(slab)
    assert (report.live, report.measured_tokens_per_s, report.predicted_tokens_per_s) == (0, 0, 0)


def test_an_idle_server_costs_a_look_a_second_and_no_solution(slab):
    solver = Solver(slab)
    serve(solver, slab, 0.0, 4)
    set_live(slab, 0)
    solutions, now, looks = read_report(slab).solutions, 4.0, 0
    while now < 64.0:
        assert solver.look(now) is None
        now += solver.wait_s
        looks += 1
    assert looks <= 60 + 21
    assert read_report(slab).solutions == solutions


def test_what_solves_is_not_imported_before_there_is_something_to_solve():
    code = (
        "import sys, trserve.solver.main, trserve.solver.solver;"
        "print(sorted({'scipy', 'torch', 'trserve.sched.markov'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_steps_too_short_for_the_models_quantum_are_planned_for(slab):
    told = serve(Solver(slab), slab, 0.0, 4, latency=(0.02, 0.15))
    assert told


def test_a_system_that_no_model_can_hold_is_said_once(slab, caplog):
    caplog.set_level("INFO")
    assert serve(Solver(slab), slab, 0.0, 4, latency=(0.00002, 50_000.0)) == []
    assert len([r for r in caplog.records if "no thresholds" in r.message]) == 1


def test_a_restarting_worker_is_not_held_against_the_thresholds(slab):
    solver = Solver(slab)
    serve(solver, slab, 0.0, 4)
    measured = read_report(slab).measured_tokens_per_s
    slab.workers[1].set("status", WorkerStatus.RESTARTING)
    for turn in range(300):
        assert solver.look(4.0 + turn / 10) is None
    assert read_report(slab).measured_tokens_per_s == measured


def test_harm_is_noticed_and_the_table_goes_back_to_eager_for_a_while(slab, caplog):
    """Fewer tokens come than the steps' times allow, under eager execution as well."""
    caplog.set_level("INFO")
    solver = Solver(slab)
    set_live(slab, 4)
    told, carry = [], 0.0
    for turn in range(500):
        carry += 0.1 * 150 / 4.6  # tokens a second by tokens of a pair of steps
        write_r2r(slab, int(carry))
        carry -= int(carry)
        told.append(solver.look(turn / 10))
    tables = [ThresholdTable.from_rows(2, rows) for rows in told if rows is not None]
    changes = [eager for eager, _ in itertools.groupby(table.is_eager for table in tables)]
    assert changes[-3:] == [False, True, False]
    assert sum("below what eager" in record.message for record in caplog.records) == 1


def test_its_processor_time_in_a_steady_load_is_small():
    """The share of a core that it takes once everything is known, at sixteen requests."""
    with new_slab() as slab:
        watched = Watched(slab)
        watched.run(r2r(0.35), 16, 15)
        settled = watched.cost_s
        watched.run(r2r(0.35), 16, 60)
        assert (watched.cost_s - settled) / 60 < 0.12
