"""``trserve plan``: its JSON, its table, its errors, traces and quality tables."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tests.sched.systems import agrees
from trserve.cli import main
from trserve.planning.recorded import read_trace

R2R = ["--latency", "6.0,27.9", "--algorithm", "r2r", "--routing", "0.35"]
PARETO = Path(__file__).parents[1] / "docs" / "results" / "pareto.json"


def plan(*flags):
    return CliRunner().invoke(main, ["plan", *map(str, flags)])


def results(*flags):
    done = plan(*flags, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    for row in told["results"]:
        assert {
            "concurrency",
            "batch_threshold",
            "tokens_per_s",
            "eager_tokens_per_s",
            "method",
        } <= set(row)
    return told


def refused(*flags):
    done = plan(*flags)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr


def test_the_reference_system():
    rows = results(*R2R, "--concurrency", "1,2,4,8,16")["results"]
    printed = {
        1: ([1, 1], "63.43", "63.43"),
        2: ([1, 2], "110.32", "98.96"),
        4: ([1, 3], "207.95", "187.19"),
        8: ([1, 5], "399.05", "369.21"),
        16: ([2, 10], "785.39", "733.62"),
    }
    assert [row["concurrency"] for row in rows] == list(printed)
    for row in rows:
        vector, best, eager = printed[row["concurrency"]]
        assert row["batch_threshold"] == vector
        assert agrees(row["tokens_per_s"], best)
        assert agrees(row["eager_tokens_per_s"], eager)
        assert row["method"] == "exact"
        assert row["gain"] == pytest.approx(row["tokens_per_s"] / row["eager_tokens_per_s"] - 1)


@pytest.mark.parametrize(
    ("flags", "vector", "printed"),
    [
        ([*R2R, "--batch-threshold", "2,3"], [2, 3], "198.04"),
        (["--latency", "6,27.9", "--routing", "0.35", "--batch-threshold", "2,2"], [2, 2], "187.6"),
        (
            ["--latency", "6,27.9", "--algorithm", "r-stitch", "--routing", "0.1,0.8"],
            [1, 1],
            "380.3",
        ),
        (["--latency", "6,27.9", "--algorithm", "citer", "--routing", "0.05"], [1, 1], "510.1"),
    ],
)
def test_other_algorithms_and_vectors(flags, vector, printed):
    (row,) = results(*flags, "--concurrency", "4")["results"]
    assert row["batch_threshold"] == vector
    assert agrees(row["tokens_per_s"], printed)


def test_mixtures_take_a_weight_a_model():
    flags = ["--latency", "6,10,28", "--algorithm", "me", "--routing", "0.5,0.3,0.2"]
    rows = results(*flags, "--concurrency", "2,3,4")["results"]
    assert [row["batch_threshold"] for row in rows] == [[1, 1, 1]] * 3


def test_a_system_file_equals_the_flags(tmp_path):
    file = tmp_path / "system.json"
    told = {"P": [[0.65, 0.35], [1, 0]], "C": [[1, 0], [1, 0]], "latency_ms": [6.0, 27.9]}
    file.write_text(json.dumps(told))
    by_file = results("--system", file, "--concurrency", "4")
    assert by_file == results(*R2R, "--concurrency", "4")


def test_a_system_file_with_delays_and_curves(tmp_path):
    file = tmp_path / "system.json"
    told = {
        "P": [[0.65, 0.35], [1, 0]],
        "C": [[1, 0], [1, 0]],
        "D": [[0, 15.0], [7.3, 0]],
        "latency_ms": [{"1": 6.0, "8": 9.0}, 27.9],
        "delta_ms": 0.1,
    }
    file.write_text(json.dumps(told))
    one, many = results("--system", file, "--concurrency", "1,4")["results"]
    assert math.isclose(one["tokens_per_s"], 1000 / (6 + 0.35 * (27.9 + 22.3)), rel_tol=1e-9)
    assert many["tokens_per_s"] < 4 * one["tokens_per_s"]


def test_a_curve_by_flag():
    curved = results("--latency", "1:6/8:6,27.9", "--routing", "0.35", "--concurrency", "4")
    assert curved == results(*R2R, "--concurrency", "4")


def test_the_table_says_it_in_words():
    done = plan(*R2R, "--concurrency", "4")
    assert done.exit_code == 0
    for text in ("1,3", "207.95", "187.19", "+11.1%", "exact"):
        assert text in done.stdout


def test_an_approximation_is_named():
    flags = ["--latency", "6,10,28", "--algorithm", "me", "--routing", "0.5,0.3,0.2"]
    done = plan(*flags, "--concurrency", "16", "--time-budget-s", "0.5")
    assert done.exit_code == 0
    assert "simulation" in done.stdout
    assert "--time-budget-s" in done.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--routing is missing"),
        (["--routing", "0.35"], "--latency is missing"),
        (["--latency", "6,x", "--routing", "0.35"], "--latency x"),
        (["--latency", "6,nan", "--routing", "0.35"], "--latency nan"),
        (["--latency", "6,-1", "--routing", "0.35"], "--latency: model 1"),
        (["--latency", "6,1:x", "--routing", "0.35"], "--latency x"),
        (["--latency", "6,10,28", "--routing", "0.35"], "--latency 6,10,28"),
        (["--latency", "6,27.9", "--routing", "1.5"], "--routing: a probability"),
        (["--latency", "6,27.9", "--routing", "0.1,0.2"], "--routing: takes p"),
        (["--latency", "6,9", "--routing", "0.1", "--algorithm", "r-stitch"], "takes p,q"),
        (["--latency", "6,9", "--routing", "-1,2", "--algorithm", "me"], "--routing: me"),
        ([*R2R, "--concurrency", "0"], "--concurrency 0"),
        ([*R2R, "--concurrency", "2.5"], "--concurrency 2.5"),
        ([*R2R, "--concurrency", "99999"], "--concurrency 99999"),
        ([*R2R, "--concurrency", "2,4", "--batch-threshold", "1,3"], "at concurrency 2"),
        ([*R2R, "--batch-threshold", "1,2,3"], "--batch-threshold 1,2,3"),
        ([*R2R, "--batch-threshold", "0,1"], "--batch-threshold 0,1"),
        ([*R2R, "--delta-ms", "50"], "--delta-ms"),
        ([*R2R, "--delta-ms", "-1"], "--delta-ms"),
        ([*R2R, "--target-quality", "0.9"], "--quality-table"),
        ([*R2R, "--system", PARETO], "--latency: --system excludes it"),
        (["--system", PARETO], f"--system {PARETO}"),
        ([*R2R, "--trace", PARETO], f"--trace {PARETO}, line 1"),
        ([*R2R, "--target-quality", "0.9", "--quality-table", PARETO], "no threshold of r2r"),
    ],
)
def test_errors_name_the_flag(flags, said):
    assert said in refused(*flags)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("[1", "not JSON"),
        ("[]", "a JSON object"),
        ('{"P": [[1]], "latency_ms": [1, 2]}', "C is missing"),
        ('{"P": [[1, 0], [1, 1]], "C": [[1, 1], [1, 1]], "latency_ms": [1, 2]}', "P: row 1"),
        ('{"P": [[1, 0], [1, 0]], "C": [[1, 1]], "latency_ms": [1, 2]}', "C: must be 2 x 2"),
        ('{"P": 1, "C": [[1, 1]], "latency_ms": 1}', "latency_ms: a list"),
        ('{"P": 1, "C": 1, "latency_ms": [1, 2], "p": 1}', "p is not known"),
        (
            '{"P": [[1, 0], [1, 0]], "C": [[1, 1], [1, 1]], "latency_ms": [1, {"x": 2}]}',
            "latency_ms: model 1",
        ),
        (
            '{"P": [[1, 0], [1, 0]], "C": [[1, 1], [1, 1]], "latency_ms": [1, 2], "delta_ms": "a"}',
            "delta_ms",
        ),
    ],
)
def test_errors_in_a_system_file_name_the_key(tmp_path, told, said):
    file = tmp_path / "system.json"
    file.write_text(told)
    assert said in refused("--system", file)


def write_trace(path, draw, requests=120, arrivals=None):
    """R2R requests whose visits to model 0 have the lengths that ``draw`` gives."""
    lines = []
    for number in range(requests):
        visits = []
        for steps in draw():
            visits += [[0, int(steps)], [1, 1]]
        told = {"visits": [*visits, [0, 2]]}
        if arrivals is not None:
            told["arrival_ms"] = arrivals[number]
        lines.append(json.dumps(told))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_geometric_trace_agrees_with_the_model(tmp_path):
    rng = np.random.default_rng(1)
    trace = write_trace(tmp_path / "t.jsonl", lambda: rng.geometric(0.35, size=50))
    told = results("--latency", "6,27.9", "--trace", trace, "--concurrency", "4")
    (row,) = told["results"]
    assert row["tokens_per_s"] == pytest.approx(207.95, rel=0.03)
    for replay in row["replay"]:
        assert replay["low"] < replay["tokens_per_s"] < replay["high"]
        if replay["model_error"] is not None:
            assert abs(replay["model_error"]) < 0.03
    assert all(fit["findings"] == [] for fit in told["trace"]["fit"])
    assert told["trace"]["arrivals"] is None


def test_a_trace_that_is_not_geometric_is_found_out(tmp_path):
    trace = write_trace(tmp_path / "t.jsonl", lambda: [3] * 50)
    told = results("--latency", "6,27.9", "--trace", trace, "--concurrency", "4")
    slm = told["trace"]["fit"][0]
    assert any("more even" in finding for finding in slm["findings"])
    assert slm["mean_steps"] == pytest.approx(3)
    # Every request alike: they fall into step with each other, which geometric ones never do.
    assert (
        max(abs(r["model_error"]) for r in told["results"][0]["replay"] if r["model_error"]) > 0.03
    )
    done = plan("--latency", "6,27.9", "--trace", trace, "--concurrency", "4")
    assert "more even than geometric" in done.stdout
    assert "replayed" in done.stdout


def test_given_routing_is_held_against_the_trace(tmp_path):
    rng = np.random.default_rng(1)
    trace = write_trace(tmp_path / "t.jsonl", lambda: rng.geometric(0.2, size=50))
    told = results(*R2R, "--trace", trace, "--concurrency", "4", "--batch-threshold", "1,1")
    (replay,) = told["results"][0]["replay"][:1]
    # p = 0.35 was promised, p = 0.2 came: the model is a third too low.
    assert replay["model_error"] == pytest.approx(187.19 / 276.0 - 1, abs=0.03)


def test_recorded_arrivals_are_replayed(tmp_path):
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(2000, size=120)).tolist()
    trace = write_trace(tmp_path / "t.jsonl", lambda: rng.geometric(0.35, size=20), 120, arrivals)
    flags = ("--latency", "6,27.9", "--trace", trace, "--concurrency", "4,8")
    arrived = results(*flags)["trace"]["arrivals"]
    assert arrived["requests"] == 120
    assert arrived["concurrency"] == 8
    # 20 visits of 1 / 0.35 steps, and one step more, commit about 59 tokens every 2 s.
    assert arrived["planned"]["tokens_per_s"] == pytest.approx(59 / 2, rel=0.2)
    assert 0 < arrived["planned"]["mean_live"] < 8
    assert arrived["eager"]["latency_ms"] > 0
    assert "as they came" in plan(*flags).stdout


def test_tokens_of_visits_come_from_c_or_from_the_trace(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text(
        '{"visits": [[0, 3], [1, 1], [0, 2]]}\n\n{"visits": [[0, 3, 7], [1, 1, 2.5]]}\n'
    )
    told = read_trace(file, np.array([[1.0, 0.0], [1.0, 0.0]]))
    # The routed token is replaced; the last step of a request stays.
    assert [visit.tokens for visit in told.requests[0]] == [2.0, 1.0, 2.0]
    assert [visit.tokens for visit in told.requests[1]] == [7.0, 2.5]
    assert told.arrivals_ms is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no request"),
        ("x", "line 1: not JSON"),
        ('{"visits": [[0, 1]]}\n{"visits": 1}', "line 2"),
        ('{"visits": []}', "empty"),
        ('{"visits": [[2, 1]]}', "model 2"),
        ('{"visits": [[0, 0]]}', "at least one step"),
        ('{"visits": [[0, true]]}', "at least one step"),
        ('{"visits": [[0, 1, -1]]}', "tokens"),
        ('{"visits": [0]}', "[model, steps]"),
        ('{"visits": [[0, 1]], "arrival_ms": "x"}', "arrival_ms"),
        ('{"visits": [[0, 1]], "arrival_ms": 1}\n{"visits": [[0, 1]]}', "in some lines only"),
        (
            '{"visits": [[0, 1]], "arrival_ms": 2}\n{"visits": [[0, 1]], "arrival_ms": 1}',
            "arrival_ms falls",
        ),
    ],
)
def test_errors_in_a_trace_name_the_line(tmp_path, text, said):
    file = tmp_path / "t.jsonl"
    file.write_text(text)
    assert said in refused("--latency", "6,27.9", "--trace", file)


def quality_table(path, rows, router="r2r"):
    named = [{"router": router, **row} for row in rows]
    path.write_text(json.dumps({"results": named}))
    return path


def test_router_threshold_and_b_are_chosen_together(tmp_path):
    table = quality_table(
        tmp_path / "q.json",
        [
            {"parameter": None, "llm_share": 0.0, "accuracy": 0.4},
            {"parameter": 0.9, "llm_share": 0.05, "accuracy": 0.7},
            {"parameter": 0.5, "llm_share": 0.2, "accuracy": 0.92},
            {"parameter": 0.3, "p": 0.35, "accuracy": 0.95},
        ],
    )
    flags = ["--latency", "6,27.9", "--quality-table", table, "--concurrency", "4"]
    (row,) = results(*flags, "--target-quality", "0.9")["results"]
    assert row["router_threshold"] == 0.5
    assert row["quality"] == 0.92
    assert row["batch_threshold"] == [1, 2]
    assert agrees(row["tokens_per_s"], "284.5")
    (row,) = results(*flags, "--target-quality", "0.95")["results"]
    assert row["router_threshold"] == 0.3
    assert row["batch_threshold"] == [1, 3]
    assert "the best is 0.95" in refused(*flags, "--target-quality", "0.99")


def test_the_table_that_the_benchmark_wrote_is_taken():
    flags = ["--latency", "6,27.9", "--algorithm", "r-stitch", "--quality-table", PARETO]
    (row,) = results(
        *flags, "--routing", "0.1,0.8", "--target-quality", "0.98", "--concurrency", "2"
    )["results"]
    assert row["router_threshold"] == 0.02
    p, q = row["routing"]
    # The share of the large model's tokens is that of the table's row.
    share = (p / q) / (1 - p + p / q)
    assert share == pytest.approx(0.0985, abs=0.0001)
    assert "p,q" in refused(*flags, "--target-quality", "0.98")
    done = plan(*flags, "--routing", "0.1,0.8", "--target-quality", "0.9", "--concurrency", "2")
    assert "0.06" in done.stdout


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"parameter": 0.5, "accuracy": 0.9}], "needs p or llm_share"),
        ([{"parameter": 0.5, "llm_share": 0.1}], "are numbers"),
        ([{"parameter": 0.5, "accuracy": 0.9, "p": "x"}], "p is a number"),
        ([{"parameter": 0.5, "accuracy": 0.9, "p": 1.5}], "probability"),
    ],
)
def test_errors_in_a_quality_table_are_said(tmp_path, rows, said):
    table = quality_table(tmp_path / "q.json", rows)
    flags = ["--latency", "6,27.9", "--quality-table", table, "--target-quality", "0.5"]
    assert said in refused(*flags)


def test_without_matplotlib_a_plot_is_refused_before_anything_is_solved(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "trserve[plot]" in refused(*R2R, "--plot", tmp_path / "p.png")


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "p.png"
    assert plan(*R2R, "--concurrency", "1,2,4", "--plot", file).exit_code == 0
    assert file.stat().st_size > 1000


def test_neither_the_help_nor_a_plan_imports_torch():
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from trserve.cli import main\n"
        "CliRunner().invoke(main, ['plan', '--help'])\n"
        "assert 'numpy' not in sys.modules and 'scipy' not in sys.modules\n"
        f"done = CliRunner().invoke(main, {['plan', *R2R, '--concurrency', '2']!r})\n"
        "assert done.exit_code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
