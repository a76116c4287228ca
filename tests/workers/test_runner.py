"""The runner's contract with its caller: shapes, independence of steps, cost of capacity."""

import time

import numpy as np
import pytest
import torch

from tests.models.reference import Harness, make_model, save
from trserve.models.loading import dummy_decoder
from trserve.models.spec import read_spec
from trserve.workers.kv_cache import KVCache
from trserve.workers.runner import TorchRunner
from trserve.workers.step import StepInputs


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(make_model("qwen3"), tmp_path_factory.mktemp("model"))


def test_shapes_and_types(path):
    harness = Harness(path)
    out = harness.forward([([1, 2, 3], 0, harness.table(3)), ([4], 0, harness.table(1))])
    assert (out.logits.shape, out.logits.dtype) == ((2, 96), torch.float32)
    assert (out.hidden.shape, out.hidden.dtype) == ((2, 48), torch.float32)
    assert not out.logits.requires_grad


def test_an_output_lasts_until_the_next_step_of_its_kind(path):
    """No step allocates: results lie in buffers, so whoever wants to keep them copies them."""
    harness = Harness(path)
    first = harness.forward([([1, 2, 3], 0, harness.table(3))])
    second = harness.forward([([7, 8, 9], 0, harness.table(3))])
    assert first.logits.data_ptr() == second.logits.data_ptr()
    assert torch.equal(first.hidden, second.hidden)


def test_a_long_step_gives_a_sign_of_life_before_each_layer(path):
    harness = Harness(path)
    harness.runner._native = None  # its steps are short
    signs = []
    harness.runner.on_layer = lambda: signs.append(None)
    harness.forward([([1, 2, 3], 0, harness.table(3))])
    assert len(signs) == len(harness.runner.decoder.layers) > 0


def test_further_tokens_have_the_logits_that_they_have_as_the_last(path):
    harness = Harness(path)
    rows = [
        ([1, 2, 3, 4], 0, harness.table(4)),
        ([5, 6], 0, harness.table(2)),
        ([7], 0, harness.table(1)),
    ]
    plain = harness.forward(rows)
    out = harness.runner.forward(harness.step, np.array([0, 2, 4]))
    assert torch.allclose(out.logits, plain.logits, atol=1e-5)
    assert torch.allclose(out.hidden, plain.hidden, atol=1e-5)
    scored = harness.runner.logits(out.also)
    for row, prefix in enumerate([[1], [1, 2, 3], [5]]):
        alone = harness.forward([(prefix, 0, harness.table(len(prefix)))])
        assert torch.allclose(scored[row], alone.logits[0], atol=1e-5)
    decode = harness.forward([([9], 0, harness.table(1))])
    both = harness.runner.forward(harness.step, np.array([0]))
    assert torch.allclose(harness.runner.logits(both.also), decode.logits, atol=1e-5)


def test_keys_and_values_are_written_to_the_slots_of_the_step_alone(path):
    harness = Harness(path)
    harness.forward([(list(range(20)), 0, harness.table(20))])
    written = np.zeros((65, 8), bool)
    written.reshape(-1)[harness.step.slots[:20]] = True
    for layer in harness.kv.layers:
        assert layer.shape == (65, 2, 2, 8, 16)
        for kind in range(2):
            stored = layer[:, :, kind].abs().sum((1, 3)).numpy() > 0
            assert np.array_equal(stored, written)


def test_several_step_inputs_may_be_used_in_turn(path):
    harness = Harness(path)
    table = harness.table(4)
    first = harness.forward([([1, 2, 3], 0, table)]).logits
    other = StepInputs(max_tokens=8, max_rows=2, max_blocks_per_row=8, block_size=8)
    other.add_row(np.array([1, 2, 3]), 0, table)
    assert torch.equal(harness.runner.forward(other).logits, first)
    assert torch.equal(harness.forward([([1, 2, 3], 0, table)]).logits, first)


def test_cost_follows_the_rows_and_not_the_capacity(path):
    """A decode over 16 tokens costs the same in a cache 500 times as large."""
    spec = read_spec(path)

    def best(num_blocks):
        kv = KVCache(spec, num_blocks=num_blocks, block_size=16, dtype=torch.float32)
        decoder = dummy_decoder(spec, dtype=torch.float32)
        runner = TorchRunner(decoder, kv, tokenizer_size=spec.vocab_size)
        step = StepInputs(max_tokens=4, max_rows=4, max_blocks_per_row=num_blocks, block_size=16)
        step.add_row(np.array([1]), 15, np.array([num_blocks - 1], np.int32))
        times = []
        for _ in range(50):
            start = time.perf_counter()
            runner.forward(step)
            times.append(time.perf_counter() - start)
        return min(times)

    best(8)
    assert best(4000) < 3 * best(8)
