"""What recorded requests say about the geometric model."""

from __future__ import annotations

import numpy as np
import pytest

from trserve.sched.diagnose import fits, fitted
from trserve.sched.journeys import Visit

RNG_SEED = 4


def requests_of(lengths_of_request, requests=150):
    rng = np.random.default_rng(RNG_SEED)
    made = []
    for _ in range(requests):
        visits = []
        for steps in lengths_of_request(rng):
            visits += [Visit(0, int(steps), steps - 1.0), Visit(1, 1, 1.0)]
        made.append([*visits, Visit(0, 1, 1.0)])
    return made


def test_p_and_c_are_counted():
    requests = [[Visit(0, 3, 2.0), Visit(1, 1, 1.0), Visit(0, 2, 2.0)], [Visit(1, 4, 4.0)]]
    routing, tokens = fitted(requests, 3)
    # Model 0: 3 stays, 1 move to 1, and the end, after which the next request enters at 1.
    assert routing[0].tolist() == pytest.approx([3 / 5, 2 / 5, 0])
    assert routing[1].tolist() == pytest.approx([2 / 5, 3 / 5, 0])
    assert routing[2].tolist() == [1, 0, 0]
    assert tokens[:, 0].tolist() == pytest.approx([4 / 5, 1, 0])


def test_geometric_visits_raise_nothing():
    requests = requests_of(lambda rng: rng.geometric(0.2, size=40))
    slm, _ = fits(requests, 2)
    assert slm.mean_steps == pytest.approx(5, rel=0.05)
    assert slm.findings() == []


def test_even_visits_are_found():
    slm, _ = fits(requests_of(lambda rng: [5] * 40), 2)
    assert slm.cv2 == 0
    assert any("more even" in finding for finding in slm.findings())


def test_uneven_visits_are_found():
    slm, _ = fits(requests_of(lambda rng: rng.choice([1, 30], size=40, p=[0.9, 0.1])), 2)
    assert slm.cv2 > slm.geometric_cv2
    # Lengths 1 or 30 at random: uneven, but neither by position nor in phases.
    (finding,) = slm.findings()
    assert "more uneven" in finding


def test_a_rate_that_changes_with_the_position_is_found():
    def lengths(rng):
        return [*rng.geometric(0.5, size=30), *rng.geometric(0.1, size=6)]

    slm, _ = fits(requests_of(lengths), 2)
    assert any("position" in finding for finding in slm.findings())
    assert slm.leaving[0] > 3 * slm.leaving[3]


def test_phases_are_found():
    def lengths(rng):
        return [
            steps
            for _ in range(8)
            for steps in rng.geometric(0.5 if rng.random() < 0.5 else 0.06, size=6)
        ]

    slm, _ = fits(requests_of(lengths), 2)
    assert slm.correlation > 0.2
    assert any("phases" in finding for finding in slm.findings())


def test_a_model_that_nobody_leaves_has_no_fit():
    assert fits([[Visit(0, 10, 10.0)]] * 20, 2) == []
