"""Labels on cases made by hand."""

from __future__ import annotations

import math

import pytest
import torch

from trserve.training.citer import preferred
from trserve.training.co_llm import marginal_loss
from trserve.training.judging import result_of


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("She has 5 + 7 = 12. The answer is 12.", "So 12 it is", True),
        ("The answer is 1,250.", "The answer is 1250.0.", True),
        ("The answer is 12.", "The answer is 13.", False),
        ("from 3 to -4", "from 3 to 4", False),
        ("Hello  there", "hello there", True),
        ("Hello there", "Hello you", False),
    ],
)
def test_results_are_the_last_numbers_or_the_words(one: str, other: str, same: bool) -> None:
    assert (result_of(one) == result_of(other)) is same


def test_the_large_model_is_preferred_only_where_it_alone_comes_to_the_result() -> None:
    differs = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    labels = preferred(differs, ["8"] * 4, own=["8", "9", "8", "9"], peer=["8", "8", "9", "9"])
    assert labels.tolist() == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]


def test_marginal_likelihood_is_of_the_mixture() -> None:
    chances = [(0.2, 0.5, 0.9), (0.7, 0.1, 0.3)]
    logits = torch.tensor([math.log(p / (1 - p)) for p, _, _ in chances])
    logprobs = torch.tensor([[math.log(small), math.log(large)] for _, small, large in chances])
    expected = [-math.log((1 - p) * small + p * large) for p, small, large in chances]
    assert float(marginal_loss(logits, logprobs)) == pytest.approx(sum(expected) / 2, abs=1e-6)
