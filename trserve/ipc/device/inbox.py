"""Where suffixes lie in a receiver's inbox, and when one may be taken. Pure layout; no device.

A receiver owns an **inbox** in its device's memory and, beside it, **notices** in host memory. For
each (producer, slot) there is one **entry** of 512 bytes (a header line, then up to 112 int32 ids)
and one notice, a copy of the header. Only the producer writes them. A suffix that is longer is not
pushed: the row has it anyway. The header's words, int64:

    seq      epoch and a count, never 0; 0 while the entry is being written
    gen      of the request
    slot     count of ids << 32 | slot
    hop      of the baton that came with it
    length   committed tokens of the row: the ids are row[length - count : length]
    epoch    of the producer, which the receiver hands out anew when it restarts
    ids      CRC-32 of the ids
    check    CRC-32 of the words before

Memory order. The producer's device makes the stores visible in the order of :func:`stores`: both
``seq`` words 0; payload and header; *fence* (release, system scope); the entry's ``seq``; the
notice's ``seq``. So a host that loads a notice's ``seq`` and then (load fence) its header knows
that the entry is whole in the receiver's memory. It does not read the entry: the **kernel launch
that follows is the acquire**, because a launch orders everything that the host had seen before it
against everything that the kernel reads.

Why nothing wrong is ever taken. A notice counts only if its ``seq`` is the same before and after
its header was read, ``check`` is that of the words (torn, half overwritten), slot, generation and
length are those asked for (stale, replayed, another generation), the epoch is the producer's
present one (a dead producer's), and ``ids`` is the checksum of the same stretch *of the row*, which
is the truth. Why what was taken stays: a producer writes an entry again only after it had the baton
again, which the receiver gave away after the step that read the entry; and a slot gets another
generation only when every worker in ``sent`` has closed it, with no step in flight. ``holds`` asks
once more, for those who want to be sure before they commit. Nobody sees the payload itself before
the kernel does, so an entry must never have two writers: a dead producer's copies have ended when
it has been reaped, because its context ends with the process; under MPS, where a server owns the
context, every worker of that GPU is replaced, and with them the inboxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from trserve.ipc.device.api import GRANULE
from trserve.ipc.fence import load_fence

RECORD_BYTES: Final = 512
HEADER_BYTES: Final = 64
HEADER_WORDS: Final = HEADER_BYTES // 8
MAX_IDS: Final = (RECORD_BYTES - HEADER_BYTES) // 4
MAX_EPOCH: Final = (1 << 22) - 1
COUNT_BITS: Final = 40
"""Bits of ``seq`` that count; a trillion pushes of one producer, after which it begins at 1."""

SEQ, GEN, SLOT, HOP, LENGTH, EPOCH, IDS, CHECK = range(HEADER_WORDS)
_COUNT_SHIFT: Final = 32
_CHECKED: Final = Struct("<7q")
_WORD: Final = Struct("<q")
_NOTHING: Final = bytes(8)


class Suffix(NamedTuple):
    """Committed tokens that a receiver has not seen: ``ids`` are the bytes of
    row[length - len(ids) / 4 : length]."""

    slot: int
    gen: int
    hop: int
    length: int
    ids: bytes


class DeviceView(NamedTuple):
    """Ids on this process's device, for a kernel that is launched from now on.

    Attributes:
        pointer: device pointer of int32 [num_ids].
        notice: index of the notice's ``seq`` word; negative for a view of the row itself.
        seq: what it was.
    """

    pointer: int
    num_ids: int
    notice: int = -1
    seq: int = 0

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """For torch and CuPy. No stream: the launch is the acquire."""
        return {
            "shape": (self.num_ids,),
            "typestr": "<i4",
            "data": (self.pointer, False),
            "version": 3,
            "strides": None,
            "stream": None,
        }


def encode(suffix: Suffix, seq: int, epoch: int) -> bytes:
    """The record of a suffix: header and ids, padded to whole words."""
    slot, gen, hop, length, ids = suffix
    count = len(ids) // 4
    checked = _CHECKED.pack(seq, gen, count << _COUNT_SHIFT | slot, hop, length, epoch, crc32(ids))
    padding = _NOTHING[:4] if count & 1 else b""
    return b"".join((checked, _WORD.pack(crc32(checked)), ids, padding))


def next_seq(seq: int, epoch: int) -> int:
    """What follows ``seq`` in ``epoch``; never 0, and never one of another epoch."""
    count = seq + 1 & (1 << COUNT_BITS) - 1
    return epoch << COUNT_BITS | (count or 1)


class Store(NamedTuple):
    """Bytes that go into the entry, or into the notice, at ``offset``. Eight are one store."""

    to_notice: bool
    offset: int
    data: bytes


def stores(record: bytes) -> Iterator[Store]:
    """The stores of a push, in the order in which they become visible.

    There is a fence between each two of them; the payload and the headers may come in any order
    among themselves, because nobody reads them while ``seq`` is 0.
    """
    yield Store(True, 0, _NOTHING)
    yield Store(False, 0, _NOTHING)
    yield Store(False, HEADER_BYTES, record[HEADER_BYTES:])
    yield Store(False, 8, record[8:HEADER_BYTES])
    yield Store(True, 8, record[8:HEADER_BYTES])
    yield Store(False, 0, record[:8])
    yield Store(True, 0, record[:8])


@dataclass(frozen=True)
class InboxLayout:
    """Where the entries of worker ``consumer`` are, among ``workers`` with ``slots`` slots."""

    slots: int
    workers: int
    consumer: int

    def _index(self, producer: int, slot: int) -> int:
        return (producer - (producer > self.consumer)) * self.slots + slot

    def entry(self, producer: int, slot: int) -> int:
        """Byte offset of an entry in the inbox."""
        return self._index(producer, slot) * RECORD_BYTES

    def notice(self, producer: int, slot: int) -> int:
        """Byte offset of a notice."""
        return self._index(producer, slot) * HEADER_BYTES

    @property
    def device_bytes(self) -> int:
        """Bytes of the inbox."""
        entries = max(1, self.workers - 1) * self.slots
        return -(-entries * RECORD_BYTES // GRANULE) * GRANULE

    @property
    def notice_bytes(self) -> int:
        """Bytes of the notices."""
        return max(1, self.workers - 1) * self.slots * HEADER_BYTES


class InboxReader:
    """The receiver's look at its notices.

    Args:
        notices: their int64 words.
        base: device pointer of the inbox.
        tokens: int32 [slots, tokens]: the rows, which are the truth.

    Attributes:
        epochs: the present epoch of every producer, by worker index; 0: has none.
    """

    def __init__(
        self, layout: InboxLayout, notices: memoryview, base: int, tokens: NDArray[np.int32]
    ) -> None:
        self._layout = layout
        self._notices = notices
        self._base = base
        self._tokens = tokens
        self._producers = [w for w in range(layout.workers) if w != layout.consumer]
        self.epochs = [0] * layout.workers

    def take(self, slot: int, gen: int, length: int, start: int) -> DeviceView | None:
        """Row[start : length] of a request, if it lies in the inbox; None: take it from the row.

        The caller holds the baton, whose length is ``length``.
        """
        for producer in self._producers:
            view = self._look(producer, slot, gen, length, start)
            if view is not None:
                return view
        return None

    def holds(self, view: DeviceView) -> bool:
        """Whether what was taken is still what lies there."""
        return view.notice >= 0 and self._notices[view.notice] == view.seq

    def _look(
        self, producer: int, slot: int, gen: int, length: int, start: int
    ) -> DeviceView | None:
        at, words = self._layout.notice(producer, slot) // 8, self._notices
        seq = words[at]
        if not seq:
            return None
        load_fence()  # the header was stored before its seq
        header = words[at : at + HEADER_WORDS].tolist()
        load_fence()
        if words[at] != seq or not self._is_for(header, producer, slot, gen, length):
            return None
        count = header[SLOT] >> _COUNT_SHIFT
        begin = length - count
        if not begin <= start < length or not self._is_whole(header, seq, slot, begin):
            return None
        entry = self._base + self._layout.entry(producer, slot) + HEADER_BYTES
        return DeviceView(entry + 4 * (start - begin), length - start, at, seq)

    def _is_for(
        self, header: Sequence[int], producer: int, slot: int, gen: int, length: int
    ) -> bool:
        return (
            header[GEN] == gen
            and header[LENGTH] == length
            and header[SLOT] & 0xFFFFFFFF == slot
            and header[EPOCH] == self.epochs[producer] != 0
        )

    def _is_whole(self, header: Sequence[int], seq: int, slot: int, begin: int) -> bool:
        checked = _CHECKED.pack(seq, *header[1:CHECK])
        row = self._tokens[slot, max(begin, 0) : header[LENGTH]]
        return header[CHECK] == crc32(checked) and header[IDS] == crc32(row.data)
