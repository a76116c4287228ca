"""The decoder against transformers: any chunking and batching gives one forward's logits."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.models.reference import CASES, Harness, logits_of, make_model, save
from trserve.models import attention
from trserve.models.mlp import Expert
from trserve.models.native.library import CHOICE, runnable_variants

TOLERANCE = 1e-4


@pytest.fixture(autouse=True, scope="module", params=["none", *runnable_variants()[:1]])
def kernels(request):
    """Everything by torch alone, then with the compiled kernels where there are any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CHOICE, request.param)
        yield request.param


@pytest.fixture(scope="module", params=list(CASES))
def checkpoint(request, tmp_path_factory):
    model = make_model(request.param)
    return model, save(model, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    model = make_model("qwen3")
    return model, save(model, tmp_path_factory.mktemp("qwen3"))


def assert_close(actual, expected, tolerance=TOLERANCE):
    assert actual.dtype == torch.float32
    assert (actual - expected).abs().max().item() < tolerance


def chunked(draw_size, total):
    """Chunk boundaries of ``total`` tokens, each chunk's size from ``draw_size``."""
    start = 0
    while start < total:
        size = min(draw_size(), total - start)
        yield start, size
        start += size


def run_mixed(harness, reference, sequences, plans):
    """Run every sequence's chunks, the i-th chunks of all in one step, and compare each."""
    tables = [harness.table(len(tokens)) for tokens in sequences]
    for index in range(max(map(len, plans))):
        active = [row for row, plan in enumerate(plans) if index < len(plan)]
        chunks = [(row, *plans[row][index]) for row in active]
        out = harness.forward(
            [(sequences[row][at : at + size], at, tables[row]) for row, at, size in chunks]
        )
        for got, (row, at, size) in zip(out.logits, chunks, strict=True):
            assert_close(got, reference[row][at + size - 1])


def test_one_prefill_equals_transformers(checkpoint):
    model, path = checkpoint
    tokens = torch.randint(96, (100,)).tolist()
    harness = Harness(path)
    out = harness.forward([(tokens, 0, harness.table(100))])
    assert_close(out.logits[0], logits_of(model, tokens)[-1])
    with torch.no_grad():
        hidden = model.model(torch.tensor([tokens])).last_hidden_state[0, -1]
    assert_close(out.hidden[0], hidden)


def test_ragged_mixes_equal_transformers(checkpoint):
    """Prefill chunks, suffixes and decodes of several sequences in the same steps."""
    model, path = checkpoint
    rng = np.random.default_rng(7)
    sequences = [rng.integers(96, size=n).tolist() for n in (90, 40, 17, 75, 1, 33)]
    sizes = ([1], [1, 2, 13], [17, 30], [1, 16, 40], [1], [3, 1, 20])
    plans = [
        list(chunked(lambda choice=choice: int(rng.choice(choice)), len(tokens)))
        for tokens, choice in zip(sequences, sizes, strict=True)
    ]
    reference = [logits_of(model, tokens) for tokens in sequences]
    run_mixed(Harness(path), reference, sequences, plans)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_chunking_gives_the_same_logits(qwen3, data):
    model, path = qwen3
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))
    seed = data.draw(st.integers(0, 1000))
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(96, size=n).tolist() for n in lengths]
    draw_size = lambda: data.draw(st.integers(1, 60))  # noqa: E731
    plans = [list(chunked(draw_size, n)) for n in lengths]
    block_size = data.draw(st.sampled_from([1, 5, 16]))
    harness = Harness(path, num_blocks=320, block_size=block_size, seed=seed)
    run_mixed(harness, [logits_of(model, s) for s in sequences], sequences, plans)


def test_grouping_by_length_changes_nothing(qwen3, monkeypatch):
    """Rows of very different lengths, with every limit so low that they are split into groups."""
    monkeypatch.setattr(attention, "_PADDING_TOLERATED", 0)
    monkeypatch.setattr(attention, "_GATHER_ELEMENTS", 64 * 2 * 2 * 16)
    model, path = qwen3
    rng = np.random.default_rng(3)
    sequences = [rng.integers(96, size=n).tolist() for n in (200, 3, 60, 9, 61, 1, 120)]
    plans = [
        [(0, n - tail), (n - tail, tail)]
        for n, tail in ((200, 1), (3, 1), (60, 5), (9, 1), (61, 16), (120, 1))
    ]
    plans.insert(5, [(0, 1)])
    reference = [logits_of(model, tokens) for tokens in sequences]
    run_mixed(Harness(path, num_blocks=80), reference, sequences, plans)


