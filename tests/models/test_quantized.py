"""8-bit weights: how far they move, and that every way to multiply by them agrees."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.reference import Harness, make_model, save
from trserve.models.native.library import CHOICE, runnable_variants
from trserve.models.quantized import Int8Linear, quantize


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.floats(1e-20, 1e20), st.integers(0, 99))
def test_no_weight_moves_by_more_than_half_a_scale(rows, columns, size, seed):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * size
    weight[0] = 0.0
    stored, scales = quantize(weight)
    assert stored.dtype == torch.int8
    assert (stored[0] == 0).all()
    moved = (stored.float() * scales[:, None] - weight).abs()
    assert (moved <= 0.5001 * scales[:, None]).all()


@pytest.mark.parametrize("biased", [False, True])
def test_torch_multiplies_by_what_is_stored(biased):
    weight, x = torch.randn(13, 40), torch.randn(5, 40)
    bias = torch.randn(13) if biased else None
    linear = Int8Linear(weight, bias)
    expected = x @ (linear.rows.float() * linear.scales[:, None]).t()
    expected = expected if bias is None else expected + bias
    out = torch.empty(5, 13)
    linear.into(x, out)
    residual = torch.ones(5, 13)
    linear.add_to(residual, x)
    for found in (linear(x), out, residual - 1.0):
        assert torch.allclose(found, expected, atol=1e-4)


def mixed_logits(path, dtype):
    """A prompt by torch, then suffixes and decodes by whatever does them."""
    rng = np.random.default_rng(4)
    harness = Harness(path, dtype=dtype, int8=True)
    tables = [harness.table(n) for n in (110, 20, 40)]
    for length, table in zip((100, 10, 30), tables, strict=True):
        harness.forward([(rng.integers(96, size=length).tolist(), 0, table)])
    rows = list(zip(([1], [2, 3, 4], [5] * 9), (100, 10, 30), tables, strict=True))
    return harness.forward(rows).logits.clone()


@pytest.mark.parametrize("case", ["qwen3-bias-tied", "yarn-rope-options", "experts"])
def test_kernels_and_torch_agree(case, tmp_path, monkeypatch):
    path = save(make_model(case), tmp_path)
    monkeypatch.setenv(CHOICE, "none")
    expected = mixed_logits(path, torch.float32)
    rounding = (mixed_logits(path, torch.bfloat16) - expected).norm()
    for variant in runnable_variants():
        monkeypatch.setenv(CHOICE, variant)
        assert (mixed_logits(path, torch.float32) - expected).abs().max() < 1e-4
        rounded = mixed_logits(path, torch.bfloat16)
        assert (rounded - expected).norm() < 1.2 * rounding


def test_the_logits_stay_near(tmp_path):
    """Of random weights, whose largest is some four times the usual, each moves by about 1 %."""
    path = save(make_model("qwen3-bias-tied"), tmp_path)
    tokens = list(range(40))
    exact, quantized = (
        harness.forward([(tokens, 0, harness.table(40))]).logits
        for harness in (Harness(path), Harness(path, int8=True))
    )
    assert 0 < (quantized - exact).norm() < 0.05 * exact.norm()
