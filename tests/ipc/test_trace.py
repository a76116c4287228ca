"""The ring of events against a plain list: wrap-around, restarts, reads amid writes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ipc.memory import memory
from tests.ipc.peer import traced_gen
from tests.ipc.test_two_processes import report, start
from trserve.ipc.layout import TRACE_RECORD_WORDS
from trserve.ipc.trace import Event, EventKind, TraceReader, TraceWriter

NOTES = st.tuples(
    st.sampled_from(EventKind),
    st.integers(0, 2**22 - 1),
    st.integers(0, 2**24 - 1),
    st.integers(0, 2**63 - 1),
)
Note = tuple[int, int, int, int]


def trace_words(capacity: int) -> memoryview:
    return memoryview(bytearray(8 * TRACE_RECORD_WORDS * capacity)).cast("q")


def said(event: Event) -> Note:
    return (event.kind, event.value, event.slot, event.gen)


@given(NOTES)
def test_an_event_is_read_as_it_was_noted(note: Note) -> None:
    words = trace_words(4)
    reader = TraceReader(words)
    TraceWriter(words).note(*note)
    (event,) = reader.read()
    assert said(event) == note
    assert event.time_ns > 0
    assert reader.read() == []


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.lists(st.one_of(st.lists(NOTES, max_size=20), st.just("restart")), max_size=12),
)
def test_the_newest_events_survive(capacity: int, rounds: list[Any]) -> None:
    """After each round of notes a reader gets the last of them, at most a ring full, in order."""
    words = trace_words(capacity)
    reader, writer = TraceReader(words), TraceWriter(words)
    for notes in rounds:
        if notes == "restart":
            writer = TraceWriter(words)
            continue
        lost = reader.lost
        for note in notes:
            writer.note(*note)
        found = reader.read()
        assert [said(event) for event in found] == notes[-capacity:]
        assert reader.lost - lost == max(0, len(notes) - capacity)


def test_the_lap_counter_wraps() -> None:
    words = trace_words(2)
    reader, writer = TraceReader(words), TraceWriter(words)
    for number in range(2 * 600):
        writer.note(EventKind.ADMITTED, gen=number)
        assert [event.gen for event in reader.read()] == [number]
    assert reader.lost == 0


class Stores:
    """Stands for the writer's memory: notes every store instead of making it."""

    def __init__(self, words: memoryview) -> None:
        self.words = words
        self.made: list[tuple[int, int]] = []

    def __setitem__(self, at: int, value: int) -> None:
        self.made.append((at, value))


class Interleaved:
    """The reader's view, in which the writer goes on between any two loads of a word.

    ``pauses`` says how many stores happen before each load; none once it is exhausted.
    """

    def __init__(self, words: memoryview, stores: list[tuple[int, int]], pauses: Iterator[int]):
        self.words, self.stores, self.pauses = words, iter(stores), pauses

    def go_on(self, count: int) -> None:
        for at, value in itertools.islice(self.stores, count):
            self.words[at] = value

    def __getitem__(self, where: tuple[slice, int]) -> np.ndarray[Any, Any]:
        column = []
        for at in range(where[1], len(self.words), TRACE_RECORD_WORDS):
            self.go_on(next(self.pauses, 0))
            column.append(self.words[at])
        return np.array(column, np.int64)


def numbered(number: int) -> Note:
    """A note whose every field says which one it is."""
    return (1 + number % 7, 1000 + number, 2000 + number, 3000 + number)


def check_reads(capacity: int, count: int, pauses: Iterator[int], reads: int) -> None:
    """``reads`` reads amid the stores of ``count`` notes, and one after them."""
    words = trace_words(capacity)
    reader, writer = TraceReader(words), TraceWriter(words)
    stores = Stores(words)
    writer._words = stores  # type: ignore[assignment]
    for number in range(count):
        writer.note(*numbered(number))
    live = Interleaved(words, stores.made, pauses)
    reader._records = live  # type: ignore[assignment]
    found = [event for _ in range(reads) for event in reader.read()]
    live.go_on(len(stores.made))
    found += reader.read()
    positions = [event.position for event in found]
    assert positions == sorted(set(positions))
    assert [said(event) for event in found] == [numbered(at - capacity) for at in positions]
    assert positions[-1] == capacity + count - 1
    assert len(found) + reader.lost == count


def test_no_read_of_one_record_is_torn() -> None:
    """Three notes in a ring of one, and a read: every interleaving of their stores and loads."""
    stores = range(3 * TRACE_RECORD_WORDS + 1)
    for points in itertools.combinations_with_replacement(stores, TRACE_RECORD_WORDS):
        pauses = (b - a for a, b in itertools.pairwise((0, *points)))
        check_reads(1, 3, pauses, reads=1)


@given(st.sampled_from([1, 2, 4]), st.integers(1, 12), st.lists(st.integers(0, 9), max_size=40))
def test_no_read_is_torn(capacity: int, count: int, pauses: list[int]) -> None:
    check_reads(capacity, count, iter(pauses), reads=3)


def test_a_successor_goes_on_after_a_record_that_was_cut_short() -> None:
    words = trace_words(4)
    reader, writer = TraceReader(words), TraceWriter(words)
    writer.note(EventKind.STEP, 1)
    words[TRACE_RECORD_WORDS] = 5  # the second record's position, and then it was killed
    successor = TraceWriter(words)
    successor.note(EventKind.STEP, 3)
    assert [event.value for event in reader.read()] == [1, 3]
    assert reader.lost == 1


def test_a_reader_starts_with_what_comes_next() -> None:
    words = trace_words(4)
    writer = TraceWriter(words)
    writer.note(EventKind.STEP, 1)
    reader = TraceReader(words)
    writer.note(EventKind.STEP, 2)
    assert [event.value for event in reader.read()] == [2]


def test_a_capacity_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="power of two"):
        TraceWriter(trace_words(3))


def test_processes_do_not_share_a_ring() -> None:
    with memory(workers=2) as shared:
        slab = shared.slab()
        readers = [TraceReader(slab.trace_words(process)) for process in range(3)]
        for process in range(3):
            TraceWriter(slab.trace_words(process)).note(EventKind.ADMITTED, process)
        assert [[event.value for event in reader.read()] for reader in readers] == [[0], [1], [2]]


def test_another_process_that_never_pauses_is_read_whole(full: bool) -> None:
    count = 2_000_000 if full else 200_000
    with memory(workers=1) as shared:
        slab = shared.slab()
        reader = TraceReader(slab.trace_words(0))
        peer = start(shared, "trace", count)
        found, wrong, last = 0, 0, 0
        while True:
            ended = peer.poll() is not None
            for event in reader.read():
                wrong += event.gen != traced_gen(event.position) or event.position <= last
                wrong += event.value != event.position & 0xFFFF
                last = event.position
                found += 1
            if ended:
                break
        assert report(peer)["noted"] == count
        assert wrong == 0
        assert found + reader.lost == count
        assert found > 0
