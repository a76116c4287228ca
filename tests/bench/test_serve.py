"""``bench.serve`` as a command: flags that are refused, assertions, files, and a real server."""

import csv
import json

import numpy as np
import pytest

from bench.endpoint import launched
from bench.serve import main
from bench.serve_checks import read_assertion, read_limits
from bench.serve_flags import arguments
from bench.serve_metrics import Sample
from bench.serve_output import plot
from bench.serve_plan import number_names, plan_of, target_of

NAMES = ("p99_itl_ms", "failed", "tokens_per_s")


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [
        ("p99_itl_ms<50", 49.9, True),
        ("p99_itl_ms<50", 50, False),
        (" p99_itl_ms <= 5e1 ", 50, True),
        ("failed==0", 0, True),
        ("failed!=0", 0, False),
        ("tokens_per_s>=.5", 0.4, False),
        ("tokens_per_s>-1", 0.4, True),
    ],
)
def test_assertions(text, value, holds):
    made = read_assertion(text, NAMES)
    failure = made.failure({made.name: value})
    assert (failure is None) == holds
    assert holds or f"it is {value:g}" in failure


def test_what_has_no_value_does_not_hold():
    assert "has no value" in read_assertion("p99_itl_ms<50", NAMES).failure({"p99_itl_ms": None})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("p99_it_ms<50", "did you mean p99_itl_ms"),
        ("zzz<1", "there are failed"),
        ("p99_itl_ms", "write a name"),
        ("p99_itl_ms<fast", "write a name"),
        ("__import__('os')<1", "write a name"),
        ("failed<1 or failed>1", "write a name"),
    ],
)
def test_what_is_no_assertion_is_refused(text, said):
    with pytest.raises(SystemExit, match=said):
        read_assertion(text, NAMES)


def test_limits():
    assert read_limits(["ttft:200", "E2EL:1e3"], ("ttft", "e2e")) == {"ttft": 200, "e2e": 1000}
    for part, said in (("tfft:1", "did you mean ttft"), ("ttft:x", "MILLI"), ("ttft:0", "above 0")):
        with pytest.raises(SystemExit, match=said):
            read_limits([part], ("ttft", "e2e"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "--url of a running endpoint, or --launch"),
        ("--url http://h --launch x", "--url of a running endpoint, or --launch"),
        ("--url http://h --trace azure", "go together"),
        ("--url http://h --concurrency 0", "above 0"),
        ("--url http://h --concurrency 1,x", "write numbers"),
        ("--url http://h --request-rate 2 --concurrency 1,2", "one number"),
        ("--url http://h --request-rate inf", "above 0"),
        ("--url http://h --burstiness 2", "for --request-rate"),
        ("--url http://h --request-rate 1 --arrivals constant --burstiness 2", "constant arrivals"),
        ("--url http://h --scale 2", "for --trace"),
        ("--url http://h --duration 0", "above 0"),
        ("--url http://h --num-prompts 0", "1 or more"),
        ("--url http://h --length-spread 1", "below 1"),
        ("--url http://h --assert p99_ttf_ms<1", "did you mean p99_ttft_ms"),
        ("--url http://h --assert goodput_per_s>1", "give --goodput"),
        ("--url http://h --dataset /nonexistent", "cannot be read"),
        ("--url http://h --csv /nonexistent/a.csv", "no such folder"),
        ("--url h:80", "write http://HOST"),
        ("--launch x --extra-body []", "expected an object"),
        ("--launch x --extra-body {", "no JSON"),
    ],
)
def test_flags_that_do_not_fit_are_refused_before_anything_is_sent(flags, said):
    args = arguments(flags.split())
    with pytest.raises(SystemExit, match=said):
        target_of(args, plan_of(args))


