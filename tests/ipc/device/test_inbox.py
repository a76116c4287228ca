"""The inbox's layout: what is taken is always the row's, whatever lies in the entries.

A model of one producer that may end between any two stores, and of a receiver that may look between
any two of them, even in the middle of its own look.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from trserve.ipc.device.api import GRANULE
from trserve.ipc.device.inbox import (
    COUNT_BITS,
    HEADER_BYTES,
    MAX_EPOCH,
    MAX_IDS,
    RECORD_BYTES,
    SEQ,
    InboxLayout,
    InboxReader,
    Suffix,
    encode,
    next_seq,
    stores,
)

SLOTS, ROW, BASE = 3, 160, 1 << 20
LAYOUT = InboxLayout(slots=SLOTS, workers=3, consumer=1)


class Words:
    """The notices' words; something may happen at any load."""

    def __init__(self, words: memoryview) -> None:
        self.words = words
        self.at_load: dict[int, Callable[[], None]] = {}
        self.loads = 0

    def __getitem__(self, at):
        happens = self.at_load.pop(self.loads, None)
        self.loads += 1
        if happens:
            happens()
        return self.words[at]


class Memory:
    """An inbox and notices in two byte arrays, and rows that are the truth."""

    def __init__(self, seed: int = 0) -> None:
        self.entries = memoryview(bytearray(2 * SLOTS * RECORD_BYTES))
        self.notices = memoryview(bytearray(LAYOUT.notice_bytes))
        rng = np.random.default_rng(seed)
        self.rows = rng.integers(0, 2**31, (SLOTS, ROW), dtype=np.int32)
        self.words = Words(self.notices.cast("q"))
        self.reader = InboxReader(LAYOUT, self.words, BASE, self.rows)  # type: ignore[arg-type]
        self.reader.epochs = [1, 0, 1]

    def suffix(self, slot, gen, length, count, rows=None):
        ids = (self.rows if rows is None else rows)[slot, length - count : length]
        return Suffix(slot, gen, 0, length, ids.tobytes())

    def store(self, producer, slot, step):
        base = (LAYOUT.notice if step.to_notice else LAYOUT.entry)(producer, slot)
        target = self.notices if step.to_notice else self.entries
        target[base + step.offset : base + step.offset + len(step.data)] = step.data

    def push(self, producer, suffix, seq, epoch=1):
        for step in stores(encode(suffix, seq, epoch)):
            self.store(producer, suffix.slot, step)

    def ids(self, view):
        at = view.pointer - BASE
        return np.frombuffer(self.entries[at : at + 4 * view.num_ids], np.int32).tolist()


@given(
    slot=st.integers(0, SLOTS - 1),
    gen=st.integers(0, 2**63 - 1),
    length=st.integers(1, ROW),
    data=st.data(),
)
def test_what_was_pushed_is_taken(slot, gen, length, data):
    memory = Memory()
    count = data.draw(st.integers(1, min(length, MAX_IDS)))
    start = data.draw(st.integers(length - count, length - 1))
    memory.push(2, memory.suffix(slot, gen, length, count), seq=next_seq(0, 1))
    view = memory.reader.take(slot, gen, length, start)
    assert view is not None and memory.reader.holds(view)
    assert memory.ids(view) == memory.rows[slot, start:length].tolist()
    assert view.__cuda_array_interface__["data"][0] == view.pointer
    assert view.__cuda_array_interface__["shape"] == (length - start,)


@pytest.mark.parametrize(
    "asked",
    [
        {"gen": 8},
        {"gen": 6},
        {"length": 40},
        {"length": 42},
        {"slot": 1},
        {"start": 30},  # further back than what was pushed
        {"start": 41},  # nothing
        {"start": -1},
    ],
)
def test_another_request_or_more_than_was_pushed_is_not_there(asked):
    memory = Memory()
    memory.push(0, memory.suffix(0, 7, 41, 10), seq=next_seq(0, 1))
    wanted = {"slot": 0, "gen": 7, "length": 41, "start": 31}
    assert memory.reader.take(**wanted) is not None
    assert memory.reader.take(**(wanted | asked)) is None


