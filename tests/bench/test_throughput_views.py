"""The sweep, the timeline, the jumps and the search: what is made of what was measured."""

from __future__ import annotations

import json

import pytest

from bench import throughput, throughput_search, throughput_sweep, throughput_timeline
from bench.closed_loop import Counts, Window
from bench.systems import Algorithm, Setup
from bench.throughput_jumps import Jump, _row, _verdicts, follows_jumps, jump
from bench.throughput_pair import LONG, setup_at
from bench.throughput_search import search_verdicts, step_rows, step_verdict
from bench.throughput_tables import short
from bench.throughput_timeline import Step, steps_of, traced
from tests.serverproc import Server
from trserve.ipc.trace import Event, EventKind
from trserve.trace.timeline import timeline

needs_matplotlib = "drawing needs matplotlib (the extra `plot`)"
SHORT = {"least_s": 1.0, "most_s": 1.0}


def drawn(plot, rows):
    """The Axes after ``plot``, and the picture's size."""
    figure = pytest.importorskip("matplotlib.figure", reason=needs_matplotlib).Figure()
    axes = figure.add_subplot()
    plot(axes, rows)
    figure.canvas.draw()
    return axes


# -- sweep -----------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch):
    """Sweeps measure nothing here: every vector reaches nine tenths of what is predicted."""
    seen = []

    def measure(setup, workload, count, vector, until):
        seen.append(vector)
        window = Window(count, 10.0, (650, 350), 700, 0.01, 5.0, 2.0, {})
        row = throughput_sweep.row_of("delayed-fixed", setup, workload, window, vector)
        return row | {"ratio": 0.9}

    monkeypatch.setattr(throughput_sweep, "_measured", measure)
    return seen


def test_a_sweep_has_the_whole_curve_and_what_was_asked_for(measured):
    rows = throughput_sweep.sweep(setup_at(0.35), LONG, 4, ["1,1", "2,2"], None)
    assert measured == [(1, 1), (2, 2)]
    curve = {tuple(row["batch_threshold"]): row["curve_tokens_per_s"] for row in rows}
    assert curve == pytest.approx(
        {(1, 1): 187.19, (1, 2): 195.44, (1, 3): 207.95, (1, 4): 190.74, (2, 2): 187.6}, abs=0.03
    )
    assert [row["batch_threshold"] for row in rows if row["is_predicted_best"]] == [[1, 3]]
    values = {tuple(r["batch_threshold"]): r.get("at_p_tokens_per_s") for r in rows}
    assert values[1, 1] == pytest.approx(0.9 * 187.19, abs=0.03) and values[1, 3] is None


def test_a_sweep_measures_all_of_the_curve_unless_it_is_told_what(measured):
    throughput_sweep.sweep(setup_at(0.35), LONG, 3, [], None)
    assert measured == [(1, 1), (1, 2), (1, 3)]


@pytest.mark.parametrize("text", ["1", "1,1,1", "1,9", "0,1", "x,1"])
def test_vectors_that_cannot_be_are_refused(text):
    with pytest.raises(SystemExit, match="--sweep"):
        throughput_sweep.sweep(setup_at(0.35), LONG, 4, [text], None)


def test_without_known_latencies_there_is_no_curve():
    real = Setup(("tiny", "small"), "cpu", Algorithm("r2r", (0.35,)))
    with pytest.raises(SystemExit, match="emulated"):
        throughput_sweep.sweep(real, LONG, 4, [], None)


def test_a_sweep_is_drawn_with_its_curve(measured):
    rows = throughput_sweep.sweep(setup_at(0.35), LONG, 4, ["1,1", "1,3"], None)
    axes = drawn(throughput_sweep.plot, rows)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1,1", "1,2", "1,3", "1,4"]
    curve = axes.get_lines()[0].get_ydata()
    assert list(curve) == [row["curve_tokens_per_s"] for row in rows]
    assert "N = 4" in axes.get_xlabel()


# -- timeline --------------------------------------------------------------------------------


def test_steps_are_found_by_worker_and_nothing_else_is():
    events = {
        "worker 0": [Event(0, 9_000_000, EventKind.STEP, 3_000_000, 0, 4)],
        "worker 1": [Event(0, 5_000_000, EventKind.HANDOFF_SENT, 1, 2, 3)],
        "gateway": [Event(0, 4_000_000, EventKind.PUBLISHED, 1, 2, 3)],
    }
    document = json.loads(json.dumps(timeline(events, pid=1, lost={})))
    assert steps_of(document) == [[Step(0.0, 6.0, 4)], []]


