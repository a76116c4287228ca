"""Host-side inputs of one step, in preallocated numpy arrays.

Knows rows, positions and blocks; nothing of requests, of torch or of why a row is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
_Growing = tuple[Int64Array, Int64Array, Int64Array, Int64Array, Int32Array, Int32Array]

MIN_WIDTH: Final = 2
"""numpy adds two numbers in place in a quarter of the time that it takes for one."""


@dataclass(slots=True)
class TokenSources:
    """Where the ids of some of a step's tokens lie on the device as well.

    Attributes:
        addresses: int64 [max_tokens], device pointers of int32; 0 where there is none.
        hold: whether what lies there has not been written since; to be asked after the step has
            read it.
    """

    addresses: Int64Array
    hold: Callable[[], bool]


class StepInputs:
    """The ragged batch of one step: allocated once, cleared and filled in place at every step.

    Row ``b`` owns the tokens ``query_start[b] : query_start[b + 1]``. The arrays are as long as
    the capacity; only the first ``num_tokens`` or ``num_rows`` entries are meaningful, and a block
    table's entries beyond the row's own blocks are stale.

    Attributes:
        token_ids: int64 [max_tokens].
        positions: int64 [max_tokens], of each token in its sequence.
        slots: int64 [max_tokens], where its keys and values go: ``block * block_size + offset``.
        query_start: int32 [max_rows + 1].
        kv_len: int32 [max_rows], valid length of the row's KV including this step's tokens.
        block_tables: int32 [max_rows, max_blocks_per_row].
        sources: where ids lie on the device as well, for runners that can read them there;
            ``token_ids`` has them in any case.
    """

    __slots__ = (
        "_growing",
        "_offsets",
        "_ones",
        "_ones32",
        "block_size",
        "block_tables",
        "kv_len",
        "num_rows",
        "num_tokens",
        "positions",
        "query_start",
        "slots",
        "sources",
        "token_ids",
    )

    def __init__(
        self, *, max_tokens: int, max_rows: int, max_blocks_per_row: int, block_size: int
    ) -> None:
        self.block_size = block_size
        self.num_rows = 0
        self.num_tokens = 0
        self._growing: _Growing | None = None
        self.sources: TokenSources | None = None
        self.token_ids: Int64Array = np.zeros(max_tokens, np.int64)
        self.positions: Int64Array = np.zeros(max_tokens, np.int64)
        self.slots: Int64Array = np.zeros(max_tokens, np.int64)
        self.query_start: Int32Array = np.zeros(max_rows + 1, np.int32)
        self.kv_len: Int32Array = np.zeros(max_rows, np.int32)
        self.block_tables: Int32Array = np.zeros((max_rows, max_blocks_per_row), np.int32)
        # One longer than any row can be, so that a chunk's positions are a slice plus its start.
        self._offsets: Int64Array = np.arange(max_tokens + 1, dtype=np.int64)
        # Adding an array takes half the time of adding a number.
        self._ones: Int64Array = np.ones(max_rows, np.int64)
        self._ones32: Int32Array = np.ones(max_rows, np.int32)

    @property
    def decode_only(self) -> bool:
        """Whether every row computes exactly one token."""
        return self.num_tokens == self.num_rows

    def clear(self) -> None:
        """Forget all rows."""
        self._growing = None
        self.sources = None
        self.num_rows = 0
        self.num_tokens = 0

    def add_row(
        self, token_ids: npt.NDArray[np.integer], start: int, block_table: Int32Array
    ) -> None:
        """Append a row that computes positions ``start .. start + len(token_ids) - 1``.

        Args:
            token_ids: the tokens at these positions, at least one.
            block_table: the row's blocks, int32, covering every position up to the last.
        """
        count = len(token_ids)
        if count == 1:
            self.add_decode_row(int(token_ids[0]), start, block_table)
            return
        first, size = self.num_tokens, self.block_size
        last = first + count
        assert count > 0 and last <= len(self.token_ids)
        self.token_ids[first:last] = token_ids
        positions = self.positions[first:last]
        np.add(self._offsets[:count], start, out=positions)
        slots = self.slots[first:last]
        np.multiply(block_table[positions // size], size, out=slots)
        slots += positions % size
        self._finish_row(last, start + count, block_table)

    def add_decode_row(self, token_id: int, position: int, block_table: Int32Array) -> None:
        """Append a row of one token; :meth:`add_row` without its vector operations."""
        index, size = self.num_tokens, self.block_size
        self.token_ids[index] = token_id
        self.positions[index] = position
        self.slots[index] = int(block_table[position // size]) * size + position % size
        self._finish_row(index + 1, position + 1, block_table)

    def set_decode_rows(
        self,
        token_ids: npt.NDArray[np.integer],
        positions: Int64Array,
        block_tables: Int32Array,
    ) -> None:
        """Make a whole step of rows of one token each, by vector operations.

        Args:
            token_ids: [B].
            positions: int64 [B].
            block_tables: int32 [B, blocks], wide enough for every row's position.
        """
        count, size = len(positions), self.block_size
        self.token_ids[:count] = token_ids
        self.positions[:count] = positions
        blocks = positions // size
        slots = self.slots[:count]
        np.multiply(block_tables[self._offsets[:count], blocks], size, out=slots)
        slots += positions - blocks * size
        width = int(blocks.max()) + 1
        self.block_tables[:count, :width] = block_tables[:, :width]
        np.add(positions, 1, out=self.kv_len[:count], casting="same_kind")
        self.query_start[: count + 1] = self._offsets[: count + 1]
        self.num_rows = self.num_tokens = count
        self._growing = None

    def advance_decode_rows(self, token_ids: npt.NDArray[np.integer]) -> None:
        """Make each row of a step of decodes compute ``token_ids`` [B], one position further on.

        Rows whose position begins a block need :meth:`start_block` before they are computed.
        """
        if self._growing is None:
            self._growing = self._views_of_what_grows()
        own_tokens, positions, slots, ones, lengths, ones32 = self._growing
        own_tokens[:] = token_ids
        np.add(positions, ones, positions)
        np.add(slots, ones, slots)
        np.add(lengths, ones32, lengths)

    def _views_of_what_grows(self) -> _Growing:
        width = max(self.num_rows, MIN_WIDTH)
        return (
            self.token_ids[: self.num_rows],
            self.positions[:width],
            self.slots[:width],
            self._ones[:width],
            self.kv_len[:width],
            self._ones32[:width],
        )

    def start_block(self, row: int, index: int, block: int) -> None:
        """Say that the position of decode row ``row`` is the first of its ``index``-th block."""
        self.block_tables[row, index] = block
        self.slots[row] = block * self.block_size

    def _finish_row(self, num_tokens: int, kv_len: int, block_table: Int32Array) -> None:
        row = self.num_rows
        blocks = -(-kv_len // self.block_size)
        self.block_tables[row, :blocks] = block_table[:blocks]
        self.kv_len[row] = kv_len
        self.query_start[row + 1] = num_tokens
        self.num_rows = row + 1
        self.num_tokens = num_tokens
