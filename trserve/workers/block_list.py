"""A doubly linked list of block numbers, in arrays. Knows no requests and no contents.

The links of a block lie in two arrays of the pool's size, made once; so taking the first block,
adding one at either end, and removing one from anywhere are a handful of stores, whatever the
length, and nothing is allocated.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final

_UNLINKED: Final = -1


class BlockList:
    """Distinct numbers out of ``0 .. capacity - 1``, in order; all of them at first, ascending."""

    __slots__ = ("_head", "_length", "_next", "_previous")

    def __init__(self, capacity: int) -> None:
        # A ring through one more place, whose successor is the first block.
        self._head = capacity
        self._next: array[int] = array("i", [*range(1, capacity + 1), 0])
        self._previous: array[int] = array("i", [capacity, *range(capacity)])
        self._length = capacity

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block: int) -> bool:
        return self._next[block] != _UNLINKED

    def __iter__(self) -> Iterator[int]:
        block = self._next[self._head]
        while block != self._head:
            yield block
            block = self._next[block]

    def push_first(self, block: int) -> None:
        """Add ``block``, which is not in the list, before all others."""
        self._link(self._head, block, self._next[self._head])

    def push_last(self, block: int) -> None:
        """Add ``block``, which is not in the list, after all others."""
        self._link(self._previous[self._head], block, self._head)

    def _link(self, before: int, block: int, after: int) -> None:
        assert self._next[block] == _UNLINKED, f"block {block} is in the list already"
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self._length += 1

    def pop_first(self) -> int:
        """Remove the first block and return it. The list is not empty."""
        block = self._next[self._head]
        self.remove(block)
        return block

    def remove(self, block: int) -> None:
        """Remove ``block``, which is in the list, from wherever it is."""
        before, after = self._previous[block], self._next[block]
        assert after != _UNLINKED and block != self._head, f"block {block} is not in the list"
        self._next[before], self._previous[after] = after, before
        self._next[block] = _UNLINKED
        self._length -= 1
