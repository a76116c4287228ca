"""The runner's contract, as ``tests/workers/test_runner.py`` has it, where a block is a row."""

import time

import numpy as np
import pytest
import torch

from tests.edge.onnx.exporting import Rows, export_to, random_model, require_runtime
from trserve.models.token_map import TokenMap

require_runtime()

from trserve.edge.onnx import runner as runners  # noqa: E402
from trserve.edge.onnx.rows import Row  # noqa: E402
from trserve.workers.runner import keep_tap  # noqa: E402

NEAR = 1e-4
TOLERANCE = {"atol": NEAR, "rtol": 0.0}


@pytest.fixture(scope="module", params=["qwen3", "qwen2"])
def exported(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return export_to(random_model(request.param, folder), folder / "out")[0]


def ids(count, seed):
    return np.random.default_rng(seed).integers(0, 96, count).tolist()


def near(ours, theirs):
    return all(
        torch.allclose(getattr(ours, name), getattr(theirs, name), **TOLERANCE)
        for name in ("logits", "hidden")
    )


def test_rows_of_any_lengths_side_by_side(exported):
    """Prompts, decodes, a suffix; rows come and go, and a row is used anew."""
    rows = Rows(exported)
    steps = [{0: 20, 1: 7}, {0: 1, 1: 1}, {1: 1, 0: 4}, {0: 1, 1: 1, 2: 30}, {2: 1}, {1: 3, 2: 1}]
    for seed, counts in enumerate(steps):
        ours, theirs = rows.forward({row: ids(n, 10 * seed + row) for row, n in counts.items()})
        assert near(ours, theirs), f"step {seed}"
        assert ours.logits.dtype == ours.hidden.dtype == torch.float32 and ours.tap is None
    rows.done[0] = 0
    assert near(*rows.forward({0: ids(5, 99)})), "another request in the same memory"


def test_the_tap_is_given_once_it_is_asked_for(exported):
    rows = Rows(exported)
    keep_tap(rows.ours)
    rows.torchs.runner.keep_tap()
    for tokens in ({0: ids(9, 1), 1: ids(3, 2)}, {0: [4]}):
        ours, theirs = rows.forward(tokens)
        assert torch.allclose(ours.tap, theirs.tap, **TOLERANCE)
        assert not torch.allclose(ours.tap, ours.hidden, atol=1e-2)


def test_further_tokens_and_their_logits(exported):
    rows = Rows(exported)
    also = np.array([0, 3, 8, 9])
    ours, theirs = rows.forward({0: ids(7, 1), 1: ids(4, 2)}, also)
    assert near(ours, theirs)
    assert torch.allclose(ours.also, theirs.also, **TOLERANCE)
    scored = rows.ours.logits(ours.also)
    assert torch.allclose(scored, rows.torchs.runner.logits(theirs.also), **TOLERANCE)


@pytest.mark.parametrize("also", [None, np.array([0, 4, 5, 17, 19])])
def test_long_rows_are_computed_in_chunks_with_signs_of_life(exported, monkeypatch, also):
    monkeypatch.setattr(runners, "CHUNK", 5)
    rows = Rows(exported)
    signs = []
    rows.ours.on_layer = lambda: signs.append(None)
    ours, theirs = rows.forward({0: ids(17, 3), 1: ids(6, 4)}, also)
    assert near(ours, theirs)
    assert len(signs) == 4 + 2
    if also is not None:
        assert torch.allclose(ours.also, theirs.also, **TOLERANCE)


def test_a_row_that_comes_back_only_appends(exported, monkeypatch):
    """The keys and values of a row are never computed twice, nor moved, nor anyone else's."""
    rows = Rows(exported)
    memory = rows.ours._kv.memory
    rows.forward({0: ids(20, 1), 1: ids(6, 2)})
    before = memory.copy()
    computed = []
    run = Row.run
    monkeypatch.setattr(
        Row, "run", lambda row, ids, *a: (computed.append(len(ids)), run(row, ids, *a))
    )
    rows.forward({0: ids(3, 3)})
    assert computed == [3]
    changed = (memory != before).any((1, 2, 3, 5))
    assert changed.nonzero()[0].tolist() == [3] * 3 and changed.nonzero()[1].tolist() == [
        20,
        21,
        22,
    ]
    assert rows.ours._kv.memory is memory


def test_what_another_request_left_in_a_row_is_never_read(exported):
    """Not even multiplied by a probability of zero: that would be a NaN."""
    rows = Rows(exported)
    rows.ours._kv.memory[:] = np.nan
    for seed, counts in enumerate([{0: 20, 1: 1}, {0: 1, 1: 6}, {0: 7, 1: 1}]):
        ours, theirs = rows.forward({row: ids(n, seed + row) for row, n in counts.items()})
        assert near(ours, theirs), f"step {seed}"


def test_what_is_no_token_is_minus_infinity(exported):
    """Padding of the vocabulary, ids that are absent, and ids that stand for other rows."""
    plain = Rows(exported).forward({0: ids(8, 1)})[0].logits.clone()
    mapping = TokenMap(moved=((5, 9), (9, 5)), absent=(20,))
    mapped = Rows(exported, tokenizer_size=90, token_map=mapping)
    tokens = [{5: 9, 9: 5}.get(token, token) for token in ids(8, 1)]
    found = mapped.forward({0: tokens})[0].logits
    expected = plain.clone()
    expected[:, [5, 9]] = plain[:, [9, 5]]
    expected[:, 20] = expected[:, 90:] = -torch.inf
    assert torch.equal(found, expected)
    assert torch.isneginf(
        mapped.ours.logits(torch.zeros(2, exported.spec.hidden_size))[:, 90:]
    ).all()


def test_cost_follows_the_tokens_and_not_the_capacity(exported):
    """A decode over 16 tokens costs the same in a row 32 times as long."""

    def best(capacity):
        rows = Rows(exported, capacity=capacity)
        rows.forward({0: ids(15, 1)})
        times = []
        for _ in range(60):
            rows.done[0] = 15
            rows.step.clear()
            rows.step.add_row(np.array([1]), 15, np.array([3], np.int32))
            start = time.perf_counter()
            rows.ours.forward(rows.step)
            times.append(time.perf_counter() - start)
        return min(times)

    best(16)
    assert best(512) < 3 * best(16)


def test_memory_is_taken_when_tokens_are_written(exported):
    """A gibibyte of rows that nobody uses costs nothing."""

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    exported.runner()
    before = resident()
    runner = exported.runner(rows=4096, capacity=512)
    assert runner._kv.memory.nbytes >= 2**29
    assert resident() - before < 2**27
