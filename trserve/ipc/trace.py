"""What a process did last: a ring of fixed-size events in the slab's memory file, always on.

One writer a ring, any number of readers in other processes, no locks; the oldest events are
overwritten. Knows no files and no formats: what a person looks at is ``trserve/trace.py``.

A record is four words: ``position``, ``time_ns``, ``gen`` and ``lap:8 | kind:6 | slot:24 |
value:22``. Positions count up from the ring's capacity, so that an empty record (zeros) has none
and lap 0 (position // capacity) is never written.

Torn records. The writer stores the four words in this order, the reader loads them in the opposite
one: first the last word with its lap, then ``gen`` and ``time_ns``, then ``position``. If the lap
is that of position p, the writer had finished p before the first load; if ``position`` is still p
at the last load, it had not begun to overwrite it. So whatever lies between is p's. A record that
fails either test is being written, or was overwritten meanwhile: it is skipped, and counted. (A
lap of 8 bits would repeat after 256 laps within one read.) Fences as in ``fence.py``: store–store
after ``position`` and before the last word, load–load likewise; nothing else is needed.
"""

from __future__ import annotations

from enum import IntEnum
from time import monotonic_ns
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trserve.ipc.fence import load_fence, store_fence
from trserve.ipc.layout import TRACE_RECORD_WORDS

Words = NDArray[np.int64]

_VALUE_BITS: Final = 22
_SLOT_BITS: Final = 24
_KIND_BITS: Final = 6
_KIND_SHIFT: Final = _VALUE_BITS + _SLOT_BITS
_LAP_SHIFT: Final = _KIND_SHIFT + _KIND_BITS
_LAP_MASK: Final = 0xFF
MAX_VALUE: Final = (1 << _VALUE_BITS) - 1


class EventKind(IntEnum):
    """What happened; ``value`` is what the comment says.

    A step is one event, noted at its end, with ``gen`` the time of its start: half the cost of
    two, and no start without its end when the ring was full.
    """

    STEP = 1  # rows of the step
    HANDOFF_SENT = 2  # the hop that was made
    HANDOFF_RECEIVED = 3  # the hop that came
    RESUMED = 4  # the hop that came, once the request was in a step
    GATE_OPENED = 5  # a GateReason
    ADMITTED = 6  # tokens of the row, at the first contact with a request
    FINISHED = 7  # a Finish
    PUBLISHED = 8  # the gateway gave a request a slot; tokens of its prompt
    FIRST_TOKEN = 9  # the gateway gave its client the first of the answer
    ANSWERED = 10  # it will give it no more; an AnswerEnd


class GateReason(IntEnum):
    """Why a worker's gate opened; see ``sched/gate.py``."""

    THRESHOLD = 0
    NOBODY_RUNS = 1
    TIMEOUT = 2
    DRAIN = 3


class AnswerEnd(IntEnum):
    """Why a client gets no more of an answer."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    CLIENT_LEFT = 4


class Event(NamedTuple):
    """One record. ``kind`` is a number: a newer writer may know more kinds than this reader."""

    position: int
    time_ns: int
    kind: int
    gen: int
    slot: int
    value: int


class TraceWriter:
    """The writing end; a restarted process goes on where its predecessor ended.

    Args:
        words: the ring's int64 words; a power of two of records.
    """

    __slots__ = ("_capacity_bits", "_mask", "_position", "_words")

    def __init__(self, words: memoryview) -> None:
        capacity = len(words) // TRACE_RECORD_WORDS
        if capacity & (capacity - 1) or not capacity:
            raise ValueError(f"{capacity} trace records are not a power of two")
        positions = np.frombuffer(words, np.int64)[::TRACE_RECORD_WORDS]
        self._words = words
        self._mask = capacity - 1
        self._capacity_bits = capacity.bit_length() - 1
        self._position = max(int(positions.max()) + 1, capacity)

    def note(
        self, kind: int, value: int = 0, slot: int = 0, gen: int = 0, time_ns: int = 0
    ) -> None:
        """Add an event that happens now, or that did at ``time_ns``.

        ``value`` fits 22 bits, ``slot`` 24. Called several times a step: half a microsecond, and
        nothing is allocated but integers.
        """
        position = self._position
        words, at = self._words, (position & self._mask) << 2
        words[at] = position
        store_fence()
        words[at + 1] = time_ns or monotonic_ns()
        words[at + 2] = gen
        store_fence()
        lap = position >> self._capacity_bits & _LAP_MASK
        words[at + 3] = (lap << _KIND_BITS | kind) << _KIND_SHIFT | slot << _VALUE_BITS | value
        self._position = position + 1


class TraceReader:
    """A reading end: what was written since it was made, or since the last ``read``.

    Attributes:
        lost: events that were overwritten before they were read.
    """

    def __init__(self, words: memoryview) -> None:
        self._records = np.frombuffer(words, np.int64).reshape(-1, TRACE_RECORD_WORDS)
        self._capacity = len(self._records)
        self.lost = 0
        self._next = max(int(self._records[:, 0].max()) + 1, self._capacity)

    def read(self) -> list[Event]:
        """The new events, oldest first."""
        found = self._whole_records()
        found = found[found[:, 0] >= self._next]
        if not len(found):
            return []
        found = found[np.argsort(found[:, 0])]
        end = int(found[-1, 0]) + 1
        self.lost += end - self._next - len(found)
        self._next = end
        return [_unpack(*row) for row in found.tolist()]

    def _whole_records(self) -> Words:
        records = self._records
        packed = records[:, 3].copy()
        load_fence()
        gen, time_ns = records[:, 2].copy(), records[:, 1].copy()
        load_fence()
        position = records[:, 0].copy()
        whole = (position // self._capacity & _LAP_MASK) == packed >> _LAP_SHIFT
        whole &= position >= self._capacity
        columns: Words = np.stack((position, time_ns, gen, packed), axis=1)[whole]
        return columns


def _unpack(position: int, time_ns: int, gen: int, packed: int) -> Event:
    return Event(
        position=position,
        time_ns=time_ns,
        kind=packed >> _KIND_SHIFT & (1 << _KIND_BITS) - 1,
        gen=gen,
        slot=packed >> _VALUE_BITS & (1 << _SLOT_BITS) - 1,
        value=packed & MAX_VALUE,
    )
