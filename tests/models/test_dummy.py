"""Dummy weights: the same for a seed, cheap, and of use in a forward."""

from dataclasses import replace

import numpy as np
import torch

from tests.models.reference import Harness, make_model, save
from trserve.models.aliases import alias_spec
from trserve.models.assembly import expected_tensors
from trserve.models.dummy import dummy_decoder
from trserve.models.loading import load_model
from trserve.models.spec import read_spec
from trserve.workers.kv_cache import KVCache
from trserve.workers.runner import TorchRunner
from trserve.workers.step import StepInputs

SHAPE = replace(
    alias_spec("0.6b"), num_layers=3, hidden_size=128, intermediate_size=256, vocab_size=5000
)


def logits(decoder, tokens=(3, 4, 5)):
    kv = KVCache(decoder.spec, num_blocks=4, block_size=8, dtype=decoder.dtype)
    runner = TorchRunner(decoder, kv, tokenizer_size=decoder.spec.vocab_size)
    step = StepInputs(max_tokens=8, max_rows=1, max_blocks_per_row=4, block_size=8)
    step.add_row(np.asarray(tokens), 0, np.array([2], np.int32))
    return runner.forward(step).logits[0]


def test_weights_depend_on_the_seed_alone():
    first, same, other = (
        logits(dummy_decoder(SHAPE, dtype=torch.float32, seed=seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, same)
    assert not torch.allclose(first, other)


def test_a_layer_does_not_depend_on_the_number_of_layers():
    one, three = (
        dummy_decoder(replace(SHAPE, num_layers=layers), dtype=torch.float32) for layers in (1, 3)
    )
    x = torch.randn(2, 128)
    assert torch.equal(one.layers[0].qkv(x), three.layers[0].qkv(x))
    assert not torch.allclose(three.layers[0].qkv(x), three.layers[1].qkv(x))


def test_weights_are_noise():
    """No two rows alike, of the usual spread: neither logits nor times are degenerate."""
    embedding = dummy_decoder(replace(SHAPE, vocab_size=50_000), dtype=torch.float32).embedding
    assert abs(embedding.std().item() - 0.02) < 2e-4
    assert abs(embedding.mean().item()) < 2e-4
    assert len(torch.unique(embedding, dim=0)) == 50_000
    spread = logits(dummy_decoder(SHAPE, dtype=torch.float32)).std()
    assert 0.1 < spread < 10


def test_every_architecture_can_be_drawn(tmp_path):
    path = save(make_model("experts-in-some-layers"), tmp_path)
    spec = read_spec(path)
    decoder = load_model(path, spec, dtype=torch.bfloat16, load_format="dummy")
    assert torch.isfinite(logits(decoder)).all()
    assert len(expected_tensors(spec)) > 70


def test_dummy_weights_are_not_those_of_the_files(tmp_path):
    path = save(make_model("qwen3"), tmp_path)
    harness = Harness(path)
    out = harness.forward([([3, 4, 5], 0, harness.table(3))]).logits[0]
    drawn = load_model(path, read_spec(path), dtype=torch.float32, load_format="dummy")
    assert not torch.allclose(logits(drawn), out)
