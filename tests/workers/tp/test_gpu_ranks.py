"""The GPU's runner in two ranks, emulated on the CPU: it decides what one process decides."""

from __future__ import annotations

import threading

import pytest

from tests.models.reference import make_model, save
from tests.workers.cuda.harness import (
    BLOCK,
    MAX_ROWS,
    MAX_TOKENS,
    NUM_BLOCKS,
    ROW_TOKENS,
    Beside,
    router_of,
)
from tests.workers.cuda.test_runner import go
from tests.workers.tp.groups import WAIT_S, grouped
from tests.workers.tp.harness import model_plan
from tests.workers.tp.test_joining import plan_of
from trserve.errors import ConfigError
from trserve.workers.tp.gpu import CudaRank, FirstCudaRank, create_cuda_runner
from trserve.workers.tp.runner import follow


def plan_for(path, **changes):
    model = model_plan(path, 2, num_blocks=NUM_BLOCKS, **changes)
    sizes = {"block_size": BLOCK, "max_rows": MAX_ROWS, "max_tokens": MAX_TOKENS}
    return plan_of(models=[model], row_tokens=ROW_TOKENS, tokenizer_size=90, **sizes)


@pytest.mark.parametrize("case", ["qwen3", "experts"])
def test_two_ranks_decide_what_one_process_decides(tmp_path, case):
    """Buckets, eager steps and decisions within the step; experts run without graphs."""
    path, errors = save(make_model(case), tmp_path), []
    plan, router = plan_for(path), router_of("r-stitch", tau=0.5)
    beside = Beside(path, router, seed=11)
    width = ROW_TOKENS // BLOCK
    with grouped(2, max_tokens=MAX_TOKENS, max_rows=MAX_ROWS, width=width) as group:

        def rank_1():
            try:
                inner, _ = create_cuda_runner(plan, 0, 1, lambda device: group.sums(1))
                rank = CudaRank(inner, 90)
                follow(group.memories[1], group.reader(1, BLOCK), rank)
                rank.close()
            except BaseException as error:
                errors.append(error)
                raise

        other = threading.Thread(target=rank_1)
        other.start()
        inner, sums = create_cuda_runner(plan, 0, 0, lambda device: group.sums(0))
        writer = group.writer()
        writer.adopt(beside.step)  # before the runner beside it looks where the tables are
        first = FirstCudaRank(inner, sums, writer)
        first.prepare(router)
        beside.graphs = first
        assert go(beside, 12) == {0, 1}
        first.close()
        other.join(WAIT_S)
        assert not other.is_alive() and not errors


class Noted:
    """A runner and a writer that say when they are called."""

    def __init__(self):
        self.calls = []
        self.embedding = None

    def __getattr__(self, name):
        return lambda *_: self.calls.append(name)


def test_a_step_that_nobody_waits_for_keeps_its_tables_until_all_have_taken_it():
    noted = Noted()
    FirstCudaRank(noted, noted, noted).forward(None)
    assert noted.calls == ["tell", "forward", "await_taken"]


def test_8_bit_weights_are_refused(tmp_path):
    plan = plan_for(save(make_model("qwen3"), tmp_path), int8=True)
    with pytest.raises(ConfigError, match="int8 is for the CPU"):
        create_cuda_runner(plan, 0, 0, lambda device: None)
