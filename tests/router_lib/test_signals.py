"""The signals against their formulas in float64, whatever the size and the padding."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trserve.router_lib import signals
from trserve.router_lib.signals import normalized_entropy, probability_margin, top_probability


def expected(row: np.ndarray) -> tuple[float, float, float]:
    z = row.astype(np.float64)
    p = np.exp(z - z.max())
    p /= p.sum()
    entropy = -sum(x * math.log(x) for x in p if x > 0) / math.log(len(p))
    second, first = np.sort(p)[-2:]
    return entropy, first, first - second


def found(logits: torch.Tensor, size: int) -> list[tuple[float, float, float]]:
    columns = [
        signal(logits, size).tolist()
        for signal in (normalized_entropy, top_probability, probability_margin)
    ]
    return list(zip(*columns, strict=True))


@given(st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=12), st.integers(0, 5))
def test_signals_are_those_of_the_formulas(row: list[float], padding: int) -> None:
    size = len(row)
    logits = torch.full((1, size + padding), -math.inf)
    logits[0, :size] = torch.tensor(row)
    assert found(logits, size)[0] == pytest.approx(expected(np.array(row)), abs=1e-5)


@pytest.mark.parametrize("size", [signals._ROW_WISE - 1, signals._ROW_WISE, 151_936])
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_large_vocabularies_too(size: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(3, size + 128, generator=generator) * scale
    logits[:, size:] = 1e9  # whatever stands in the padding
    for row, values in zip(logits, found(logits, size), strict=True):
        assert values == pytest.approx(expected(row[:size].numpy()), abs=1e-5)


@pytest.mark.parametrize("size", [8, signals._ROW_WISE])
def test_what_is_not_finite_is_nan_in_its_own_row_alone(size: int) -> None:
    logits = torch.zeros(2, size)
    logits[1, 3] = math.nan
    sound, broken = found(logits, size)
    assert sound == pytest.approx((1.0, 1 / size, 0.0))
    assert all(map(math.isnan, broken))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(5, signals._ROW_WISE, generator=torch.Generator().manual_seed(1))
    together = normalized_entropy(logits, signals._ROW_WISE)
    alone = [normalized_entropy(row[None], signals._ROW_WISE).item() for row in logits]
    assert together.tolist() == alone
