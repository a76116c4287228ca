"""The block pool against what its blocks must hold: nothing lost, held twice or overwritten."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trserve.params import RequestParams, SamplingParams
from trserve.workers import blocks as blocks_module
from trserve.workers.blocks import BlockPool
from trserve.workers.prefix_cache import block_hash
from trserve.workers.request import Request

ROW = 40


def new_request(block_size: int = 4, row: np.ndarray | None = None, length: int = ROW) -> Request:
    request = Request(
        slot=0,
        gen=1,
        params=RequestParams(sampling=SamplingParams()),
        prompt_len=1,
        limit=ROW,
        row=np.zeros(ROW, np.int32) if row is None else row,
        block_table=np.zeros(-(-ROW // block_size), np.int32),
        banks=(memoryview(b""), memoryview(b"")),
        peers_left=[memoryview(bytes(8)).cast("q")],
    )
    request.length = length
    return request


def few_hashes(before: int, tokens: bytes) -> int:
    """Collides all the time."""
    return block_hash(before, tokens) % 3


class PoolAgainstContents(RuleBasedStateMachine):
    """Four requests over rows of two tokens, so that prefixes are shared all the time.

    ``kv`` is what the KV cache would hold: for each token slot the row up to and with its token.
    """

    patch = None

    @initialize(
        blocks=st.integers(0, 24), size=st.integers(1, 5), on=st.booleans(), weak=st.booleans()
    )
    def create(self, blocks: int, size: int, on: bool, weak: bool) -> None:
        self.size = size
        self.pool = BlockPool(blocks, size, prefix_caching=on)
        self.kv: dict[tuple[int, int], tuple[int, ...]] = {}
        self.requests = [self.begin([0], 1) for _ in range(4)]
        self.patch = pytest.MonkeyPatch()
        if weak:
            self.patch.setattr(blocks_module, "block_hash", few_hashes)

    def teardown(self) -> None:
        if self.patch:
            self.patch.undo()

    def begin(self, tokens: list[int], length: int) -> Request:
        row = np.resize(np.array(tokens, np.int32), ROW)
        return new_request(self.size, row, length)

    @rule(
        who=st.integers(0, 3),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        length=st.integers(1, ROW),
    )
    def replace(self, who: int, tokens: list[int], length: int) -> None:
        """It ends, and another one takes its place."""
        self.pool.release(self.requests[who])
        self.requests[who] = self.begin(tokens, length)

    @rule(who=st.integers(0, 3))
    def match(self, who: int) -> None:
        request = self.requests[who]
        if request.num_computed == request.num_cached * self.size:
            before = request.num_computed
            self.pool.match(request)
            assert before <= request.num_computed < request.length

    @rule(who=st.integers(0, 3), tokens=st.integers(1, 12))
    def compute(self, who: int, tokens: int) -> None:
        request = self.requests[who]
        end = min(request.num_computed + tokens, request.length)
        missing, available = self.pool.missing(request, end), self.pool.num_available
        assert missing == max(0, -(-end // self.size) - request.num_blocks)
        assert self.pool.extend(request, end) is (missing <= available)
        if missing > available:
            assert self.pool.num_available == available
            return
        assert self.pool.num_available == available - missing
        for at in range(request.num_computed, end):
            block = int(request.block_table[at // self.size])
            assert not self.pool.is_cached(block), "others may read what is written"
            self.kv[block, at % self.size] = tuple(request._row[: at + 1].tolist())
        request.num_computed = end
        self.pool.note_computed([(request, tokens)])

    @rule(who=st.integers(0, 3), tokens=st.integers(1, 12))
    def grow(self, who: int, tokens: int) -> None:
        """Tokens are committed, here or by a peer."""
        request = self.requests[who]
        request.length = min(request.length + tokens, ROW)
        request.num_computed = min(request.num_computed, request.length - 1)

    @rule(who=st.integers(0, 3))
    def come_back(self, who: int) -> None:
        """With nothing new: the last token is computed again."""
        request = self.requests[who]
        request.num_computed = min(request.num_computed, request.length - 1)

    @rule(victims=st.sets(st.integers(0, 3)))
    def release(self, victims: set[int]) -> None:
        lost = [self.requests[who] for who in victims]
        expected = self.pool.num_available + self.pool.gain(lost)
        for request in lost * 2:  # a second time is nothing
            self.pool.release(request)
            assert (request.num_blocks, request.num_computed, request.num_cached) == (0, 0, 0)
        assert self.pool.num_available == expected

    @precondition(lambda self: self.pool.num_cached)
    @rule()
    def forget(self) -> None:
        self.pool.forget_cached()
        assert self.pool.num_cached == 0

    @invariant()
    def accounts_add_up(self) -> None:
        self.pool.check(self.requests)
        held = {b for r in self.requests for b in r.block_table[: r.num_blocks].tolist()}
        assert self.pool.num_free + self.pool.num_cached + len(held) == self.pool.num_blocks

    @invariant()
    def everybody_reads_their_own_row(self) -> None:
        for request in self.requests:
            for at in range(request.num_computed):
                block = int(request.block_table[at // self.size])
                assert self.kv[block, at % self.size] == tuple(request._row[: at + 1].tolist())


TestPoolAgainstContents = PoolAgainstContents.TestCase


@given(st.integers(1, 10), st.integers(1, 8))
def test_a_block_that_is_lost_or_held_twice_is_noticed(blocks: int, length: int) -> None:
    pool, request = BlockPool(blocks, 1), new_request(1)
    assert pool.extend(request, min(length, blocks))
    with pytest.raises(AssertionError, match="exist"):
        pool.check([])
    with pytest.raises(AssertionError, match="exist"):
        pool.check([request, request])


def computed(pool: BlockPool, tokens: list[int], length: int | None = None) -> Request:
    """A request that took what there was and has computed the rest, in one step."""
    row = np.array(tokens + [0] * (ROW - len(tokens)), np.int32)
    request = new_request(pool.block_size, row, len(tokens) if length is None else length)
    pool.match(request)
    pool.started(request)
    assert pool.extend(request, request.length)
    request.num_computed = request.length
    pool.note_computed([(request, request.length)])
    return request


def table(request: Request) -> list[int]:
    return request.block_table[: request.num_blocks].tolist()


def test_the_same_prompt_shares_all_blocks_before_its_last_token() -> None:
    pool = BlockPool(16, 4)
    first, second = computed(pool, list(range(10))), computed(pool, list(range(10)))
    assert table(first)[:2] == table(second)[:2]
    assert table(first)[2] != table(second)[2]
    assert (pool.queried_tokens, pool.hit_tokens) == (20, 8)
    assert (pool.num_free, pool.num_cached) == (12, 0)


def test_a_prompt_that_ends_with_a_block_computes_that_block_again() -> None:
    pool = BlockPool(16, 4)
    first = computed(pool, list(range(8)))
    pool.release(first)
    assert pool.num_cached == 2  # its last block too, now that nobody writes there
    second = new_request(4, np.arange(ROW, dtype=np.int32), 8)
    pool.match(second)
    assert (second.num_computed, second.num_blocks) == (4, 1)


def test_the_second_of_two_that_compute_the_same_adopts_the_first_ones_blocks() -> None:
    pool = BlockPool(16, 4)
    both = [new_request(4, np.arange(ROW, dtype=np.int32), 13) for _ in range(2)]
    for request in both:
        pool.match(request)
        assert pool.extend(request, 13)
    assert pool.num_free == 8
    for request in both:
        request.num_computed = 13
        pool.note_computed([(request, 13)])
    assert table(both[0])[:3] == table(both[1])[:3]
    assert pool.num_free == 11
    pool.check(both)


def test_a_waiting_request_takes_more_as_others_compute_it() -> None:
    pool = BlockPool(16, 4)
    first, second = (new_request(4, np.arange(ROW, dtype=np.int32), 14) for _ in range(2))
    for end, found in ((5, 4), (9, 8), (14, 12)):
        assert pool.extend(first, end)
        first.num_computed = end
        pool.note_computed([(first, 0)])
        pool.match(second)
        assert second.num_computed == found


def test_free_blocks_go_first_and_then_the_least_recently_used_from_its_end() -> None:
    pool = BlockPool(8, 4)
    old, new = computed(pool, [1] * 13), computed(pool, [2] * 13)
    wanted = [*reversed(table(old)[:3]), *reversed(table(new)[:3])]
    last = {table(old)[3], table(new)[3]}
    pool.release(old)
    pool.release(new)
    assert (pool.num_free, pool.num_cached) == (2, 6)
    request = new_request(4)
    assert pool.extend(request, 32)
    assert set(table(request)[:2]) == last
    assert table(request)[2:] == wanted
    assert pool.evictions == 6


def test_a_hit_is_a_use() -> None:
    pool = BlockPool(6, 4)
    old, new = computed(pool, [1] * 9), computed(pool, [2] * 9)
    pool.release(old)
    pool.release(new)
    pool.release(computed(pool, [1] * 9))
    assert pool.extend(new_request(4), 4 * 4)  # 2 free blocks and those of [2] * 9
    request = new_request(4, np.full(ROW, 1, np.int32), 9)
    pool.match(request)
    assert request.num_computed == 8


def test_equal_tokens_after_another_prefix_are_no_hit() -> None:
    pool = BlockPool(16, 4)
    computed(pool, [1, 1, 1, 1, 5, 6, 7, 8, 9])
    other = new_request(4, np.array([2, 1, 1, 1, 5, 6, 7, 8, 9] + [0] * 31, np.int32), 9)
    pool.match(other)
    assert other.num_computed == 0


def test_equal_hashes_are_no_hit_and_never_two_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "block_hash", lambda before, tokens: 5)
    pool = BlockPool(16, 4)
    first, other = computed(pool, [1] * 9), computed(pool, [2] * 9)
    assert first.num_cached == 1  # its own second block has the hash of its first
    assert other.num_cached == 0
    assert not set(table(first)) & set(table(other))
    pool.release(first)
    pool.forget_cached()
    other.num_computed = 9
    pool.note_computed([(other, 1)])
    assert other.num_cached == 1
    pool.check([other])


def test_shared_blocks_are_no_gain_until_their_last_holder_is_a_victim() -> None:
    pool = BlockPool(16, 4)
    first, second = computed(pool, list(range(10))), computed(pool, list(range(10)))
    assert [pool.gain(v) for v in ([], [first], [second], [first, second])] == [0, 1, 1, 4]


def test_without_prefix_caching_nothing_is_kept() -> None:
    pool = BlockPool(16, 4, prefix_caching=False)
    pool.release(computed(pool, list(range(10))))
    assert (pool.num_free, pool.num_cached) == (16, 0)
    assert computed(pool, list(range(10))).num_cached == 0
    assert (pool.queried_tokens, pool.hit_tokens) == (0, 0)
