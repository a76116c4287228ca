"""The GPU's runner emulated on the CPU: through buckets, padding and packing it says what the CPU's
runner, sampler and routing say, token for token and destination for destination."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.models.reference import make_model, save
from tests.workers.cuda import harness
from tests.workers.cuda.harness import ALL, MAX_ROWS, Beside, Row, graphs_runner, router_of
from trserve.errors import ConfigError
from trserve.models.cuda.attention import PagedLayers
from trserve.models.cuda.attention_flashinfer import FlashinferAttention
from trserve.models.cuda.attention_torch import TorchAttention
from trserve.models.cuda.attention_triton import TritonAttention
from trserve.workers.runner import SubmittingRunner
from trserve.workers.sampler import NO_TOKEN

FILTERS = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(make_model("qwen3"), tmp_path_factory.mktemp("model"))


def go(beside: Beside, steps: int) -> set[int]:
    """Random steps: prompts in chunks, suffixes, decodes, in batches that change."""
    rng, rows, seen = beside.rng, [], set()
    for _ in range(steps):
        while not rows or (len(rows) < MAX_ROWS and rng.random() < 0.5):
            length = int(rng.integers(1, 30))
            rows.append(beside.row(length, **FILTERS[int(rng.integers(len(FILTERS)))]))
        chosen: list[Row] = [row for row in rows if rng.random() < 0.8] or rows[:1]
        room, counts = 60, []
        for row in chosen:
            left = len(row.tokens) - row.computed
            counts.append(max(1, min(left, int(rng.integers(1, 12)), room - len(chosen))))
            room -= counts[-1]
        tokens, destinations = beside.check(chosen, counts)
        for row, token, destination in zip(chosen, tokens, destinations, strict=True):
            if row.computed == len(row.tokens):
                row.tokens.append(int(token))
                seen.add(destination)
                if rng.random() < 0.3:  # others wrote some more
                    row.tokens += rng.integers(0, 90, int(rng.integers(1, 8))).tolist()
            if len(row.tokens) > 50:
                rows.remove(row)
                beside._free += row.table.tolist()
    return seen


@pytest.mark.parametrize("seed", range(2))
def test_random_steps_are_the_cpus(path, seed, full):
    router = router_of("r-stitch", tau=0.5)
    beside = Beside(path, router, seed=seed)
    assert go(beside, 200 if full else 40) == {0, 1}


@pytest.mark.parametrize("pieces", [frozenset(), ALL - {"router"}, ALL - {"extend"}])
def test_what_is_left_out_of_the_graphs_computes_the_same(path, pieces):
    beside = Beside(path, router_of("entropy", threshold=0.5), seed=3, pieces=pieces)
    assert go(beside, 12) == {0, 1}


@pytest.mark.parametrize(("pieces", "captured"), [("", 0), ("slm", 5)])
def test_pieces_say_what_is_captured(path, pieces, captured):
    runner = graphs_runner(path, router_of("none"), frozenset(filter(None, [pieces])))
    assert len(runner._graphs) == captured < len(runner._shapes)
    assert not runner._decisions._graphs


@pytest.mark.parametrize("case", ["qwen2", "llama-bias", "yarn-rope-options", "experts"])
def test_other_models(tmp_path, case):
    """Biases, scaled rotations, no norm of heads; experts run without graphs."""
    path = save(make_model(case), tmp_path)
    beside = Beside(path, router_of("margin", threshold=0.5), seed=5)
    assert bool(beside.graphs._shapes) is (case != "experts")
    go(beside, 8)


def test_a_model_without_layers(tmp_path):
    beside = Beside(save(make_model("zero-layer"), tmp_path), router_of("none"), seed=6)
    beside.check([beside.row(3), beside.row(1)], [3, 1])
    with pytest.raises(ConfigError, match="no layers"):
        beside.graphs.keep_tap()


def test_attention_that_no_graph_can_replay_is_launched_by_itself(path, monkeypatch):
    """As torch's on a GPU, whose plans are other tensors each time."""
    usual = TorchAttention.__init__

    def on_a_gpu(self, paged):
        usual(self, paged)
        self.replays = False

    monkeypatch.setattr(TorchAttention, "__init__", on_a_gpu)
    beside = Beside(path, router_of("entropy"), seed=3)
    assert not beside.graphs._graphs
    go(beside, 6)


def test_only_torch_on_a_gpu_cannot_be_replayed(monkeypatch):
    layer = torch.zeros(3, 2, 1, 4, 32, device="meta")
    paged = PagedLayers([layer], num_heads=2, max_rows=2, max_tokens=8, max_blocks_per_row=2)
    for device, replays in ("cpu", True), ("cuda", False):
        monkeypatch.setattr(PagedLayers, "device", torch.device(device))
        assert TorchAttention(paged).replays is replays
    assert FlashinferAttention.replays and TritonAttention.replays


