"""What suffixes add to an emulated step, beside the device's own clock."""

from dataclasses import replace

import numpy as np
import pytest

from bench.closed_loop import Window
from bench.prediction import latencies, predicted
from bench.suffix_cost import further_tokens_beyond, shares, with_suffixes
from bench.systems import Algorithm, Setup
from trserve.emulated.profile import load_profile
from trserve.emulated.runner import StepClock
from trserve.sched.system import interpolate

LARGE = load_profile("a100-0.6b-32b").models[1]
SETUP = Setup(("0.6b", "32b"), "emulated", Algorithm("r2r", (0.05,)), "a100-0.6b-32b")


@pytest.mark.parametrize(("rows", "share"), [(1, 0.02), (4, 0.05), (6, 0.05), (16, 0.2), (16, 0.6)])
def test_the_curve_is_the_mean_of_what_the_device_takes(rows: int, share: float) -> None:
    clock, random = StepClock(LARGE, 16), np.random.default_rng(1)
    further = random.geometric(share, (20_000, rows)) - 1
    taken = [clock.duration_ns(rows, rows + int(each)) / 1e6 for each in further.sum(axis=1)]
    error = np.std(taken) / len(taken) ** 0.5
    assert interpolate(with_suffixes(LARGE, share), rows) == pytest.approx(
        np.mean(taken), abs=max(5 * error, 1e-6)
    )


def test_nothing_is_beyond_where_visits_are_frequent() -> None:
    assert further_tokens_beyond(64, 8, 0.6) == pytest.approx(0.0, abs=1e-9)
    assert further_tokens_beyond(0, 8, 0.5) == pytest.approx(8.0)
    assert with_suffixes(LARGE, 1.0) == with_suffixes(LARGE, 0.0) == LARGE.step.curve


def test_who_writes_what_share() -> None:
    assert shares("r2r", (0.05,)) == (0.95, 0.05)
    assert shares("me", (1.0, 3.0)) == (0.25, 0.75)
    assert shares("r-stitch", (0.1, 0.5)) is None and shares("confidence", ()) is None


def test_predictions_have_it_and_can_leave_it_out() -> None:
    seen = Window(16, 10.0, (950, 50), 100, 0.01, 5.0, 2.0, {})
    with_it = predicted("eager", SETUP, seen)
    without = predicted("eager", SETUP, seen, steps="alone")
    assert with_it is not None and without is not None and with_it < 0.98 * without
    often = replace(seen, tokens=(400, 600))
    assert predicted("eager", SETUP, often) == pytest.approx(
        predicted("eager", SETUP, often, steps="alone")
    )
    assert latencies(SETUP) == (6.0, 27.9)