def test_a_picture_needs_matplotlib_before_anything_is_sent(monkeypatch):
    monkeypatch.setattr("bench.serve_plan.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="--plot needs matplotlib"):
        plan_of(arguments(["--url", "http://h", "--plot", "a.png"]))


class Axes:
    """Keeps what is drawn."""

    def __init__(self):
        self.drawn = []

    def step(self, xs, ys, label, **options):
        self.drawn.append((label, list(xs), list(ys)))

    def plot(self, xs, ys, style):
        self.drawn.append((style, xs, ys))

    def annotate(self, text, place):
        self.drawn.append((text, place))

    def set(self, **options):
        pass

    def legend(self):
        pass


def test_pictures():
    empty = np.array([])
    samples = [Sample(1, ttft, ttft, None, empty, empty) for ttft in (30.0, 10.0)]
    axes = Axes()
    plot(axes, [{}], samples)
    curve = [10, 30], [0.5, 1]
    assert axes.drawn == [("TTFT", *curve), ("E2E", *curve)]
    axes = Axes()
    points = ((1, 50.0, 50.0), (4, 40.0, 160.0))
    names = ("concurrency", "per_user_tokens_per_s", "tokens_per_s")
    rows = [dict(zip(names, point, strict=True)) for point in points]
    plot(axes, [{**row, "request_rate": None, "workload": "random"} for row in rows], [])
    assert axes.drawn == [("o-", [50, 40], [50, 160]), ("1", (50, 50)), ("4", (40, 160))]


def test_runs():
    def runs(flags):
        return plan_of(arguments(["--url", "http://h", *flags.split()])).runs

    assert [(run.users, run.open) for run in runs("--concurrency 1,8")] == [(1, False), (8, False)]
    assert [(run.users, run.rate) for run in runs("--request-rate .5,2")] == [
        (None, 0.5),
        (None, 2),
    ]
    assert [run.users for run in runs("--request-rate 1 --concurrency 3")] == [3]


def test_a_server_that_is_not_there_is_said():
    with pytest.raises(SystemExit, match=r"127\.0\.0\.1:9 does not answer"):
        main(["--url", "http://127.0.0.1:9"])


@pytest.fixture(scope="module")
def url():
    with launched(["--models", "0.6b,32b", "--device", "emulated"]) as address:
        yield f"http://{address.host}:{address.port}"


def measured(url, tmp_path, *flags):
    """Exit code and rows of a run of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["--url", url, "--json", str(tmp_path / "out.json"), *flags])
    return ended.value.code, json.loads((tmp_path / "out.json").read_text())["results"]


def test_an_emulated_server_under_both_loops(url, tmp_path, capsys):
    flags = ["--num-prompts", "6", "--input-len", "12", "--output-len", "8", "--warm-up", "2"]
    table, page = tmp_path / "out.csv", tmp_path / "out.md"
    code, rows = measured(
        url,
        tmp_path,
        *(*flags, "--concurrency", "1,3", "--count-tokens", "--goodput", "ttft:1e6"),
        *("--csv", str(table), "--markdown", str(page), "--assert", "p99_itl_ms<60000"),
    )
    assert code == 0 and [row["concurrency"] for row in rows] == [1, 3]
    for row in rows:
        assert row["completed"] == 6 and row["tokens"] == 48 and row["input_tokens"] == 72
        assert row["system"] == "trserve" and row["algorithm"] == "emulated"
        assert sum(row["models"].values()) == 48 and row["goodput_share"] == 1
        # No step is shorter than the small model's, whatever the machine does.
        assert row["mean_tpot_ms"] >= 5.9 and row["p50_ttft_ms"] >= 5.9
        # Alike, but for first events that bring several tokens.
        assert 0.5 < row["mean_itl_token_ms"] / row["mean_tpot_ms"] < 3
    wanted = {"algorithm", "workload", "system", "concurrency", "batch_threshold", "tokens_per_s"}
    wanted |= {"predicted_tokens_per_s", "per_user_tokens_per_s", "ttft_ms", "latency_s", "p"}
    assert wanted <= set(rows[0])
    assert set(number_names()) <= set(rows[0])
    assert len(list(csv.DictReader(table.open()))) == 2 and page.read_text().count("\n") == 4
    code, (row,) = measured(
        url, tmp_path, *flags, "--request-rate", "40", "--assert", "tokens_per_s>1e9"
    )
    assert code == 1 and row["loop"] == "open" and row["completed"] == 6
    assert "assertion failed: 40 requests/s: tokens_per_s>1e+09: it is" in capsys.readouterr().err


def test_a_trace_whose_prompts_begin_alike_meets_the_prefix_cache(url, tmp_path):
    lines = [
        {"timestamp": 400 * i, "input_length": 1100, "output_length": 40, "hash_ids": [0, 1, 2 + i]}
        for i in range(3)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--trace", "mooncake", "--trace-file", str(trace), "--scale", "0.1"]
    code, (row,) = measured(url, tmp_path, *flags)
    assert code == 0 and row["completed"] == 3 and row["input_tokens"] == 330
    # Two of three find the 102 tokens that all share, in whole blocks.
    assert 2 * 80 <= row["cached_tokens"] <= 2 * 102 and row["seconds"] > 0.8


def test_failed_answers_are_the_exit_code(url, tmp_path, capsys):
    flags = ["--num-prompts", "2", "--extra-body", '{"temperature": -3}']
    code, (row,) = measured(url, tmp_path, *flags)
    assert code == 1 and row["failed"] == 2 and "status 400" in str(row["errors"])
    assert "2 x http status 400" in capsys.readouterr().err
    code, _ = measured(url, tmp_path, *flags, "--assert", "failed<3")
    assert code == 0