def test_weights_of_two_bytes(path):
    """bfloat16 rounds in other places than the CPU's runner does, and no further away."""
    router = router_of("none")
    exact = Beside(path, router, seed=7)
    half = graphs_runner(path, router, dtype=torch.bfloat16)
    rows = [exact.row(5, temperature=1.0), exact.row(9)]
    exact.fill(rows, [5, 9])
    output, _, _ = exact.expected(rows, exact.ask(rows))
    found = half.decide(exact.step, exact.ask(rows))
    assert found.logits.dtype == torch.float32
    error = (found.logits[:, :90] - output.logits[:, :90]).abs().max()
    assert 0.0 < error < 0.05 * output.logits[:, :90].abs().max()


def test_a_row_that_is_not_finite_is_alone_with_it(path):
    """Padding rows read the dummy block, and nobody reads another row's keys."""
    beside = Beside(path, router_of("r-stitch", tau=0.5), seed=8)
    rows = [beside.row(4, temperature=1.0), beside.row(6, temperature=1.0), beside.row(3)]
    tokens, _ = beside.check(rows, [4, 6, 3])
    for row, token in zip(rows, tokens.tolist(), strict=True):
        row.tokens.append(token)
    for cache in beside.graphs._caches:
        cache[rows[1].table[0]] = torch.nan
    for layer in beside.torch.kv.layers:
        layer[rows[1].table[0]] = torch.nan
    for width in (1, 3):
        beside.fill(rows, [len(row.tokens) - row.computed for row in rows])
        ask = beside.ask(rows)
        _, expected, _ = beside.expected(rows, ask)
        found = beside.graphs.decide(beside.step, ask)
        assert expected.tolist()[1] == NO_TOKEN
        assert found.tokens.tolist() == expected.tolist(), width
        assert found.destinations[1] == 0 and np.isnan(found.scores[1])
        for row in rows:
            row.tokens += [5, 6, 7]
    for cache in beside.graphs._caches:
        assert not cache[-1].any(), "the dummy block is to stay zero"


def test_further_tokens_and_steps_that_only_compute(path):
    """Records ask for the logits after other tokens too; nothing is decided then."""
    beside = Beside(path, router_of("none"), seed=9)
    beside.fill([beside.row(4), beside.row(6)], [4, 6])
    also = np.array([1, 7])
    expected = beside.torch.forward(beside.step, also)
    found = beside.graphs.forward(beside.step, also)
    assert found.tokens is None and found.destinations is None
    assert torch.allclose(found.also, expected.also, atol=2e-4)
    assert torch.allclose(found.logits[:, :90], expected.logits[:, :90], atol=2e-4)
    scored = beside.graphs.logits(found.also)
    assert torch.allclose(scored[:, :90], beside.torch.logits(expected.also)[:, :90], atol=2e-4)


def test_a_captured_step_gives_signs_of_life(path):
    beside = Beside(path, router_of("none"), seed=10)
    signs: list[None] = []
    beside.graphs.on_layer = lambda: signs.append(None)
    row = beside.row(6)
    beside.check([row], [5])
    eager = len(signs)
    beside.check([row], [1])
    assert eager >= 2 and len(signs) >= eager + 2


def test_what_need_not_wait_for_a_step_is_done_while_the_device_has_it(path, monkeypatch):
    """It is told once a step, in every kind of step, and before the wait."""
    beside = Beside(path, router_of("none"), seed=12)
    device, calls = beside.graphs._device, []
    for name in ("submitted", "wait"):
        inner = getattr(device, name)
        logged = lambda inner=inner, name=name: (calls.append(name), inner())[1]  # noqa: E731
        monkeypatch.setattr(device, name, logged)
    assert isinstance(beside.graphs, SubmittingRunner)
    beside.graphs.on_submitted = lambda: calls.append("meanwhile")
    for shape in beside.graphs._shapes.values():  # a replay is one call, and takes no time
        monkeypatch.setattr(shape, "launch", lambda: calls.append("replay"))
    row = beside.row(6)
    launched = ["meanwhile", "submitted", "wait"]  # the launches themselves take the time
    replayed = ["replay", "submitted", "meanwhile", "wait"]
    for count, expected in ((5, launched), (1, replayed)):
        beside.fill([row], [count])
        beside.graphs.decide(beside.step, beside.ask([row]))
        assert calls == expected
        calls.clear()
    beside.graphs.forward(beside.step)
    assert calls == replayed[:-1]


def test_graphs_can_be_given_up(path):
    """After that every step is launched, which says the same."""
    beside = Beside(path, router_of("none"), seed=11)
    beside.graphs.close()
    beside.fill([beside.row(1)], [1])
    expected = beside.torch.forward(beside.step)
    found = beside.graphs.forward(beside.step)
    assert torch.allclose(found.logits[:, :90], expected.logits[:, :90], atol=2e-4)


def test_blocks_smaller_than_the_widest_extend(path, monkeypatch):
    monkeypatch.setattr(harness, "BLOCK", 4)
    beside = Beside(path, router_of("none"), seed=12)
    row = beside.row(20)
    for count in (10, 8, 2):
        beside.check([row], [count])
