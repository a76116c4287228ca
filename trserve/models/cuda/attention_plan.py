"""A step's geometry as the arrays that kernels read, padded to the rows of a graph.

Knows rows, blocks and padding; nothing of kernels or of where the arrays go. All rows' blocks lie
one after the other (compressed rows), so what is copied grows with the blocks that are in use and
not with the longest row times the rows.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from trserve.models.cuda.attention import BatchGeometry, PagedLayers

Int32Array = npt.NDArray[np.int32]

_ALIGNMENT: Final = 4
"""Entries of int32 that sections of the memory are aligned to."""


class PlanArrays:
    """The arrays of one step, all in one memory int32 of which a prefix is in use.

    With R the rows including padding:

    Attributes:
        memory: all of the below.
        query_start: [R + 1], first token of each row.
        kv_len: [R].
        block_start: [R + 1], where each row's blocks begin in ``blocks``.
        last_block_len: [R], tokens in each row's last block.
        blocks: [block_start[R]].
        used: entries of ``memory`` that this step uses.
        widest: tokens of the row that computes most.
        longest: blocks of the longest row.
    """

    def __init__(self, paged: PagedLayers, memory: Int32Array) -> None:
        self._size, self._dummy = paged.block_size, paged.dummy
        self._columns = np.arange(paged.max_blocks_per_row, dtype=np.int32)
        self._offsets = section_offsets(paged.max_rows)
        self.memory = memory
        self._full = [memory[first:last] for first, last in _pairs(self._offsets, len(memory))]
        self.use(0)

    def use(self, rows: int) -> None:
        """Make the arrays those of ``rows`` rows."""
        starts, lengths, blocks, lasts, self._all_blocks = self._full
        self.rows = rows
        self.query_start, self.kv_len = starts[: rows + 1], lengths[:rows]
        self.block_start, self.last_block_len = blocks[: rows + 1], lasts[:rows]

    def fill(self, batch: BatchGeometry) -> None:
        """Take over ``batch``, and pad it."""
        real, rows = batch.num_rows, batch.rows
        if rows != self.rows:
            self.use(rows)
        self.query_start[: real + 1] = batch.query_start[: real + 1]
        self.kv_len[:real] = batch.kv_len[:real]
        if rows > real:
            self._pad(real, rows, batch.width)
        self.widest = batch.width or int(np.diff(self.query_start).max())
        self._fill_blocks(batch, real, rows)

    def _pad(self, real: int, rows: int, width: int) -> None:
        """Rows of ``width`` tokens with nothing before them."""
        first = int(self.query_start[real])
        self.query_start[real:] = np.arange(first, first + (rows - real) * width + 1, width)
        self.kv_len[real:] = width

    def _fill_blocks(self, batch: BatchGeometry, real: int, rows: int) -> None:
        counts = -(-self.kv_len // self._size)
        np.subtract(self.kv_len, (counts - 1) * self._size, out=self.last_block_len)
        self.block_start[0] = 0
        np.cumsum(counts, out=self.block_start[1:])
        ends = int(self.block_start[real]), int(self.block_start[rows])
        self.longest = int(counts.max())
        own = self._columns[: self.longest] < counts[:real, None]
        self.blocks = self._all_blocks[: ends[1]]
        width = min(self.longest, batch.block_tables.shape[1])
        self.blocks[: ends[0]] = batch.block_tables[:real, :width][own[:, :width]]
        self.blocks[ends[0] :] = self._dummy
        self.used = self._offsets[-1] + ends[1]


def section_offsets(max_rows: int) -> tuple[int, int, int, int, int]:
    """Where ``query_start``, ``kv_len``, ``block_start``, ``last_block_len`` and ``blocks`` begin
    in the memory of a plan for up to ``max_rows`` rows."""
    per_row = -(-(max_rows + 1) // _ALIGNMENT) * _ALIGNMENT
    return 0, per_row, 2 * per_row, 3 * per_row, 4 * per_row


def memory_size(paged: PagedLayers) -> int:
    """Entries of int32 that a plan takes at most."""
    return section_offsets(paged.max_rows)[-1] + paged.max_rows * paged.max_blocks_per_row


def _pairs(offsets: tuple[int, ...], end: int) -> list[tuple[int, int]]:
    return list(zip(offsets, (*offsets[1:], end), strict=True))
