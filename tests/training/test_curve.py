"""The threshold curve of scores made by hand."""

from __future__ import annotations

import pytest
import torch

from trserve.training.curve import Held

SCORES = torch.tensor([0.9, 0.8, 0.6, 0.4, 0.3, 0.2, 0.1, 0.05])
DIFFERS = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0])


def test_a_threshold_routes_at_and_above_it() -> None:
    point = Held(SCORES, DIFFERS, above=True).at(float(SCORES[2]))
    assert point.llm_share == 3 / 8
    assert point.precision == pytest.approx(2 / 3)
    assert point.recall == pytest.approx(2 / 3)
    assert point.false_positive_rate == pytest.approx(1 / 5)


def test_confidence_routes_below_it() -> None:
    point = Held(1 - SCORES, DIFFERS, above=False).at(float((1 - SCORES)[2]))
    assert (point.llm_share, point.recall) == (2 / 8, pytest.approx(1 / 3))


@pytest.mark.parametrize("above", [True, False])
def test_the_start_has_the_recall_with_the_fewest_false_alarms(above: bool) -> None:
    scores = SCORES if above else 1 - SCORES
    point = Held(scores, DIFFERS, above=above).for_recall(0.95)
    assert (point.recall, point.false_positive_rate) == (1.0, pytest.approx(1 / 5))


def test_shares_of_the_curve_are_those_asked_for() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, differs = torch.rand(1000, generator=generator), torch.rand(1000, generator=generator)
    points = Held(scores, differs < 0.1, above=True).curve((0.02, 0.5))
    assert [point.llm_share for point in points] == pytest.approx([0.02, 0.5], abs=0.002)


def test_average_precision_is_one_for_a_perfect_order() -> None:
    assert Held(DIFFERS, DIFFERS, above=True).average_precision() == 1.0
    found = Held(SCORES, DIFFERS, above=True).average_precision()
    assert found == pytest.approx((1 / 1 + 2 / 3 + 3 / 4) / 3)
