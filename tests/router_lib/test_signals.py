"""The signals against their formulas in float64, whatever the size and the padding."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trserve.models.native.library import CHOICE, runnable_variants
from trserve.router_lib import signals
from trserve.router_lib.signals import (
    all_signals,
    largest_logits,
    normalized_entropy,
    probability_margin,
    top_probability,
)

KERNELS = ("none", *runnable_variants())


@pytest.fixture(autouse=True, scope="module", params=KERNELS)
def kernels(request) -> Iterator[str]:
    """Every test for torch and for every variant of the kernels that this processor can run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CHOICE, request.param)
        yield request.param


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
    assert all_signals(logits, size).numpy() == pytest.approx(np.array(columns), nan_ok=True)
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


@pytest.mark.parametrize("size", [9, 40, 2047, 2049, 4096 + 17, signals._ROW_WISE + 1])
def test_what_cannot_be_drawn_has_no_part(size: int) -> None:
    """Minus infinity is a probability of 0, wherever it stands, the first block included."""
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(size)) * 5
    logits[0, : size - 2] = -math.inf
    logits[1, ::2] = -math.inf
    logits[2, 1:] = -math.inf
    for row, values in zip(logits, found(logits, size), strict=True):
        assert values == pytest.approx(expected(row.numpy()), abs=1e-5)


def test_columns_may_come_in_any_layout() -> None:
    """Rows apart from each other; columns apart; other types: torch takes what kernels do not."""
    wide = torch.randn(3, 5000, generator=torch.Generator().manual_seed(2))
    whole = found(wide[:, :4000].contiguous(), 4000)
    assert found(wide, 4000) == whole
    assert found(wide.t().contiguous().t(), 4000) == [pytest.approx(row, abs=1e-6) for row in whole]
    assert len(found(wide.double(), 4000)) == 3


@pytest.mark.parametrize("size", [100, 683, signals._ROW_WISE, signals._ROW_WISE + 77, 151_936])
@pytest.mark.parametrize("order", ["random", "rising", "falling", "equal"])
def test_the_largest_are_those_of_a_sort(size: int, order: str) -> None:
    logits = torch.randn(2, size + 8, generator=torch.Generator().manual_seed(size))
    if order in ("rising", "falling"):
        logits = logits.sort(descending=order == "falling").values
    if order == "equal":
        logits = logits.round()
    logits[:, size:] = 1e9
    expected = logits[:, :size].sort(descending=True).values[:, :100]
    assert torch.equal(largest_logits(logits, size, 100), expected)


@pytest.mark.parametrize("size", [8, signals._ROW_WISE])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_nan_in_its_own_row_alone(size: int, bad: float) -> None:
    logits = torch.zeros(2, size)
    logits[1, 3] = bad
    sound, broken = found(logits, size)
    assert sound == pytest.approx((1.0, 1 / size, 0.0))
    assert all(map(math.isnan, broken))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(5, signals._ROW_WISE, generator=torch.Generator().manual_seed(1))
    together = normalized_entropy(logits, signals._ROW_WISE)
    alone = [normalized_entropy(row[None], signals._ROW_WISE).item() for row in logits]
    assert together.tolist() == alone