def test_one_long_row_does_not_pad_the_others(qwen3, monkeypatch):
    """Where padding is not cheap, what is gathered is at most twice what is needed."""
    monkeypatch.setattr(attention, "_PADDING_TOLERATED", 1000)
    monkeypatch.setenv(CHOICE, "none")
    _, path = qwen3
    harness = Harness(path, num_blocks=64, block_size=1)
    lengths = [60] + [5] * 20
    rows = [([1], length - 1, np.arange(length, dtype=np.int32)) for length in lengths]
    harness.forward(rows)
    batches = harness.runner._attention._batches
    assert sum(batch.rows for batch in batches) == len(rows)
    assert sum(batch.rows * batch.length for batch in batches) <= 2 * sum(lengths)
    # A suffix among decodes gets a batch of its own, instead of widening theirs.
    harness.forward([(list(range(16)), 30, np.arange(46, dtype=np.int32)), *rows[1:]])
    assert sorted(batch.width for batch in harness.runner._attention._batches) == [1, 16]


def test_128_greedy_tokens_equal_transformers(checkpoint):
    model, path = checkpoint
    prompt = [5, 17, 40, 8, 77, 3, 21]
    tokens = list(prompt)
    harness = Harness(path)
    table = harness.table(len(prompt) + 128)
    start = 0
    for _ in range(128):
        out = harness.forward([(tokens[start:], start, table)])
        start = len(tokens)
        tokens.append(int(out.logits[0].argmax()))
    # One forward over all of them gives the reference's choice after each: greedy decoding.
    expected = logits_of(model, tokens[:-1])[len(prompt) - 1 :].argmax(-1).tolist()
    assert tokens[len(prompt) :] == expected


def test_columns_past_the_tokenizer_are_minus_infinity(qwen3):
    model, path = qwen3
    harness = Harness(path, tokenizer_size=90)
    out = harness.forward([([4, 5, 6], 0, harness.table(3))])
    assert torch.isneginf(out.logits[0, 90:]).all()
    assert_close(out.logits[0, :90], logits_of(model, [4, 5, 6])[-1, :90])


def test_bfloat16_is_close(checkpoint):
    model, path = checkpoint
    tokens = torch.randint(96, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    harness = Harness(path, dtype=torch.bfloat16)
    table = harness.table(40)
    harness.forward([(tokens[:25], 0, table)])
    harness.forward([(tokens[25:39], 25, table)])
    out = harness.forward([(tokens[39:], 39, table)])
    exact = logits_of(model, tokens)[-1]
    rounded = type(model).from_pretrained(path, dtype=torch.bfloat16)
    expected = logits_of(rounded, tokens)[-1].float()
    # As far from float32 as transformers in bfloat16 is, up to a factor for luck.
    assert_close(out.logits[0], exact, 3 * (expected - exact).abs().max().item() + 1e-3)


def test_no_row_sees_what_another_left(qwen3):
    """A NaN in all other blocks, and in the unused rest of the row's own, must not come through."""
    model, path = qwen3
    harness = Harness(path, num_blocks=32)
    long, short = harness.table(60), harness.table(11)
    for layer in harness.kv.layers:
        layer[:-1] = torch.nan
    a, b = list(range(60)), list(range(30, 41))
    harness.forward([(a[:59], 0, long), (b[:10], 0, short)])
    out = harness.forward([(a[59:], 59, long), (b[10:], 10, short)])
    assert_close(out.logits[0], logits_of(model, a)[-1])
    assert_close(out.logits[1], logits_of(model, b)[-1])
    # And a row that is itself poisoned stays alone with it.
    harness.kv.layers[0][int(short[0]), :, :, 0] = torch.nan
    out = harness.forward([(a[59:], 59, long), (b[10:], 10, short)])
    assert_close(out.logits[0], logits_of(model, a)[-1])
    assert torch.isnan(out.logits[1]).any()


def test_dummy_block_is_never_written(qwen3):
    _, path = qwen3
    harness = Harness(path, num_blocks=16)
    harness.forward([(list(range(50)), 0, harness.table(50)), ([1, 2], 0, harness.table(2))])
    for layer in harness.kv.layers:
        assert not layer[-1].any()


def test_an_expert_runs_once_a_step_over_all_of_its_tokens(tmp_path, monkeypatch):
    path = save(make_model("experts"), tmp_path)
    harness = Harness(path)
    ran = []
    into = Expert.into
    monkeypatch.setattr(
        Expert,
        "into",
        lambda expert, rows, out: (ran.append((expert, len(rows))), into(expert, rows, out)),
    )
    rows = [(list(range(20)), 0, harness.table(20)), ([5], 0, harness.table(1))]
    harness.forward(rows)
    experts, active, tokens = 8, 3, (21, 21, 2)
    # The last layer computes only the last token of each row.
    assert sum(count for _, count in ran) == active * sum(tokens)
    assert len({expert for expert, _ in ran}) == len(ran) <= 3 * experts
