"""What is made of measurements: probabilities, predictions, rows, tables and flags."""

import argparse
from dataclasses import replace

import pytest

from bench.closed_loop import Window
from bench.endpoint import counts_of
from bench.prediction import predicted, realised, row_of
from bench.systems import Algorithm, Setup, gate_arguments
from bench.throughput_options import add_arguments, algorithm_of, setup_of, workload_of
from bench.throughput_reproduce import fast_profile, timeout_share
from bench.throughput_tables import ratios, short
from bench.workloads import WORKLOADS
from trserve.emulated.profile import load_profile

LOW = WORKLOADS["low-effort"]
R2R = Algorithm("r2r", (0.35,))
EMULATED = Setup(("0.6b", "32b"), "emulated", R2R, "a100-0.6b-32b")
PAGE = b"""# HELP trserve_generation_tokens_total x
trserve_generation_tokens_total{model="a"} 12.0
trserve_generation_tokens_total{model="b/c"} 1e+06
trserve_handoffs_total 7.0
trserve_gate_openings_total{model="a",reason="timeout"} 1.0
trserve_num_requests_running 3.0
trserve_batch_threshold{model="a"} 1.0
trserve_batch_threshold{model="b/c"} 5.0
trserve_step_latency_seconds{model="a"} 0.006
"""


def window(tokens, handoffs, concurrency=4, seconds=10.0, extra=None):
    return Window(concurrency, seconds, tokens, handoffs, 0.01, 5.0, 2.0, extra or {})


def test_totals_are_read_from_a_page_of_metrics():
    counts = counts_of(PAGE, ("a", "b/c"), 1.5)
    assert counts.tokens == (12, 1_000_000) and counts.handoffs == 7 and counts.at_s == 1.5
    assert 'trserve_gate_openings_total{model="a",reason="timeout"}' in counts.extra
    assert "trserve_num_requests_running" not in counts.extra
    assert "trserve_batch_threshold" not in " ".join(counts.extra)
    assert counts.thresholds == (1, 5)
    assert counts.step_ms == ()  # one model says nothing yet


def test_realised_probabilities():
    assert realised(R2R, window((65, 35), 70)) == (0.35,)
    # 100 steps of the small model, 10 of which handed on; 50 of the large, 10 of which returned.
    assert realised(Algorithm("r-stitch", (0.1, 0.8)), window((90, 50), 20)) == (0.1, 0.2)
    assert realised(Algorithm("me", (1, 1)), window((30, 70), 20)) == (0.3, 0.7)
    assert realised(R2R, window((0, 0), 0)) is None
    assert realised(Algorithm("r-stitch", tau=0.5), window((10, 0), 0)) is None


@pytest.mark.parametrize(
    ("system", "vector", "expected"),
    [
        ("eager", None, 187.19),
        ("delayed-fixed", (1, 3), 207.95),
        ("delayed-auto", None, 207.95),
        ("slm-only", None, 4000 / 6.0),
        ("llm-only", None, 4000 / 27.9),
    ],
)
def test_predictions_are_the_models(system, vector, expected):
    found = predicted(system, EMULATED, window((650, 350), 700), vector)
    assert found == pytest.approx(expected, abs=0.011)


def test_nothing_is_predicted_where_nothing_is_known():
    real = Setup(("tiny", "small"), "cpu", Algorithm("r-stitch", tau=0.05))
    assert predicted("eager", real, window((90, 50), 20)) is None
    assert predicted("std-serving", EMULATED, window((650, 350), 700)) is None
    assert predicted("delayed-fixed", EMULATED, window((650, 350), 700), (3, 3)) is None


def test_without_a_profile_the_servers_own_latencies_count():
    real = Setup(("tiny", "small"), "cpu", R2R)
    seen = replace(window((650, 350), 700), step_ms=(0.6, 2.79), thresholds=(1, 3))
    assert predicted("eager", real, seen) == pytest.approx(1871.9, rel=0.02)
    assert predicted("eager", real, replace(seen, step_ms=(0.6, 0.0))) is None
    assert row_of("delayed-auto", real, LOW, seen)["batch_threshold"] == [1, 3]
    assert row_of("llm-only", real, LOW, seen)["batch_threshold"] is None


def test_steps_as_the_server_measured_them_stand_beside_the_profiles():
    seen = replace(window((650, 350), 700), step_ms=(6.6, 30.69))  # a tenth longer
    row = row_of("eager", EMULATED, LOW, seen)
    assert row["predicted_tokens_per_s"] == pytest.approx(187.19, abs=0.011)
    assert row["steps_measured_tokens_per_s"] == pytest.approx(187.19 / 1.1, rel=1e-3)
    assert row_of("eager", EMULATED, LOW, window((1, 1), 1))["steps_measured_tokens_per_s"] is None


