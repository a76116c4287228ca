"""The block pool against a recount: nothing is held twice, lost, or taken in part."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from trserve.params import RequestParams, SamplingParams
from trserve.workers.blocks import BlockPool
from trserve.workers.request import Request

ROW = 40


def new_request(block_size: int = 4) -> Request:
    return Request(
        slot=0,
        gen=1,
        params=RequestParams(sampling=SamplingParams()),
        prompt_len=1,
        limit=ROW,
        row=np.zeros(ROW, np.int32),
        block_table=np.zeros(-(-ROW // block_size), np.int32),
        peers=1,
    )


class PoolAgainstCount(RuleBasedStateMachine):
    @initialize(blocks=st.integers(0, 20), size=st.integers(1, 7))
    def create(self, blocks: int, size: int) -> None:
        self.size = size
        self.pool = BlockPool(blocks, size)
        self.requests = [new_request(size) for _ in range(4)]

    @rule(who=st.integers(0, 3), length=st.integers(0, ROW))
    def extend(self, who: int, length: int) -> None:
        request = self.requests[who]
        before = request.block_table[: request.num_blocks].tolist()
        needed = max(0, -(-length // self.size) - len(before))
        free = self.pool.num_free
        assert self.pool.missing(request, length) == needed
        assert self.pool.extend(request, length) is (needed <= free)
        taken = needed if needed <= free else 0
        assert self.pool.num_free == free - taken
        assert request.num_blocks == len(before) + taken
        assert request.block_table[: len(before)].tolist() == before

    @rule(who=st.integers(0, 3))
    def release(self, who: int) -> None:
        request = self.requests[who]
        free = self.pool.num_free + request.num_blocks
        request.num_computed = 3
        for _ in range(2):  # a second time is nothing
            self.pool.release(request)
            assert (request.num_blocks, request.num_computed) == (0, 0)
            assert self.pool.num_free == free

    @invariant()
    def every_block_is_somewhere_once(self) -> None:
        self.pool.check(self.requests)


TestPoolAgainstCount = PoolAgainstCount.TestCase


@given(st.integers(1, 10), st.integers(1, 8))
def test_a_block_that_is_lost_or_held_twice_is_noticed(blocks: int, length: int) -> None:
    pool, request = BlockPool(blocks, 1), new_request(1)
    if not pool.extend(request, min(length, blocks)):
        raise AssertionError("it fits")
    with pytest.raises(AssertionError, match="exist"):
        pool.check([])
    with pytest.raises(AssertionError, match="exist"):
        pool.check([request, request])
