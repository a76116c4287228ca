"""The compiled kernels beside torch, in every variant that this processor can run.

What they promise beyond torch's results is that a token's do not depend on its neighbours at all.
"""

import time

import numpy as np
import pytest
import torch

from tests.models.reference import Harness, make_model, save
from trserve.models.native import library
from trserve.models.native.library import CHOICE, VARIANTS, load_library, runnable_variants
from trserve.models.native.support import supported
from trserve.models.spec import read_spec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module", params=runnable_variants())
def variant(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CHOICE, request.param)
        yield request.param


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose head dimension every variant takes, with a layer norm on heads and biases."""
    model = make_model("qwen3-bias-tied")
    return save(model, tmp_path_factory.mktemp("wide"))


def test_this_checkout_has_kernels():
    """A compiler is there wherever tests run; without kernels half of these would say nothing."""
    assert runnable_variants(), "the kernels were not compiled: see setup.py"


def harness_without_kernels(path, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CHOICE, "none")
        return Harness(path, **options)


def prefill(harness, tokens, table, *, step=64):
    for start in range(0, len(tokens), step):
        out = harness.forward([(tokens[start : start + step], start, table)])
    return out


def logits_of_mixed_rows(make, path, dtype):
    """Rows over many segments; decodes and suffixes in one step."""
    rng = np.random.default_rng(5)
    lengths = (1, 40, 129, 400)
    harness = make(path, num_blocks=80, dtype=dtype)
    tables = [harness.table(n + 8) for n in lengths]
    for length, table in zip(lengths, tables, strict=True):
        prefill(harness, rng.integers(96, size=length).tolist(), table)
    suffixes = ([3], [4, 5, 6], [7], [8] * 8)
    out = harness.forward(list(zip(suffixes, lengths, tables, strict=True)))
    assert (harness.runner._native is not None) == (make is Harness)
    return out.logits


def test_equal_torch_over_long_rows(variant, wide):
    native, plain = (
        logits_of_mixed_rows(make, wide, torch.float32)
        for make in (Harness, harness_without_kernels)
    )
    assert (native - plain).abs().max().item() < 1e-4


def test_bfloat16_is_as_near_to_float32_as_torch_is(variant, wide):
    exact = logits_of_mixed_rows(Harness, wide, torch.float32)
    native, plain = (
        logits_of_mixed_rows(make, wide, torch.bfloat16)
        for make in (Harness, harness_without_kernels)
    )
    assert (native - exact).norm() < 1.1 * (plain - exact).norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_change_not_one_bit(variant, wide, dtype):
    """Alone, in batches of every size, and in whatever chunks the row was computed."""
    rng = np.random.default_rng(9)
    tokens = rng.integers(96, size=150).tolist()
    expected = None
    for neighbours in (0, 1, 2, 3, 7, 30, 63):
        for step in (1, 13, 64, 150):
            harness = Harness(wide, num_blocks=140, dtype=DTYPES[dtype])
            table = harness.table(151)
            prefill(harness, tokens, table, step=step)
            others = [([int(rng.integers(96))], 0, harness.table(1)) for _ in range(neighbours)]
            place = int(rng.integers(neighbours + 1))
            others.insert(place, ([11], 150, table))
            logits = harness.forward(others).logits[place].clone()
            expected = logits if expected is None else expected
            assert torch.equal(logits, expected)


def test_a_cached_prefix_changes_not_one_bit(variant, wide):
    """A row whose first blocks another one has computed, beside one that computes all of it."""
    tokens = np.random.default_rng(4).integers(96, size=100).tolist()
    harness = Harness(wide, num_blocks=40)
    alone, other, tail = harness.table(100), harness.table(100), harness.table(36)
    expected = prefill(harness, tokens, alone).logits.clone()
    prefill(harness, [*tokens[:64], *range(20)], other, step=7)
    cached = np.concatenate((other[:8], tail))
    found = harness.forward([(tokens[64:], 64, cached)]).logits
    assert torch.equal(found, expected)


def test_threads_change_not_one_bit(variant, wide, monkeypatch):
    """Long rows alone, whose attention is shared out among the threads, included."""
    tokens = np.random.default_rng(2).integers(96, size=1200).tolist()
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        try:
            torch.set_num_threads(threads)
            harness = Harness(wide, num_blocks=160)
            table = harness.table(1201)
            prefill(harness, tokens, table)
            found.append(harness.forward([([1], 1200, table)]).logits.clone())
        finally:
            torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_nan_stays_in_its_row(variant, wide):
    harness = Harness(wide, num_blocks=8)
    tables = [harness.table(8) for _ in range(3)]
    for table in tables:
        harness.forward([([1, 2, 3], 0, table)])
    clean = harness.forward([([4], 3, table) for table in tables]).logits.clone()
    for layer in harness.runner.kv.layers:
        layer[int(tables[1][0]), :, :, 0] = torch.nan
    out = harness.forward([([4], 3, table) for table in tables])
    assert torch.equal(out.logits[0], clean[0])
    assert not torch.isfinite(out.logits[1]).any()
    assert torch.equal(out.logits[2], clean[2])


def test_wanted_hidden_states(variant, wide):
    """Hidden states of tokens in the middle of a row, beside those of a step that ended there."""
    harness = Harness(wide, num_blocks=8)
    first, second = harness.table(20), harness.table(20)
    out = harness.forward([(list(range(10)), 0, first)], also=np.array([3, 6]))
    assert out.also is not None
    for place, length in enumerate((4, 7)):
        alone = harness.forward([(list(range(length)), 0, second)])
        assert torch.equal(out.also[place], alone.hidden[0])


def test_odd_widths(variant, tmp_path):
    """Hidden and intermediate sizes that are no multiple of any vector, and a padded vocabulary."""
    model = make_model("qwen2", hidden_size=60, intermediate_size=77, num_attention_heads=2,
                       num_key_value_heads=1, head_dim=32, vocab_size=101)  # fmt: skip
    path = save(model, tmp_path)
    tokens = list(range(90, 20, -1))
    native, plain = Harness(path), harness_without_kernels(path)
    results = [prefill(h, tokens, h.table(70), step=33).logits for h in (native, plain)]
    assert native.runner._native is not None
    assert (results[0] - results[1]).abs().max().item() < 1e-4


def test_which_decoders_are_left_to_torch(variant, tmp_path):
    spec = read_spec(save(make_model("experts"), tmp_path))
    assert not supported(spec, torch.float32)
    assert not supported(spec, torch.float16)


def test_a_variant_that_cannot_run_is_not_loaded(monkeypatch):
    assert set(runnable_variants()) <= set(VARIANTS)
    monkeypatch.setenv(CHOICE, "none")
    assert load_library() is None
    assert load_library("sse9") is None


def test_a_library_of_another_version_is_not_used(monkeypatch, caplog):
    library._load.cache_clear()
    monkeypatch.setattr(library, "_INTERFACE_VERSION", -1)
    assert load_library() is None
    assert "compiled for another version" in caplog.text and "make setup" in caplog.text
    monkeypatch.undo()
    library._load.cache_clear()
    assert load_library() is not None


def test_a_damaged_library_is_not_used(monkeypatch, tmp_path, caplog):
    broken = tmp_path / "_broken.so"
    broken.write_bytes(b"\x7fELF")
    library._load.cache_clear()
    monkeypatch.setattr(library, "_path", lambda variant: broken)
    assert load_library() is None
    assert "_broken.so" in caplog.text
    monkeypatch.undo()
    library._load.cache_clear()


def test_a_long_step_gives_signs_of_life(variant, wide):
    harness = Harness(wide)
    word = np.zeros(1, np.int64)
    harness.runner.heartbeat = word.ctypes.data
    before = time.monotonic_ns()
    harness.forward([(list(range(90)), 0, harness.table(90))])
    assert before <= word[0] <= time.monotonic_ns()