def test_a_servers_steps_are_traced():
    with Server(["--device", "emulated", "--profile", "a100-0.6b-32b"]) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 60, "stream": True}
        answer = server.stream("/v1/completions", body)
        next(answer)
        small, large = traced(server.pid, 0.4)
        assert len(small) > 5 and all(step.batch == 1 for step in small)
        assert all(step.length_ms >= 6.0 for step in small)
        assert all(step.length_ms >= 27.9 for step in large)
        answer.close()
        server.stop()


def test_a_timeline_has_a_lane_for_each_model_of_each_system():
    steps = [[0.0, 6.0, 2], [8.0, 6.0, 1]]
    rows = [
        {"system": system, "model": model, "steps": steps}
        for system in ("eager", "delayed-fixed")
        for model in ("0.6b", "32b")
    ]
    missing = {"system": "step-sync", "not_available": "why"}
    axes = drawn(throughput_timeline.plot, [*rows, missing])
    lanes = [tick.get_text() for tick in axes.get_yticklabels()]
    assert lanes == ["eager 0.6b", "eager 32b", "delayed-fixed 0.6b", "delayed-fixed 32b"]
    assert [text.get_text() for text in axes.texts] == ["2", "1"] * 4
    assert "steps" not in throughput_timeline.shown(rows[0])


# -- flags -----------------------------------------------------------------------------------


def test_without_matplotlib_a_plot_is_refused_before_anything_is_measured(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        throughput.main(["--sweep", "--plot", str(tmp_path / "p.png")])
    assert "trserve[plot]" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["--sweep", "--timeline"])
def test_a_sweep_and_a_timeline_are_of_one_number_of_users(mode):
    with pytest.raises(SystemExit, match="one --concurrency"):
        throughput.main([mode, "--concurrency", "2,4", "--device", "emulated"])


# -- jumps -----------------------------------------------------------------------------------


def test_a_jump_is_followed_by_the_best_and_by_what_is_near_it():
    to = Jump("x", 0.6, 4, (1, 3), {(1, 1): 80.0, (1, 2): 98.5, (1, 3): 100.0, (2, 2): 97.9})
    assert [to.is_followed_by(v) for v in [(1, 3), (1, 2), (2, 2), (1, 1), (1, 9)]] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_jump_knows_its_best():
    assert jump("x", 0.35, 4).best == (1, 3)
    assert jump("x", 0.05, 4).best == (1, 1)


def test_a_jumps_row_counts_from_the_moment_it_had_to_be_followed_by():
    to = Jump("x", 0.35, 4, (1, 3), {(1, 3): 207.95})
    begin, end = Counts(3.0, (100, 100)), Counts(33.0, (4100, 2254), thresholds=(1, 3))
    row = _row(to, 1.5, begin, end)
    assert (row["tokens_per_s"], row["p"]) == (
        pytest.approx(205.13, abs=0.01),
        pytest.approx(0.35, abs=1e-4),
    )
    assert row["ratio"] == pytest.approx(205.13 / 207.95, abs=1e-3)
    assert [verdict.ok for verdict in _verdicts(row)] == [True, True]
    assert short(row)["follows s"] == 1.5
    assert [v.ok for v in _verdicts(row | {"follows_s": None, "ratio": 0.9})] == [False, False]
    assert not _verdicts(row | {"follows_s": 3.1})[0].ok


@pytest.mark.slow
def test_jumps_are_followed_while_serving():
    rows, _ = follows_jumps(quick=True)
    assert [row["concurrency"] for row in rows] == [16, 2]
    assert all(row["follows_s"] is not None for row in rows), rows


# -- search ----------------------------------------------------------------------------------


def test_long_steps_are_counted_against_the_usual_ones():
    usual = [Step(0.0, 6.0, 1)] * 99 + [Step(0.0, 7.0, 1)]
    slowed = [Step(0.0, 6.0, 1)] * 95 + [Step(0.0, 9.0, 1)] * 5
    without, beside = step_rows("0.6b", usual, slowed)
    assert (without["long_share"], beside["long_share"]) == (0.01, 0.05)
    assert (without["max_ms"], beside["p99_ms"], beside["p50_ms"]) == (7.0, 9.0, 6.0)
    assert not step_verdict(without, beside).ok
    assert step_verdict(without, without).ok
    assert short(beside) == {}, "it has a table of its own"


def test_searches_are_held_against_their_limits():
    assert [v.ok for v in search_verdicts({"search_s": 5.0, "vector_s": 0.6})] == [True, False]


def test_the_searcher_does_each_part_at_least_once(monkeypatch):
    monkeypatch.setattr(throughput_search, "N", 4)
    found = throughput_search.searches(0.0)
    assert all(len(times) == 1 and times[0] > 0 for times in found.values())
    assert set(found) == {"search_s", "vector_s", "table_s"}
