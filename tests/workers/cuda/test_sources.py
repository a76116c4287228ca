"""Ids that are read where a link has put them: whatever the step's shape, they are what counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.models.reference import make_model, save
from tests.workers.cuda.harness import ALL, Beside, router_of
from tests.workers.cuda.test_runner import go
from trserve.errors import ConfigError
from trserve.workers.cuda.buckets import Bucket
from trserve.workers.cuda.create import ATTENTION_VARIABLE, attention_from_environment
from trserve.workers.cuda.static_inputs import StaticInputs
from trserve.workers.step import StepInputs, TokenSources

WRONG = 3


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(make_model("qwen3"), tmp_path_factory.mktemp("model"))


class Elsewhere(Beside):
    """Of most steps the graphs are told wrong ids, and where the right ones lie."""

    moved = 0

    def before_graphs(self) -> None:
        count = self.step.num_tokens
        if self.rng.random() < 0.3:
            return
        self.ids = self.step.token_ids[:count].astype(np.int32)
        chosen = np.flatnonzero(self.rng.random(count) < 0.6)
        addresses = np.zeros(count, np.int64)
        addresses[chosen] = self.ids.ctypes.data + 4 * chosen
        self.step.token_ids[chosen] = WRONG
        self.step.sources = TokenSources(addresses, lambda: True)
        self.moved += len(chosen)


@pytest.mark.parametrize("pieces", [ALL, frozenset()])
def test_random_steps_are_the_cpus(path, pieces, full):
    """Decodes, extends of one width or several, and prompts, each with and without sources."""
    router = router_of("r-stitch", tau=0.5)
    beside = Elsewhere(path, router, seed=21, pieces=pieces, reads_sources=True)
    assert go(beside, 200 if full else 25) == {0, 1}
    assert beside.moved > 100


@pytest.mark.parametrize("decides", [True, False])
@pytest.mark.parametrize("counts", [[1, 1], [3, 2], [12, 1]])
def test_what_was_written_over_is_computed_again_from_the_row(path, decides, counts, caplog):
    """Its keys and values as well: the next step reads them."""
    beside = Beside(path, router_of("entropy", threshold=0.5), seed=22, reads_sources=True)
    rows = [beside.row(24), beside.row(14)]
    beside.check(rows, [9, 10])
    beside.fill(rows, counts)
    ask, count = beside.ask(rows), sum(counts)
    expected, tokens, _ = beside.expected(rows, ask)
    wrong = np.full(count, WRONG, np.int32)
    addresses = wrong.ctypes.data + 4 * np.arange(count)
    beside.step.sources = TokenSources(addresses, lambda: False)
    graphs = beside.graphs
    found = graphs.decide(beside.step, ask) if decides else graphs.forward(beside.step)
    assert caplog.messages == [
        "ids on the device were written over in a step; it is computed again"
    ]
    assert torch.allclose(found.logits[:, :90], expected.logits[:, :90], atol=2e-4)
    assert not decides or found.tokens.tolist() == tokens.tolist()
    beside.check(rows, [1, 1])


def test_a_step_without_sources_leaves_none_of_those_before():
    """Shapes share their memory: what another shape has there is no address."""
    inputs = StaticInputs(torch.device("cpu"), max_rows=4, max_tokens=16, with_sources=True)
    ids = np.arange(40, 48, dtype=np.int32)
    step = StepInputs(max_tokens=16, max_rows=4, max_blocks_per_row=2, block_size=8)
    table = np.array([5, 3], np.int32)
    for given in (True, False):
        for rows, bucket in (([2, 1], Bucket(3, 4)), ([4, 4], Bucket(3, 4)), ([1], Bucket(2, 1))):
            views = inputs.tokens(bucket.tokens)
            inputs._words[inputs._first_token :] = 99  # what is there is left by others
            step.clear()
            for number, count in enumerate(rows):
                step.add_row(np.arange(count) + 10 * number, 8, table)
            count = step.num_tokens
            if given:
                where = np.concatenate((ids.ctypes.data + 4 * np.arange(count), np.zeros(16)))
                step.sources = TokenSources(where.astype(np.int64), lambda: True)
            inputs.fill(views, step, bucket)
            views.copy()
            written = views.device.ids[views.device.slots >= 0].tolist()
            own = [int(i) for i in (ids[:count] if given else step.token_ids[:count])]
            assert written == own
            assert int((views.device_addresses != 0).sum()) == given * count


def test_a_backend_can_be_named(monkeypatch):
    monkeypatch.delenv(ATTENTION_VARIABLE, raising=False)
    assert attention_from_environment() == "auto"
    monkeypatch.setenv(ATTENTION_VARIABLE, "triton")
    assert attention_from_environment() == "triton"
    monkeypatch.setenv(ATTENTION_VARIABLE, "fast")
    with pytest.raises(ConfigError, match="TRSERVE_ATTENTION=fast: is one of auto, flashinfer"):
        attention_from_environment()
