"""The step's arrays against their definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trserve.workers.step import StepInputs

ROW = st.tuples(st.integers(1, 20), st.integers(0, 40))


@given(rows=st.lists(ROW, min_size=1, max_size=8), block_size=st.integers(1, 9))
def test_rows_are_laid_out_as_defined(rows, block_size):
    step = StepInputs(max_tokens=160, max_rows=8, max_blocks_per_row=60, block_size=block_size)
    rng = np.random.default_rng(0)
    for _ in range(2):  # the second round meets the first one's leavings
        step.clear()
        expected = []
        for count, start in rows:
            tokens = rng.integers(1000, size=count)
            table = rng.permutation(60).astype(np.int32)
            step.add_row(tokens, start, table)
            expected.append((tokens, np.arange(start, start + count), table))
        assert step.num_rows == len(rows)
        assert step.num_tokens == sum(count for count, _ in rows)
        assert step.decode_only == all(count == 1 for count, _ in rows)
        assert step.query_start[0] == 0
        for row, (tokens, positions, table) in enumerate(expected):
            own = slice(step.query_start[row], step.query_start[row + 1])
            slots = table[positions // block_size] * block_size + positions % block_size
            assert np.array_equal(step.token_ids[own], tokens)
            assert np.array_equal(step.positions[own], positions)
            assert np.array_equal(step.slots[own], slots)
            assert step.kv_len[row] == positions[-1] + 1
            blocks = positions[-1] // block_size + 1
            assert np.array_equal(step.block_tables[row, :blocks], table[:blocks])


def test_nothing_is_reallocated():
    step = StepInputs(max_tokens=8, max_rows=4, max_blocks_per_row=4, block_size=4)
    arrays = (step.token_ids, step.slots, step.kv_len, step.block_tables)
    before = [array.ctypes.data for array in arrays]
    for _ in range(3):
        step.clear()
        step.add_row(np.array([1, 2, 3]), 5, np.array([2, 1], np.int32))
    after = (step.token_ids, step.slots, step.kv_len, step.block_tables)
    assert [array.ctypes.data for array in after] == before


def test_a_table_too_short_is_an_error():
    step = StepInputs(max_tokens=8, max_rows=4, max_blocks_per_row=4, block_size=4)
    with pytest.raises(IndexError):
        step.add_row(np.array([1, 2, 3]), 6, np.array([2, 1], np.int32))
    with pytest.raises(IndexError):
        step.add_row(np.array([1]), 8, np.array([2, 1], np.int32))


@given(
    starts=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    block_size=st.integers(1, 9),
    steps=st.integers(1, 12),
)
def test_decodes_set_and_advanced_are_those_added_one_by_one(starts, block_size, steps):
    """As many rows as the step can take, too."""
    size = {"max_rows": len(starts), "max_blocks_per_row": 60, "block_size": block_size}
    step, expected = (StepInputs(max_tokens=len(starts), **size) for _ in range(2))
    rng = np.random.default_rng(0)
    tables = np.stack([rng.permutation(60) for _ in starts]).astype(np.int32)
    positions = np.array(starts)
    width = positions.max() // block_size + 1
    for at in range(steps):
        tokens = rng.integers(1000, size=len(starts))
        if at == 0:
            step.set_decode_rows(tokens, positions, tables[:, :width])
        else:
            step.advance_decode_rows(tokens)
        expected.clear()
        for row, (token, position) in enumerate(zip(tokens, positions, strict=True)):
            if at and position % block_size == 0:
                index = int(position) // block_size
                step.start_block(row, index, int(tables[row, index]))
            expected.add_row([token], int(position), tables[row])
        assert (step.num_rows, step.num_tokens) == (expected.num_rows, expected.num_tokens)
        for name in ("token_ids", "positions", "slots", "kv_len", "query_start"):
            assert getattr(step, name).tolist() == getattr(expected, name).tolist(), name
        for row, position in enumerate(positions):
            blocks = position // block_size + 1
            assert np.array_equal(step.block_tables[row, :blocks], tables[row, :blocks])
        positions = positions + 1