def test_an_old_epoch_or_none_is_not_taken():
    memory = Memory()
    memory.push(0, memory.suffix(0, 7, 41, 10), seq=next_seq(0, 1), epoch=1)
    for epoch, there in ((0, False), (1, True), (2, False)):
        memory.reader.epochs[0] = epoch
        assert (memory.reader.take(0, 7, 41, 31) is not None) is there
    empty = Memory()
    empty.reader.epochs = [0, 0, 0]
    assert empty.reader.take(0, 0, 1, 0) is None, "zeros are nobody's"


def test_a_view_no_longer_holds_once_its_entry_is_written_again():
    memory = Memory()
    suffix = memory.suffix(0, 7, 41, 10)
    memory.push(0, suffix, seq=next_seq(0, 1))
    view = memory.reader.take(0, 7, 41, 31)
    for step in stores(encode(suffix, next_seq(view.seq, 1), 1)):
        memory.store(0, 0, step)
        assert not memory.reader.holds(view)


def test_one_flipped_bit_of_a_notice_is_enough():
    memory = Memory()
    memory.push(0, memory.suffix(0, 7, 41, 10), seq=next_seq(0, 1))
    for bit in range(8 * HEADER_BYTES):
        memory.notices[bit // 8] ^= 1 << bit % 8
        assert memory.reader.take(0, 7, 41, 31) is None, f"bit {bit}"
        memory.notices[bit // 8] ^= 1 << bit % 8
    assert memory.reader.take(0, 7, 41, 31) is not None


def test_counts_wrap_within_their_epoch_and_are_never_nothing():
    last = next_seq((3 << COUNT_BITS) - 2, 2)
    assert last == (3 << COUNT_BITS) - 1
    assert next_seq(last, 2) == (2 << COUNT_BITS) + 1
    assert 0 < next_seq(next_seq(0, MAX_EPOCH) - 2, MAX_EPOCH) < 2**63
    seen = {next_seq(seq, epoch) for epoch in (1, 2) for seq in (0, 5, 2**COUNT_BITS - 1)}
    assert len(seen) == 4 and 0 not in seen


def test_no_two_entries_overlap_and_all_are_inside():
    for workers in (1, 2, 5):
        for consumer in range(workers):
            layout = InboxLayout(slots=7, workers=workers, consumer=consumer)
            producers = [w for w in range(workers) if w != consumer]
            entries = sorted(layout.entry(p, s) for p in producers for s in range(7))
            assert entries == list(range(0, RECORD_BYTES * 7 * len(producers), RECORD_BYTES))
            notices = [layout.notice(p, s) for p in producers for s in range(7)]
            assert sorted(notices) == list(range(0, HEADER_BYTES * len(notices), HEADER_BYTES))
            assert layout.device_bytes % GRANULE == 0 < layout.device_bytes
            assert layout.device_bytes >= RECORD_BYTES * len(entries)
            assert layout.notice_bytes >= HEADER_BYTES * len(notices)


def test_a_record_has_the_size_of_an_entry_at_most():
    ids = np.arange(MAX_IDS, dtype=np.int32).tobytes()
    for count in (0, 1, 2, 3, MAX_IDS):
        record = encode(Suffix(0, 1, 2, MAX_IDS, ids[: 4 * count]), 1, 1)
        assert len(record) % 8 == 0
        assert len(record) <= RECORD_BYTES


def test_seq_is_cleared_first_and_stored_last():
    """The order that every device keeps; kernels.py says it in CUDA."""
    order = [(step.to_notice, step.offset) for step in stores(bytes(range(128)))]
    assert order[:2] == [(True, 8 * SEQ), (False, 8 * SEQ)]
    assert order[-2:] == [(False, 8 * SEQ), (True, 8 * SEQ)]
    assert all(offset >= 8 for _, offset in order[2:-2])
    covered = {(to_notice, offset) for to_notice, offset in order}
    assert {(False, HEADER_BYTES), (False, 8), (True, 8)} <= covered


class TornAndStale(RuleBasedStateMachine):
    """Pushes that stop anywhere, replays and impostors; looks at any moment."""

    @initialize(seed=st.integers(0, 100))
    def create(self, seed):
        self.memory = Memory(seed)
        self.other = Memory(seed + 1).rows  # what is in no row
        self.steps = {}
        self.seq = {0: 0, 2: 0}
        self.epoch = {0: 1, 2: 1}
        self.past = []
        self.baton = dict.fromkeys(range(SLOTS), (1, 20))  # gen, length

    producers = st.sampled_from([0, 2])
    slots = st.integers(0, 1)

    @rule(producer=producers, slot=slots, count=st.integers(1, 20), forged=st.booleans())
    def begin(self, producer, slot, count, forged):
        gen, length = self.baton[slot]
        rows = self.other if forged else None
        suffix = self.memory.suffix(slot, gen, length, min(count, length, MAX_IDS), rows)
        self._begin(producer, suffix, self.epoch[producer])

    @precondition(lambda self: self.past)
    @rule(producer=producers, data=st.data(), old_epoch=st.booleans())
    def replay(self, producer, data, old_epoch):
        suffix = data.draw(st.sampled_from(self.past))
        self._begin(producer, suffix, self.epoch[producer] - old_epoch)

    def _begin(self, producer, suffix, epoch):
        """A producer writes one entry after another; what it leaves half done stays so."""
        self.past.append(suffix)
        self.seq[producer] = next_seq(self.seq[producer], epoch)
        pieces = []
        for step in stores(encode(suffix, self.seq[producer], epoch)):
            for at in range(0, len(step.data), 8):
                pieces.append(step._replace(offset=step.offset + at, data=step.data[at : at + 8]))
        self.steps[producer] = (suffix.slot, pieces)

    @rule(producer=producers, count=st.sampled_from([1, 2, 5, 30, 200]))
    def store(self, producer, count):
        for _ in range(count):
            self._store_one(producer)

    def _store_one(self, producer):
        slot, pieces = self.steps.get(producer, (0, []))
        if pieces:
            self.memory.store(producer, slot, pieces.pop(0))

    @rule(producer=producers)
    def dies(self, producer):
        self.steps.pop(producer, None)
        self.epoch[producer] += 1
        self.memory.reader.epochs[producer] = self.epoch[producer]
        self.seq[producer] = 0

    @rule(slot=slots, more=st.integers(1, 5))
    def commit(self, slot, more):
        gen, length = self.baton[slot]
        if length + more < ROW:
            self.baton[slot] = (gen, length + more)

    @rule(slot=slots)
    def next_request(self, slot):
        self.baton[slot] = (self.baton[slot][0] + 1, 20)
        self.memory.rows[slot] = self.memory.rows[slot][::-1].copy()

    @rule(slot=slots, back=st.integers(1, 20), data=st.data())
    def take(self, slot, back, data):
        """The receiver has the baton; a producer may store in the middle of its look."""
        gen, length = self.baton[slot]
        words = self.memory.words
        words.loads = 0
        for load in data.draw(st.lists(st.integers(0, 5), max_size=2)):
            producer = data.draw(self.producers)
            words.at_load[load] = lambda producer=producer: self._store_one(producer)
        view = self.memory.reader.take(slot, gen, length, length - back)
        words.at_load.clear()
        if view is not None and self.memory.reader.holds(view):
            wanted = self.memory.rows[slot, length - back : length].tolist()
            assert self.memory.ids(view) == wanted


TestTornAndStale = TornAndStale.TestCase
