"""The search over thresholds, against shares that are functions; and the share's own error."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest

from trserve.calibration.search import MAX_EVALUATIONS, Scale, find_threshold, rounded, text
from trserve.calibration.shares import Share


def entropies(count: int = 3000) -> list[float]:
    """As a small model's: most of them nearly 0, a few large."""
    rng = Random(1)
    return [rng.betavariate(0.3, 3.0) for _ in range(count)]


@pytest.mark.parametrize("target", [0.01, 0.04, 0.07, 0.15, 0.5, 0.93])
@pytest.mark.parametrize("above", [True, False])
@pytest.mark.parametrize("bend", [0.6, 1.0, 2.0])
def test_the_threshold_is_found_in_few_runs(target, above, bend):
    """``bend``: the share is that power of the scores' own, as it is where visits last long."""
    scores = np.array(entropies())
    runs = []

    def measure(threshold):
        runs.append(threshold)
        beyond = scores > threshold if above else 1 - scores < threshold
        return float(beyond.mean()) ** bend

    least, most = (1.0, 0.0) if above else (0.0, 1.0)
    seen = scores if above else 1 - scores
    scale = Scale.of(least, most, seen[:1500].tolist())
    found = find_threshold(measure, scale, target, 0.001)
    assert abs(found.share - target) < 0.003
    assert found.share == measure(found.threshold)
    assert len(runs) <= MAX_EVALUATIONS + 1


def test_without_scores_it_still_converges():
    scale = Scale.of(0.0, 8.0, ())
    found = find_threshold(lambda threshold: (threshold / 8) ** 3, scale, 0.07, 0.001)
    assert abs(found.share - 0.07) < 0.005


def test_a_share_that_jumps_gives_the_nearest_of_what_was_tried():
    scale = Scale.of(0.0, 8.0, ())
    found = find_threshold(lambda threshold: math.floor(threshold) / 8, scale, 0.3, 0.001)
    assert found.share in (0.25, 0.375)


def test_a_threshold_is_what_is_printed():
    assert text(rounded(0.1234567891)) == "0.12345679"
    assert float(text(rounded(0.99999994))) == rounded(0.99999994) < 1.0
    assert Scale.of(0.0, 1.0, [0.3, 0.1, 0.2]).at(0.5) == 0.2
    assert Scale.of(1.0, 0.0, [0.3, 0.1, 0.2]).at(0.25) == 0.3


def test_the_standard_error_is_that_of_many_samples():
    """Answers whose tokens are alike: the error of the share over prompts, not over tokens."""
    rng = np.random.default_rng(7)

    def sample():
        tokens = rng.integers(20, 80, 200)
        own = rng.beta(0.5, 6.0, 200)
        return Share(np.rint(own * tokens).astype(int).tolist(), tokens.tolist())

    samples = [sample() for _ in range(400)]
    spread = np.std([each.value for each in samples])
    stated = np.mean([each.standard_error for each in samples])
    assert stated == pytest.approx(spread, rel=0.15)
    assert math.isnan(Share([1], [4]).standard_error)
    assert Share([1, 2], [4, 6]).value == 0.3
