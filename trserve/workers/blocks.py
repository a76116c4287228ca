"""KV blocks of one worker: who holds which, and what those that nobody holds are good for.

A block is *referenced* (in the tables of one or more requests), *cached* (in none, but its KV may
serve a request that begins with the same tokens) or *free*. The last two stand in one list from
which blocks are taken: the free ones first, then the cached ones, least recently used first.

Sharing is safe without a copy on write because nothing ever writes into a cached block: a block
enters the cache when it is full and the token after it is computed too, and a request takes at
most the full blocks before its last token from the cache. The first ``num_cached`` blocks of a
request are its cached ones, and everything that it still computes lies behind them. (With a
prompt that ends with a block, this computes that whole block anew instead of one token of it; to
compute one token in place would write into a block that others read.)

Knows no tensors, no slab and no scheduling.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from trserve.workers.block_list import BlockList
from trserve.workers.prefix_cache import NONE, ROOT_HASH, PrefixCache, block_hash
from trserve.workers.request import Request


class BlockPool:
    """Hands out fixed-size blocks and takes them back.

    Args:
        num_blocks: blocks in all.
        block_size: tokens per block.
        prefix_caching: whether computed blocks are kept for requests with the same prefix.

    Attributes:
        queried_tokens: tokens to compute of requests that started from nothing here.
        hit_tokens: those of them whose KV was in the cache.
        evictions: cached blocks that were taken for something else.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.evictions = 0
        self._prefix_caching = prefix_caching
        self.reset()

    def reset(self) -> None:
        """Make every block free, whoever has it in a table."""
        self._references = array("i", [0]) * self.num_blocks
        self._list = BlockList(self.num_blocks)
        self._cache = PrefixCache(self.num_blocks) if self._prefix_caching else None
        self._num_cached = 0

    @property
    def num_available(self) -> int:
        """Blocks that nobody holds."""
        return len(self._list)

    @property
    def num_cached(self) -> int:
        """Those of them that are cached."""
        return self._num_cached

    @property
    def num_free(self) -> int:
        """Those of them that hold nothing of use."""
        return len(self._list) - self._num_cached

    # -- taking and giving back --------------------------------------------------------------

    def missing(self, request: Request, length: int) -> int:
        """Blocks that ``request`` lacks to hold the KV of its first ``length`` tokens."""
        return max(0, -(-length // self.block_size) - request.num_blocks)

    def extend(self, request: Request, length: int) -> bool:
        """Give ``request`` the blocks for ``length`` tokens; False, and nothing, if too few."""
        missing = -(-length // self.block_size) - request.num_blocks
        if missing <= 0:
            return True
        if missing > len(self._list):
            return False
        for index in range(request.num_blocks, request.num_blocks + missing):
            request.block_table[index] = self._take()
        request.num_blocks += missing
        return True

    def _take(self) -> int:
        block = self._list.pop_first()
        cache = self._cache
        if cache is not None and block in cache:
            cache.remove(block)
            self._num_cached -= 1
            self.evictions += 1
        self._references[block] = 1
        return block

    def release(self, request: Request) -> None:
        """Take back all blocks of ``request``; a request without any is left as it is.

        Its last block becomes available first: what is cached is evicted from its end.
        """
        if request.num_blocks:
            self._cache_until(request, request.num_computed // self.block_size)
            for block in reversed(request.block_table[: request.num_blocks].tolist()):
                self._drop(block)
        request.num_blocks = 0
        request.num_computed = 0
        request.num_cached = 0

    def _drop(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            return
        if self.is_cached(block):
            self._num_cached += 1
            self._list.push_last(block)
        else:
            self._list.push_first(block)

    def gain(self, victims: Iterable[Request]) -> int:
        """Blocks that become available if all ``victims`` lose theirs: those nobody else holds."""
        tables = [victim.block_table[: victim.num_blocks] for victim in victims]
        if not tables:
            return 0
        blocks, counts = np.unique(np.concatenate(tables), return_counts=True)
        references = np.frombuffer(self._references, np.int32)
        return int((references[blocks] == counts).sum())

    # -- the prefix cache --------------------------------------------------------------------

    def is_cached(self, block: int) -> bool:
        """Whether requests may find ``block`` by its tokens; it must not be written then."""
        return self._cache is not None and block in self._cache

    def match(self, request: Request) -> None:
        """Give ``request``, which has computed nothing itself, the cached blocks of its prefix.

        May be called again before it starts: others go on computing.
        """
        cache = self._cache
        if cache is None or request.num_blocks > request.num_cached:
            return
        for index in range(request.num_cached, (request.length - 1) // self.block_size):
            hashed = self._hash(request, index)
            if not cache.has_hash(hashed):
                break
            block = cache.find(hashed, self._parent(request, index), self._tokens(request, index))
            if block == NONE:
                break
            self._share(request, index, block)
            request.num_blocks = request.num_cached = index + 1
        request.num_computed = request.num_cached * self.block_size

    def next_hash(self, request: Request) -> int | None:
        """Of the block that a step of ``request`` will cache next; None if its row has no such."""
        end = (request.num_cached + 1) * self.block_size
        # One that is full already, as a chunk ended with it, is cached with the token after it.
        if self._cache is None or not request.num_computed <= end < request.length:
            return None
        return self._hash(request, request.num_cached)

    def started(self, request: Request) -> None:
        """Count what ``request``, about to compute its first tokens, took from the cache."""
        if self._cache is not None:
            self.queried_tokens += request.length
            self.hit_tokens += request.num_cached * self.block_size

    def note_computed(self, rows: Iterable[tuple[Request, int]]) -> None:
        """A step has begun: cache the blocks that are full and lie before its last token.

        Nothing is allocated and no block is looked for until it has ended.
        """
        if self._cache is None:
            return
        size = self.block_size
        for request, _ in rows:
            if request.num_computed > (request.num_cached + 1) * size:
                self._cache_until(request, (request.num_computed - 1) // size)

    def cached_up_to_date(self, request: Request) -> bool:
        """Whether :meth:`note_computed` has nothing to do until ``request`` fills a block more."""
        end = (request.num_cached + 1) * self.block_size
        return self._cache is None or request.num_computed <= end

    def _cache_until(self, request: Request, end: int) -> None:
        """Cache the blocks of ``request`` before the ``end``-th, all of them full and computed.

        A block that another request has cached meanwhile replaces the request's own, so that a
        request's blocks are cached from the first on without a gap, and each block's parent is
        held by whoever holds the block. The own one is free at once, though the step that writes to
        it may be under way: whoever gets it does so after that.
        """
        cache = self._cache
        if cache is None:
            return
        for index in range(request.num_cached, end):
            tokens, own = self._tokens(request, index), int(request.block_table[index])
            hashed, parent = self._hash(request, index, tokens), self._parent(request, index)
            cached = cache.find(hashed, parent, tokens)
            if cached != NONE:
                self._share(request, index, cached)
                self._drop(own)
            elif not cache.insert(own, hashed, parent, tokens):
                break
            request.num_cached = index + 1

    def _share(self, request: Request, index: int, block: int) -> None:
        """Put a cached block into the table of ``request``."""
        if not self._references[block]:
            self._list.remove(block)
            self._num_cached -= 1
        self._references[block] += 1
        request.block_table[index] = block

    def _hash(self, request: Request, index: int, tokens: bytes | None = None) -> int:
        """Of a full block, whose ``tokens`` may be at hand."""
        hashes = request.block_hashes
        if index == len(hashes):
            before = hashes[-1] if hashes else ROOT_HASH
            hashes.append(block_hash(before, tokens or self._tokens(request, index)))
        return hashes[index]

    def _tokens(self, request: Request, index: int) -> bytes:
        return request.token_bytes(index * self.block_size, (index + 1) * self.block_size)

    @staticmethod
    def _parent(request: Request, index: int) -> int:
        return int(request.block_table[index - 1]) if index else NONE

    def forget_cached(self) -> None:
        """Make all cached blocks free ones; those that requests hold stay as they are."""
        cache = self._cache
        if cache is None:
            return
        for block in self._list:
            if block in cache:
                cache.remove(block)
        self._num_cached = 0

    # -- accounts ----------------------------------------------------------------------------

    def check_sums(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless the accounts add up.

        Every block is available or referenced, as often as the tables of ``requests`` say, which
        are all that hold any. Takes some nanoseconds a block: whoever comes must not wait for it.
        """
        tables = [np.zeros(0, np.int32)]
        tables += [request.block_table[: request.num_blocks] for request in requests]
        held = np.bincount(np.concatenate(tables), minlength=self.num_blocks)
        references = np.frombuffer(self._references, np.int32)
        assert np.array_equal(held, references), (
            f"requests hold {held.sum()} blocks, {references.sum()} references exist"
        )
        referenced = int(np.count_nonzero(references))
        assert len(self._list) == self.num_blocks - referenced, (
            f"{len(self._list)} available and {referenced} referenced blocks are not the "
            f"{self.num_blocks} that exist"
        )

    def check(self, requests: Iterable[Request]) -> None:
        """:meth:`check_sums`, and block by block.

        What is cached can be found, and lies before what is written. Takes some microseconds a
        block.
        """
        requests = list(requests)
        self.check_sums(requests)
        for request in requests:
            self._check_request(request)
        references = np.frombuffer(self._references, np.int32)
        available = list(self._list)
        assert sorted(available) == np.flatnonzero(references == 0).tolist(), (
            f"{len(available)} available and {np.count_nonzero(references)} referenced blocks "
            f"are not the {self.num_blocks} that exist"
        )
        if self._cache is not None:
            self._cache.check()
        cached = [block for block in available if self.is_cached(block)]
        assert len(cached) == self._num_cached, "the count of cached blocks is wrong"
        assert available[self.num_free :] == cached, "a cached block goes before a free one"

    def _check_request(self, request: Request) -> None:
        assert request.num_cached <= request.num_blocks
        assert request.num_cached * self.block_size <= request.num_computed <= request.length
        for index, block in enumerate(request.block_table[: request.num_blocks].tolist()):
            if index >= request.num_cached:
                assert not self.is_cached(block), f"block {block} is written and cached"
            elif self._cache is not None:
                hashed, parent = self._hash(request, index), self._parent(request, index)
                tokens = self._tokens(request, index)
                assert self._cache.find(hashed, parent, tokens) == block, "it cannot be found"
