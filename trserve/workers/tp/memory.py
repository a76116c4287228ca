"""The memory that the ranks of one model share: words, plans of steps, block tables, partial sums.

One anonymous memory file per group and per life of that group: the launcher makes it, the ranks
inherit it, and after any death it is thrown away with all of them, so that nothing here is ever
repaired. Every word has one writer. Knows layouts; nothing of what plans or sums mean.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from trserve.errors import StartupError

MAGIC: Final = 0x5452_5054_5031
LINE: Final = 64
PLANS: Final = 2
"""Entries of the plan ring. A step's sums keep the ranks together, so rank 0 is never further ahead
than the plan it writes while another rank still leaves the step before."""
BANKS: Final = 2
"""Partial sums of each rank: while one is read the next is written (see ``shared_sum``)."""
BANK_BYTES: Final = 1 << 20
_LINE_WORDS: Final = LINE // 8
_COUNTS: Final = _LINE_WORDS
"""Words before the arrays of a plan: tokens, rows, further tokens, digest; the rest is unused."""


class Trouble(IntEnum):
    """Why a rank stopped the group."""

    NONE = 0
    ENDED = 1
    PLAN_DIFFERS = 2
    LATE_TO_JOIN = 3
    LATE_FOR_PLAN = 4
    LATE_FOR_SUM = 5
    FAILED = 6


_SAID: Final = {
    Trouble.ENDED: "has ended",
    Trouble.PLAN_DIFFERS: "read another plan of a step than rank 0 wrote",
    Trouble.LATE_TO_JOIN: "waited in vain for the others to load",
    Trouble.LATE_FOR_PLAN: "waited in vain for the others to come to a step",
    Trouble.LATE_FOR_SUM: "waited in vain for the others to come to a sum",
    Trouble.FAILED: "failed",
}


class GroupLostError(RuntimeError):
    """The ranks of a model cannot go on together; the message says which of them and why."""


@dataclass(frozen=True)
class GroupLayout:
    """Where everything lies in the memory file of ``ranks`` processes.

    ``max_tokens`` and ``max_rows`` are those of a step, ``table_width`` the blocks of a row.
    """

    ranks: int
    max_tokens: int
    max_rows: int
    table_width: int

    @property
    def words(self) -> int:
        """Words of the header: a line of magic and sizes, one for rank 0's, one for each rank."""
        return (2 + self.ranks) * _LINE_WORDS

    @property
    def plan_words(self) -> int:
        """Words of one plan: counts, four arrays by token, two (int32) by row."""
        by_row = -(-(self.max_rows + 1) // 2)
        return _whole_lines(_COUNTS + 4 * self.max_tokens + 2 * by_row)

    @property
    def tables_at(self) -> int:
        """Byte at which the block tables begin."""
        return 8 * (self.words + PLANS * self.plan_words)

    @property
    def banks_at(self) -> int:
        """Byte at which the partial sums begin."""
        table_words = -(-self.max_rows * self.table_width // 2)
        return self.tables_at + 8 * _whole_lines(table_words)

    @property
    def size(self) -> int:
        """Bytes in all; pages that nobody touches are never taken."""
        return self.banks_at + self.ranks * BANKS * BANK_BYTES

    @property
    def signature(self) -> tuple[int, ...]:
        """What the first words must be."""
        return (MAGIC, self.ranks, self.max_tokens, self.max_rows, self.table_width, self.size)


def _whole_lines(words: int) -> int:
    return -(-words // _LINE_WORDS) * _LINE_WORDS


def create_group_file(layout: GroupLayout) -> int:
    """A fresh memory file for a group; returns its descriptor, which is not inherited by itself."""
    fd = os.memfd_create("trserve-ranks", os.MFD_CLOEXEC)
    os.ftruncate(fd, layout.size)
    signature = np.array(layout.signature, np.int64).tobytes()
    os.pwrite(fd, signature, 0)
    return fd


@dataclass(frozen=True)
class PlanArrays:
    """One entry of the ring, in place: the counts, and the arrays as in ``StepInputs``.

    ``also`` holds the further tokens whose hidden states are wanted.
    """

    counts: memoryview
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    also: npt.NDArray[np.int64]
    query_start: npt.NDArray[np.int32]
    kv_len: npt.NDArray[np.int32]


class GroupMemory:
    """One rank's view of the group's memory.

    Attributes:
        words: the header; a word is named by its index, so that to look at it is one load.
        published_at: the word with the number of plans that rank 0 has published.
        plans: the entries of the ring.
        tables: the block tables of rank 0's step inputs, int32 [max_rows, table_width].
    """

    def __init__(self, fd: int, layout: GroupLayout, rank: int) -> None:
        found = os.fstat(fd).st_size
        if found != layout.size:
            raise StartupError(
                f"rank {rank} expects {layout.size} bytes of its group's memory and finds {found}; "
                "all processes of a server must be of one version"
            )
        self.layout, self.rank = layout, rank
        self._view = memoryview(mmap.mmap(fd, layout.size))
        self.words = self._view[: layout.words * 8].cast("q")
        if tuple(self.words[: len(layout.signature)]) != layout.signature:
            raise StartupError(f"rank {rank} finds a group's memory of another version")
        self.published_at = _LINE_WORDS
        self.plans = [self._plan(index) for index in range(PLANS)]
        shape = (layout.max_rows, layout.table_width)
        self.tables = self._int32(layout.tables_at, shape[0] * shape[1]).reshape(shape)

    def joined_at(self, rank: int) -> int:
        """Word that is 1 once ``rank`` has loaded its share."""
        return (2 + rank) * _LINE_WORDS

    def done_at(self, rank: int) -> int:
        """Word with the number of plans that ``rank`` is done with."""
        return (2 + rank) * _LINE_WORDS + 1

    def summed_at(self, rank: int) -> int:
        """Word with the number of partial sums that ``rank`` has given."""
        return (2 + rank) * _LINE_WORDS + 2

    def trouble_at(self, rank: int) -> int:
        """Word with the :class:`Trouble` for which ``rank`` stopped the group."""
        return (2 + rank) * _LINE_WORDS + 3

    def banks(self, bank: int) -> npt.NDArray[np.uint8]:
        """Partial sums of all ranks, [ranks, BANK_BYTES], the banks of one number."""
        ranks = self.layout.ranks
        count = ranks * BANKS * BANK_BYTES
        raw = np.frombuffer(self._view, np.uint8, count, self.layout.banks_at)
        found: npt.NDArray[np.uint8] = raw.reshape(BANKS, ranks, BANK_BYTES)[bank]
        return found

    def address(self, word: int) -> int:
        """Where in memory ``word`` lies."""
        return int(self._int64(8 * word, 1).ctypes.data)

    def stop(self, trouble: Trouble) -> None:
        """Say why this rank leaves; the first reason stays."""
        at = self.trouble_at(self.rank)
        if not self.words[at]:
            self.words[at] = trouble

    def check(self) -> None:
        """Raise GroupLostError if any rank has stopped the group."""
        for rank in range(self.layout.ranks):
            found = self.words[self.trouble_at(rank)]
            if found:
                raise GroupLostError(f"rank {rank} {_SAID[Trouble(found)]}: its group ends")

    def _plan(self, index: int) -> PlanArrays:
        layout = self.layout
        at = 8 * (layout.words + index * layout.plan_words)
        arrays = at + 8 * _COUNTS
        by_token = self._int64(arrays, 4 * layout.max_tokens).reshape(4, -1)
        by_row = 2 * -(-(layout.max_rows + 1) // 2)
        rows = self._int32(arrays + 32 * layout.max_tokens, 2 * by_row).reshape(2, -1)
        return PlanArrays(
            counts=self._view[at:arrays].cast("q"),
            token_ids=by_token[0],
            positions=by_token[1],
            slots=by_token[2],
            also=by_token[3],
            query_start=rows[0],
            kv_len=rows[1],
        )

    def _int64(self, at: int, count: int) -> npt.NDArray[np.int64]:
        return np.frombuffer(self._view, np.int64, count, at)

    def _int32(self, at: int, count: int) -> npt.NDArray[np.int32]:
        return np.frombuffer(self._view, np.int32, count, at)
