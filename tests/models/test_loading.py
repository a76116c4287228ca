"""Checkpoints: shards, ties, conversions, and errors that name the tensor."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from tests.models.reference import Harness, logits_of, make_model, rewrite_config, save
from trserve.errors import ModelUnavailableError
from trserve.models import loading
from trserve.models.assembly import expected_tensors
from trserve.models.loading import load_model
from trserve.models.spec import read_spec

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def checkpoint(tmp_path):
    return save(make_model("qwen3"), tmp_path / "model")


def edit(path, change):
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def load(path, dtype=torch.float32):
    return load_model(path, read_spec(path), dtype=dtype)


@pytest.mark.parametrize(
    "case", ["qwen3", "qwen3-bias-tied", "qwen2", "llama-bias", "experts-in-some-layers"]
)
def test_expected_tensors_are_those_that_transformers_writes(case, tmp_path):
    path = save(make_model(case), tmp_path)
    stored = {name: tuple(t.shape) for name, t in load_file(path / "model.safetensors").items()}
    assert expected_tensors(read_spec(path)) == stored


def test_sharded_checkpoint(tmp_path):
    model = make_model("qwen3")
    path = save(model, tmp_path, max_shard_size="40KB")
    assert not (path / "model.safetensors").exists()
    harness = Harness(path)
    out = harness.forward([([1, 2, 3], 0, harness.table(3))])
    assert (out.logits[0] - logits_of(model, [1, 2, 3])[-1]).abs().max() < 1e-4


def test_a_stored_head_is_ignored_where_the_config_ties(tmp_path):
    model = make_model("qwen3-bias-tied")
    path = save(model, tmp_path)
    edit(path, lambda tensors: tensors.update({"lm_head.weight": torch.full((96, 48), 9.0)}))
    harness = Harness(path)
    out = harness.forward([([1, 2, 3], 0, harness.table(3))])
    assert (out.logits[0] - logits_of(model, [1, 2, 3])[-1]).abs().max() < 1e-4


def test_bfloat16_checkpoint_in_float32(tmp_path):
    path = save(make_model("qwen3").to(torch.bfloat16), tmp_path)
    harness = Harness(path)
    out = harness.forward([([1, 2, 3], 0, harness.table(3))])
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert (out.logits[0] - logits_of(model, [1, 2, 3])[-1]).abs().max() < 1e-4


def test_missing_tensor_is_named(checkpoint):
    edit(checkpoint, lambda tensors: tensors.pop(NAME))
    with pytest.raises(ModelUnavailableError, match=f"lacks the tensor {NAME}"):
        load(checkpoint)


def test_missing_head_is_named(checkpoint):
    edit(checkpoint, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelUnavailableError, match=r"lacks the tensor lm_head\.weight"):
        load(checkpoint)


def test_wrong_shape_is_named(checkpoint):
    edit(checkpoint, lambda tensors: tensors.update({NAME: torch.zeros(79, 48)}))
    with pytest.raises(ModelUnavailableError, match=rf"{NAME}.*\[79, 48\].*\[80, 48\]"):
        load(checkpoint)


def test_config_of_another_model(checkpoint):
    rewrite_config(checkpoint, num_hidden_layers=3, layer_types=None)
    with pytest.raises(ModelUnavailableError, match=r"lacks the tensor model\.layers\.2\."):
        load(checkpoint)


def test_damaged_file_is_named(checkpoint):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ModelUnavailableError, match=r"model\.safetensors is not a readable"):
        load(checkpoint)


def test_progress_counts_layers(checkpoint):
    seen = []
    load_model(
        checkpoint,
        read_spec(checkpoint),
        dtype=torch.float32,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 2), (2, 2)]


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_weights_that_do_not_fit_are_refused_before_they_are_taken(
    checkpoint, load_format, monkeypatch
):
    spec = read_spec(checkpoint)
    monkeypatch.setattr(loading, "available_memory", lambda: spec.weight_bytes(4) - 1)
    monkeypatch.setattr(loading, "dummy_decoder", None)
    monkeypatch.setattr(loading, "load_decoder", None)
    with pytest.raises(ModelUnavailableError, match=r"weights need 0\.0 GiB") as info:
        load_model(checkpoint, spec, dtype=torch.float32, load_format=load_format)
    assert len(str(info.value).splitlines()) == 2
