"""The linked list against Python's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trserve.workers.block_list import BlockList


@given(st.integers(0, 6), st.lists(st.tuples(st.sampled_from("flrp"), st.integers(0, 5))))
def test_it_does_what_a_list_does(capacity: int, operations: list[tuple[str, int]]) -> None:
    blocks, expected = BlockList(capacity), list(range(capacity))
    for operation, block in operations:
        if operation == "p" and expected:
            assert blocks.pop_first() == expected.pop(0)
        elif operation == "r" and block in expected:
            blocks.remove(block)
            expected.remove(block)
        elif operation in "fl" and block < capacity and block not in expected:
            (blocks.push_first if operation == "f" else blocks.push_last)(block)
            expected.insert(0 if operation == "f" else len(expected), block)
        assert list(blocks) == expected
        assert len(blocks) == len(expected)
        assert [b for b in range(capacity) if b in blocks] == sorted(expected)


def test_a_block_is_in_the_list_once_or_not_at_all() -> None:
    blocks = BlockList(2)
    with pytest.raises(AssertionError, match="already"):
        blocks.push_last(1)
    blocks.remove(1)
    with pytest.raises(AssertionError, match="not in"):
        blocks.remove(1)
    blocks.pop_first()
    with pytest.raises(AssertionError, match="not in"):
        blocks.pop_first()
