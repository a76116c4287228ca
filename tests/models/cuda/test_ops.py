"""The torch references of GPU operations, against formulas and against the CPU engine."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trserve.errors import ModelUnavailableError
from trserve.models.cuda import ops
from trserve.models.layers import RMSNorm
from trserve.models.rope import RotaryTable
from trserve.models.spec import spec_from_config
from trserve.router_lib.signals import all_signals
from trserve.workers.random_numbers import uniforms
from trserve.workers.sampler import NO_TOKEN, RowSampling, Sampler

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@given(rows=st.integers(1, 4), size=st.integers(1, 70), dtype=st.sampled_from(DTYPES))
def test_norms_are_the_formula_rounded_once(rows, size, dtype):
    torch.manual_seed(size)
    x = torch.randn(rows, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    wide = x.double()
    formula = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    out = ops.rms_norm(x, weight, 1e-6)
    assert out.dtype == dtype
    torch.testing.assert_close(out, formula.to(dtype), atol=1e-6, rtol=0.01)
    wide_out = torch.empty(rows, size)
    assert ops.rms_norm(x, weight, 1e-6, wide_out) is wide_out
    torch.testing.assert_close(wide_out.double(), formula, atol=1e-5, rtol=1e-5)


def test_the_norm_is_the_cpu_engines():
    torch.manual_seed(0)
    x, weight = torch.randn(3, 48), torch.randn(48)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6), RMSNorm(weight, 1e-6).exact(x))


@given(rows=st.integers(1, 3), size=st.integers(1, 40), dtype=st.sampled_from(DTYPES))
def test_the_gated_unit_takes_the_gate_first(rows, size, dtype):
    torch.manual_seed(size)
    gate_up = torch.randn(rows, 2 * size).to(dtype)
    gate, up = gate_up[:, :size].double(), gate_up[:, size:].double()
    formula = gate / (1 + (-gate).exp()) * up
    out = ops.silu_mul(gate_up)
    assert out.dtype == dtype
    torch.testing.assert_close(out, formula.to(dtype), atol=1e-6, rtol=0.01)


@settings(max_examples=20)
@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    normed=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_queries_are_rotated_and_keys_and_values_stored(kv_heads, group, normed, dtype):
    torch.manual_seed(group)
    tokens, dim, size = 5, 16, 4
    qkv = torch.randn(tokens, kv_heads, group + 2, dim).to(dtype)
    norms = torch.randn(2, dim).to(dtype) if normed else (None, None)
    positions = torch.tensor([0, 3, 17, 200, 5])
    slots = torch.tensor([9, 2, 4, -1, 0])
    table = RotaryTable(spec_from_config(QWEN3, {}, source="a test")).reaching(256)[:, 0, 0]
    kv = torch.full((4, 2, kv_heads, size, dim), 7.0, dtype=dtype)
    untouched = kv.clone()
    q = torch.empty(tokens, kv_heads * group, dim, dtype=dtype)
    ops.rope_and_store(
        qkv,
        positions,
        slots,
        torch.view_as_real(table),
        kv,
        q,
        q_norm=norms[0],
        k_norm=norms[1],
        eps=1e-6,
    )
    for token, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
        for head in range(kv_heads):
            heads = list(qkv[token, head].double())
            value = heads.pop()
            key = rotated(heads.pop(), norms[1], position)
            for member, query in enumerate(heads):
                torch.testing.assert_close(
                    q[token, head * group + member].double(),
                    rotated(query, norms[0], position),
                    atol=1e-5 if dtype == torch.float32 else 0.02,
                    rtol=1e-4 if dtype == torch.float32 else 0.01,
                )
            if slot >= 0:
                stored = kv[slot // size, :, head, slot % size].double()
                torch.testing.assert_close(
                    stored,
                    torch.stack((key, value)),
                    atol=1e-5 if dtype == torch.float32 else 0.02,
                    rtol=1e-4 if dtype == torch.float32 else 0.01,
                )
                untouched[slot // size, :, head, slot % size] = kv[
                    slot // size, :, head, slot % size
                ]
    assert kv.equal(untouched)


def rotated(head: torch.Tensor, norm: torch.Tensor | None, position: int) -> torch.Tensor:
    """Normalised if there is a norm, then each pair turned by its angle; float64."""
    if norm is not None:
        head = head / (head.square().mean() + 1e-6).sqrt() * norm.double()
    out = torch.empty_like(head)
    for pair in range(len(head) // 2):
        angle = position / 10000.0 ** (2 * pair / len(head))
        even, odd = head[2 * pair], head[2 * pair + 1]
        out[2 * pair] = even * math.cos(angle) - odd * math.sin(angle)
        out[2 * pair + 1] = even * math.sin(angle) + odd * math.cos(angle)
    return out


@given(rows=st.integers(1, 5), vocab=st.integers(2, 60), padding=st.integers(0, 5))
def test_the_epilogue_finds_what_the_cpus_signals_find(rows, vocab, padding):
    torch.manual_seed(vocab)
    logits = (torch.randn(rows, vocab + padding) * 4).mul(2).round().div(2)
    logits[:, vocab:] = 100.0
    logits[0, 0] = -torch.inf
    found = ops.Epilogue.allocate(rows, "cpu")
    ops.epilogue(logits, vocab, found)
    entropy, top, margin = all_signals(logits, vocab)
    valid = logits[:, :vocab]
    assert found.tokens.tolist() == valid.numpy().argmax(-1).tolist()
    assert found.finite.tolist() == [1] * rows
    assert found.largest.equal(valid.amax(-1))
    close = {"atol": 2e-6, "rtol": 2e-6}
    torch.testing.assert_close(found.logsumexp, valid.logsumexp(-1), **close)
    torch.testing.assert_close(found.entropy / math.log(vocab), entropy, **close)
    torch.testing.assert_close(found.top_probability, top, **close)
    torch.testing.assert_close(found.margin, margin, **close)


@pytest.mark.parametrize("bad", [[math.nan], [math.inf], [math.nan, math.inf], None])
def test_a_row_that_is_not_finite_has_no_token_and_its_neighbours_do(bad):
    logits = torch.zeros(3, 8)
    logits[:, 6] = 1.0
    logits[1, : len(bad) if bad else 8] = torch.tensor(bad) if bad else -torch.inf
    found = ops.Epilogue.allocate(3, "cpu")
    ops.epilogue(logits, 8, found)
    assert found.tokens.tolist() == [6, NO_TOKEN, 6]
    assert found.finite.tolist() == [1, 0, 1]
    for values in (found.largest, found.entropy, found.top_probability, found.margin):
        assert values.isnan().tolist() == [False, True, False]
    out = torch.empty(3, dtype=torch.int64)
    temperatures = torch.ones(3, dtype=torch.float64)
    numbers = torch.full((3,), 0.5, dtype=torch.float64)
    filters = ops.Filters(torch.full((3,), 5), temperatures * 0.9, temperatures * 0.01)
    for chosen in (None, filters):
        ops.sample(logits, 8, found, temperatures, numbers, out, chosen)
        assert (out >= 0).tolist() == [True, False, True]
        assert out[1] == NO_TOKEN


def test_all_findings_lie_in_one_memory():
    found = ops.Epilogue.allocate(4, "cpu")
    found.margin[2] = 1.5
    found.tokens[3] = 9
    assert found.packed[6].view(torch.float32).tolist() == [0, 0, 1.5, 0]
    assert found.packed[0].tolist() == [0, 0, 0, 9]
    assert found.first(3).margin.tolist() == [0, 0, 1.5]


@given(
    seeds=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5),
    position=st.integers(0, 2**31),
    model=st.integers(0, 7),
    purpose=st.integers(0, 2),
)
def test_numbers_are_the_engines_to_the_bit(seeds, position, model, purpose):
    array = np.array(seeds, np.uint64)
    positions = position + np.arange(len(seeds))
    out = torch.empty(len(seeds), dtype=torch.float64)
    ops.uniform(
        torch.from_numpy(array.view(np.int64)), torch.from_numpy(positions), model, purpose, out
    )
    assert out.numpy().tobytes() == uniforms(array, positions, model, purpose).tobytes()


FILTER = st.tuples(
    st.sampled_from([0, 0, 1, 2, 5, 20, 1000]),
    st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.01]),
    st.sampled_from([0.0, 0.0, 0.01, 0.2, 1.0]),
)


@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0.0, 1e-6, 0.1, 0.7, 1.0, 1.9]), FILTER, st.booleans()),
        min_size=1,
        max_size=6,
    ),
    vocab=st.sampled_from([2, 17, 150, 1200]),
    filtered=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_tokens_are_the_samplers(rows, vocab, filtered, seed):
    torch.manual_seed(seed)
    count = len(rows)
    logits = torch.randn(count, vocab + 3) * 3
    for row, (_, _, ties) in enumerate(rows):
        if ties:
            logits[row].round_()
    logits[:, vocab:] = -torch.inf
    top_k, top_p, min_p = zip(*(filters for _, filters, _ in rows), strict=True)
    if not filtered:
        top_k, top_p, min_p = [0] * count, [1.0] * count, [0.0] * count
    sampling = RowSampling(
        temperatures=np.array([row[0] for row in rows]),
        top_k=np.array(top_k),
        top_p=np.array(top_p),
        min_p=np.array(min_p),
        seeds=np.arange(count, dtype=np.uint64) * 2**61 + seed,
        positions=np.arange(count) * 100,
    )
    expected = Sampler(model=3).sample(logits, sampling)
    assert sampled(logits, vocab, sampling, filtered).tolist() == expected.tolist()


def sampled(
    logits: torch.Tensor, vocab: int, sampling: RowSampling, filtered: bool
) -> torch.Tensor:
    """The tokens by the GPU's operations."""
    count = len(logits)
    found = ops.Epilogue.allocate(count, "cpu")
    numbers = torch.empty(count, dtype=torch.float64)
    out = torch.empty(count, dtype=torch.int32)
    seeds = torch.from_numpy(sampling.seeds.view(np.int64))
    ops.uniform(seeds, torch.from_numpy(sampling.positions), 3, 0, numbers)
    ops.epilogue(logits, vocab, found)
    filters = None
    if filtered:
        arrays = (sampling.top_k, sampling.top_p, sampling.min_p)
        filters = ops.Filters(*(torch.from_numpy(array) for array in arrays))
    temperatures = torch.from_numpy(sampling.temperatures)
    ops.sample(logits, vocab, found, temperatures, numbers, out, filters)
    return out


def test_a_number_that_rounds_up_to_the_total_takes_the_last_token_that_weighs():
    logits = torch.tensor([[0.0, 1.0, 0.5, -torch.inf]])
    found = ops.Epilogue.allocate(1, "cpu")
    ops.epilogue(logits, 4, found)
    out = torch.empty(1, dtype=torch.int32)
    one = torch.ones(1, dtype=torch.float64)
    ops.sample(logits, 4, found, one, one, out)
    assert out.tolist() == [2]


def test_without_triton_a_kernel_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(ops, "INTERPRETED", True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ops.require_triton.cache_clear()
    with pytest.raises(ModelUnavailableError, match="needs triton, which is not installed"):
        ops.silu_mul(torch.ones(1, 4))
    ops.require_triton.cache_clear()
