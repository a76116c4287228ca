"""Which block holds the KV of which tokens. Knows no requests and not who holds a block.

The KV of a token depends on every token before it. So a full block is named by a hash chain: the
hash of the block before it, and its own tokens. A hash alone is never trusted: an entry also
carries its tokens and its *parent*, the block before it, and only a block whose tokens are equal
and whose parent is the one just found is a hit. By induction from the first block on, the whole
prefix is then equal, token for token.

This needs that a parent stays what it was while a child refers to it. It does, because the pool
holds a whole prefix or none of it, and evicts children before their parents; ``check`` sees to it.
"""

from __future__ import annotations

from typing import Final

NONE: Final = -1
"""No block: what is not cached, and the parent of a row's first block."""

ROOT_HASH: Final = 0
"""The hash before a row's first block."""


def block_hash(before: int, tokens: bytes) -> int:
    """The hash of a full block; ``before`` is the hash of the block before it.

    Python's own: keyed anew in every process, so that nobody outside can prepare collisions, and
    a fraction of a microsecond. It never leaves the process.
    """
    return hash((before, tokens))


class PrefixCache:
    """The cached blocks by hash; at most one block for a hash.

    Args:
        num_blocks: blocks are numbered from 0 to one less.
    """

    __slots__ = ("_by_hash", "_hashes", "_parents", "_tokens")

    def __init__(self, num_blocks: int) -> None:
        self._by_hash: dict[int, int] = {}
        self._hashes = [0] * num_blocks
        self._parents = [NONE] * num_blocks
        self._tokens: list[bytes | None] = [None] * num_blocks

    def __len__(self) -> int:
        return len(self._by_hash)

    def __contains__(self, block: int) -> bool:
        return self._tokens[block] is not None

    def has_hash(self, hashed: int) -> bool:
        """Whether some block has this hash; ``find`` may still find it to be another's."""
        return hashed in self._by_hash

    def find(self, hashed: int, parent: int, tokens: bytes) -> int:
        """The block with these tokens after ``parent``; ``NONE`` if there is none."""
        block = self._by_hash.get(hashed, NONE)
        if block != NONE and self._parents[block] == parent and self._tokens[block] == tokens:
            return block
        return NONE

    def insert(self, block: int, hashed: int, parent: int, tokens: bytes) -> bool:
        """Cache ``block``; False, and nothing, if another block has this hash.

        ``find`` comes first, so that this can only be a collision: these tokens are then cached
        once the other block is gone.
        """
        if hashed in self._by_hash:
            return False
        assert self._tokens[block] is None, f"block {block} is cached already"
        self._by_hash[hashed] = block
        self._hashes[block], self._parents[block] = hashed, parent
        self._tokens[block] = tokens
        return True

    def remove(self, block: int) -> None:
        """Forget what ``block``, which is cached, holds."""
        del self._by_hash[self._hashes[block]]
        self._tokens[block] = None

    def check(self) -> None:
        """Raise AssertionError unless entries and blocks agree and every parent is cached."""
        cached = {block for block, tokens in enumerate(self._tokens) if tokens is not None}
        by_hash = sorted(self._by_hash.values())
        assert by_hash == sorted(cached), "entries and cached blocks differ"
        assert all(self._by_hash[self._hashes[block]] == block for block in cached)
        parents = {self._parents[block] for block in cached} - {NONE}
        assert parents <= cached, f"blocks {parents - cached} are parents but not cached"
