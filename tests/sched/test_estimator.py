"""Online estimates: warm-up, accuracy, changes, curves."""

from __future__ import annotations

import numpy as np
import pytest

from trserve.sched.estimator import Estimator, StepEvent


class Feed:
    """R2R with probability p over n requests, as a worker would report it."""

    def __init__(self, seed=0, models=2):
        self.rng = np.random.default_rng(seed)
        self.estimator = Estimator(models)

    def steps(self, p, n, decisions, latency=(6.0, 27.9)):
        done = 0
        while done < decisions:
            width = int(self.rng.integers(1, n + 1))
            leaving = int(self.rng.binomial(width, p))
            noise = self.rng.normal(1, 0.02, size=2)
            self.estimator.observe(
                StepEvent(
                    0,
                    latency[0] * noise[0],
                    width,
                    (width - leaving, leaving),
                    (width - leaving, 0),
                )
            )
            if leaving:
                self.estimator.observe(
                    StepEvent(1, latency[1] * noise[1], leaving, (leaving, 0), (leaving, 0))
                )
            self.estimator.observe_live(n, latency[0])
            done += width
        return self.estimator.estimate()


def test_it_says_nothing_before_it_is_warm():
    feed = Feed()
    assert feed.estimator.estimate() is None
    assert not feed.estimator.is_warm
    feed.steps(0.35, 4, 30)
    assert feed.estimator.estimate() is None
    assert feed.steps(0.35, 4, 2000) is not None


def test_a_model_that_has_hardly_been_reached_is_waited_for():
    feed = Feed()
    feed.steps(0.0, 4, 2000)
    assert feed.estimator.is_warm
    feed.estimator.observe(StepEvent(0, 6.0, 4, (3, 1), (3, 0)))
    assert not feed.estimator.is_warm


@pytest.mark.parametrize("p", [0.05, 0.35, 0.6])
def test_estimates_are_close(p):
    made = Feed(1).steps(p, 4, 20_000)
    routing = made.system.routing
    assert abs(routing[0, 1] - p) < 4 * made.leave_error(0)
    assert made.leave_error(0) < 0.02
    assert routing[1].tolist() == [1, 0]
    assert np.allclose(made.system.tokens, [[1, 0], [1, 0]])
    assert made.system.latency(0, 2) == pytest.approx(6.0, rel=0.02)
    assert made.system.latency(1, 1) == pytest.approx(27.9, rel=0.02)
    assert made.live == pytest.approx(4)
    # Chance alone is hardly ever taken for a change.
    assert made.changes <= 1


@pytest.mark.parametrize(("before", "after"), [(0.05, 0.6), (0.6, 0.05), (0.35, 0.15)])
def test_a_jump_is_followed_within_a_few_hundred_decisions(before, after):
    feed = Feed(2)
    feed.steps(before, 4, 10_000)
    made = feed.steps(after, 4, 400)
    assert made.changes >= 1
    assert abs(made.system.routing[0, 1] - after) < 0.1
    made = feed.steps(after, 4, 5000)
    assert abs(made.system.routing[0, 1] - after) < 0.05


def test_latency_is_followed_and_prompts_do_not_count():
    feed = Feed(3)
    feed.steps(0.35, 4, 3000)
    for _ in range(50):
        feed.estimator.observe(StepEvent(0, 500.0, 2, (2, 0), (2, 0), pure_decode=False))
    made = feed.steps(0.35, 4, 400)
    assert made.system.latency(0, 2) == pytest.approx(6.0, rel=0.03)
    made = feed.steps(0.35, 4, 4000, latency=(9.0, 27.9))
    assert made.system.latency(0, 2) == pytest.approx(9.0, rel=0.03)


def test_a_curve_never_falls():
    estimator = Estimator(2)
    for width, ms in [(1, 6.0), (2, 8.0), (3, 7.0), (4, 9.0)] * 30:
        estimator.observe(StepEvent(0, ms, width, (width, 0), (width, 0)))
    curve = estimator.estimate().system.latency_ms[0]
    assert curve[2] == pytest.approx(7.5, rel=0.01)
    assert list(curve.values()) == sorted(curve.values())


def test_the_number_of_live_requests_is_averaged_over_a_second():
    estimator = Estimator(2)
    for _ in range(100):
        estimator.observe(StepEvent(0, 6.0, 4, (4, 0), (4, 0)))
    estimator.observe_live(16, 10.0)
    assert estimator.estimate().live == pytest.approx(16)
    for _ in range(1000):
        estimator.observe_live(16, 6.0)
    for _ in range(500):
        estimator.observe_live(2, 6.0)
    # Three half-lives.
    assert estimator.estimate().live == pytest.approx(2 + 14 / 8, rel=0.02)


def test_three_models_and_one_that_is_never_reached():
    estimator = Estimator(3)
    rng = np.random.default_rng(5)
    for _ in range(2000):
        moved = rng.multinomial(4, [0.7, 0.3, 0.0])
        estimator.observe(StepEvent(0, 6.0, 4, moved.tolist(), [moved[0], 0, 0]))
        if moved[1]:
            back = (int(moved[1]), 0, 0)
            estimator.observe(StepEvent(1, 20.0, back[0], back, back))
    made = estimator.estimate()
    assert made.system.routing[0, 2] == 0
    assert made.system.routing[2].tolist() == [1, 0, 0]
    assert made.decisions[2] == 0
    assert made.leave_error(2) == 0