def test_a_row_has_the_keys_that_stay():
    row = row_of("eager", EMULATED, LOW, window((650, 350), 700))
    wanted = {"algorithm", "workload", "system", "concurrency", "batch_threshold", "tokens_per_s"}
    wanted |= {"predicted_tokens_per_s", "per_user_tokens_per_s", "ttft_ms", "latency_s", "p"}
    assert wanted <= set(row)
    assert row["tokens_per_s"] == 100 and row["per_user_tokens_per_s"] == 25 and row["p"] == 0.35
    assert short(row)["tok/s"] == 100
    assert row_of("llm-only", EMULATED, LOW, window((650,), 0))["llm_share"] == 1.0


def test_ratios_stand_beside_standard_serving_of_the_same_cell():
    cells = [("std-serving", (65, 35)), ("eager", (130, 70)), ("llm-only", (50,))]
    rows = [row_of(name, EMULATED, LOW, window(tokens, 70)) for name, tokens in cells]
    rows.append(row_of("eager", EMULATED, LOW, window((9, 1), 2, concurrency=8)))
    rows.append(
        {"algorithm": R2R.shown, "workload": "low-effort", "system": "x", "not_available": "y"}
    )
    (found,) = ratios(rows)
    assert found["eager"] == 2 and found["llm-only"] == 0.5 and found["concurrency"] == 4


def test_schedules_as_the_server_reads_them():
    assert gate_arguments("eager", None, 3) == ["--batch-threshold", "1,1,1"]
    assert gate_arguments("delayed-fixed", (2, 10), 2) == ["--batch-threshold", "2,10"]
    assert gate_arguments("delayed-auto", None, 2) == ["--batch-threshold", "auto"]
    assert gate_arguments("step-sync", None, 2) == ["--schedule", "step-sync"]
    with pytest.raises(ValueError, match="needs a vector"):
        gate_arguments("delayed-fixed", None, 2)


def test_routers_on_real_and_on_emulated_devices():
    def flags(algorithm, device):
        return " ".join(algorithm.router_arguments(device))

    assert flags(R2R, "emulated") == "--router emulated --router-config algorithm=r2r,p=0.35"
    assert flags(R2R, "cpu") == "--router random --router-config p=0.35"
    stitch = Algorithm("r-stitch", (0.1, 0.8))
    assert flags(stitch, "emulated").endswith("algorithm=r-stitch,p=0.1,q=0.8")
    assert flags(Algorithm("r-stitch", tau=0.05), "cpu").endswith(
        "r-stitch --router-config tau=0.05"
    )
    mixed = Algorithm("me", (0.5, 0.5))
    assert flags(mixed, "emulated").endswith("algorithm=me,weights=0.5/0.5")
    assert flags(mixed, "cpu") == "--router me --router-config weights=0.5/0.5"


def parsed(*flags):
    made = argparse.ArgumentParser()
    add_arguments(made)
    return made.parse_args(flags)


def test_flags_make_a_setup():
    setup = setup_of(parsed())
    assert setup.models == ("tiny", "small") and setup.algorithm.tau == 0.05
    assert setup.vocabulary == 1000
    setup = setup_of(parsed("--device", "emulated", "--algorithm", "r2r", "--routing", "0.2"))
    assert setup.models == ("0.6b", "32b") and setup.algorithm == Algorithm("r2r", (0.2,))
    assert setup.profile == "a100-0.6b-32b" and "--threads" not in setup.arguments(setup.models)
    assert workload_of(parsed("--device", "emulated", "--scale", "0.5")).output_tokens == 1024
    assert workload_of(parsed()).name == "problems"


@pytest.mark.parametrize(
    "given",
    [("r2r", "0.1,0.2", None, True), ("r2r", "x", None, True), ("r-stitch", None, 0.1, True)],
)
def test_flags_that_do_not_fit_are_refused(given):
    name, routing, tau, emulated = given
    with pytest.raises(SystemExit):
        algorithm_of(name, routing, tau, emulated=emulated)


def test_the_share_of_late_openings():
    key = 'trserve_gate_openings_total{{model="a",reason="{}"}}'.format
    extra = {key("threshold"): 97.0, key("timeout"): 3.0, "trserve_handoffs_total": 900.0}
    assert timeout_share(window((1, 1), 1, extra=extra)) == 0.03
    assert timeout_share(window((1, 1), 1)) is None


def test_the_fast_profile_is_the_pairs_but_for_the_small_step():
    with fast_profile() as path:
        profile = load_profile(path)
    assert profile.names == ("0.6b", "32b")
    assert [model.step.curve for model in profile.models] == [1.6, 27.9]
