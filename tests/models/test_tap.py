"""What the last layer's MLP reads, from both kinds of kernels, beside transformers' own layer."""

import numpy as np
import pytest
import torch

from tests.models.reference import Harness, make_model, save
from trserve.errors import ConfigError
from trserve.models.native.library import CHOICE, runnable_variants

LENGTHS = (5, 40, 1, 90)


def read_by_last_mlp(model, tokens):
    """The output of the last layer's second norm at the last token."""
    kept = []
    norm = model.model.layers[-1].post_attention_layernorm
    hook = norm.register_forward_hook(lambda *call: kept.append(call[2]))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    hook.remove()
    return kept[0][0, -1]


def rows_of(harness):
    rng = np.random.default_rng(11)
    prompts = [rng.integers(96, size=length).tolist() for length in LENGTHS]
    return prompts, [(prompt, 0, harness.table(len(prompt) + 1)) for prompt in prompts]


@pytest.mark.parametrize("kernels", ["none", *runnable_variants()])
@pytest.mark.parametrize("case", ["qwen3-bias-tied", "llama-bias", "experts"])
def test_it_is_what_the_layer_has(tmp_path, monkeypatch, kernels, case):
    """In prompts of many lengths, in the decodes after them, and with further tokens asked for."""
    monkeypatch.setenv(CHOICE, kernels)
    model = make_model(case)
    harness = Harness(save(model, tmp_path))
    harness.runner.keep_tap()
    prompts, rows = rows_of(harness)
    found = harness.forward(rows, np.array([2, 9])).tap
    assert found.dtype == torch.float32
    expected = torch.stack([read_by_last_mlp(model, prompt) for prompt in prompts])
    assert (found - expected).abs().max() < 1e-4
    longer = [([7], len(prompt), table) for prompt, _, table in rows]
    found = harness.forward(longer).tap
    expected = torch.stack([read_by_last_mlp(model, [*prompt, 7]) for prompt in prompts])
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kernels", ["none", *runnable_variants()[:1]])
def test_bfloat16_is_near_and_costs_nothing_unasked(tmp_path, monkeypatch, kernels):
    monkeypatch.setenv(CHOICE, kernels)
    model = make_model("qwen3-bias-tied")
    harness = Harness(save(model, tmp_path), dtype=torch.bfloat16)
    prompts, rows = rows_of(harness)
    plain = harness.forward(rows)
    assert plain.tap is None
    hidden = plain.hidden.clone()
    harness.runner.keep_tap()
    tapped = harness.forward(rows)
    assert torch.equal(tapped.hidden, hidden)
    expected = torch.stack([read_by_last_mlp(model, prompt) for prompt in prompts])
    assert (tapped.tap - expected).norm() < 0.05 * expected.norm()


def test_without_layers_there_is_none(tmp_path):
    harness = Harness(save(make_model("zero-layer"), tmp_path))
    with pytest.raises(ConfigError, match="no layers"):
        harness.runner.keep_tap()
