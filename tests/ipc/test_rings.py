"""Rings against a plain queue: order, wrap-around, and what a full ring says."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from trserve.ipc.layout import DESCRIPTOR_WORDS, RING_HEADER_WORDS
from trserve.ipc.rings import Descriptor, Kind, RingConsumer, RingProducer

DESCRIPTORS = st.builds(
    Descriptor,
    kind=st.sampled_from(Kind),
    slot=st.integers(0, 2**24 - 1),
    gen=st.integers(0, 2**63 - 1),
    hop=st.integers(0, 2**22 - 1),
)


def ring_words(capacity: int) -> memoryview:
    return memoryview(bytearray(8 * (RING_HEADER_WORDS + DESCRIPTOR_WORDS * capacity))).cast("q")


def numbered(first: int, count: int) -> list[Descriptor]:
    return [Descriptor(Kind.RUN, n & 0xFFFF, n, n & 0xFFF) for n in range(first, first + count)]


@given(DESCRIPTORS)
def test_a_descriptor_arrives_as_it_was(descriptor: Descriptor) -> None:
    words = ring_words(2)
    assert RingProducer(words).push([descriptor])
    assert RingConsumer(words).drain() == [descriptor]


class RingAgainstQueue(RuleBasedStateMachine):
    """Any pushes and drains, also by successors of either end, against a deque."""

    @initialize(capacity=st.sampled_from([1, 2, 4, 8]))
    def create(self, capacity: int) -> None:
        self.capacity = capacity
        self.words = ring_words(capacity)
        self.producer, self.consumer = RingProducer(self.words), RingConsumer(self.words)
        self.queue: deque[Descriptor] = deque()
        self.overflows = 0

    @rule(descriptors=st.lists(DESCRIPTORS, max_size=10))
    def push(self, descriptors: list[Descriptor]) -> None:
        fits = len(self.queue) + len(descriptors) <= self.capacity
        assert self.producer.push(descriptors) is fits
        if fits:
            self.queue += descriptors
        else:
            self.overflows += 1

    @rule()
    def drain(self) -> None:
        assert self.consumer.drain() == list(self.queue)
        self.queue.clear()

    @rule()
    def look_for_overflow(self) -> None:
        assert self.consumer.overflowed() is (self.overflows > 0)
        self.overflows = 0

    @rule()
    def restart_producer(self) -> None:
        self.producer = RingProducer(self.words)

    @rule()
    def restart_consumer(self) -> None:
        # It rescans at its start, so that what overflowed before is no news to it.
        self.consumer = RingConsumer(self.words)
        self.overflows = 0

    @invariant()
    def overflow_is_seen_once(self) -> None:
        if self.overflows == 0:
            assert not self.consumer.overflowed()


TestRingAgainstQueue = RingAgainstQueue.TestCase


def test_order_is_kept_around_the_ring() -> None:
    words = ring_words(8)
    producer, consumer = RingProducer(words), RingConsumer(words)
    found = []
    for first in range(0, 300, 3):
        assert producer.push(numbered(first, 3))
        if first % 2:
            found += consumer.drain()
    found += consumer.drain()
    assert found == numbered(0, 300)


def test_a_full_ring_keeps_what_it_has() -> None:
    words = ring_words(4)
    producer, consumer = RingProducer(words), RingConsumer(words)
    assert producer.push(numbered(0, 3))
    assert not producer.push(numbered(3, 2))  # none of them, not one of them
    assert consumer.overflowed()
    assert consumer.drain() == numbered(0, 3)
    assert producer.push(numbered(5, 4))
    assert consumer.drain() == numbered(5, 4)
    assert not consumer.overflowed()


class Recorded:
    """A memoryview that notes every store and load."""

    def __init__(self, words: memoryview) -> None:
        self.words = words
        self.stores: list[int] = []
        self.loads: list[int] = []

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, at: int) -> int:
        self.loads.append(at)
        return self.words[at]

    def __setitem__(self, at: int, value: int) -> None:
        self.stores.append(at)
        self.words[at] = value


def test_the_tail_is_stored_once_and_last() -> None:
    recorded = Recorded(ring_words(8))
    producer = RingProducer(recorded)  # type: ignore[arg-type]
    producer.push(numbered(0, 5))
    entries, tail = recorded.stores[:-1], recorded.stores[-1]
    assert len(entries) == 10
    assert all(at >= RING_HEADER_WORDS for at in entries)
    assert tail < RING_HEADER_WORDS


def test_a_producer_looks_at_the_head_only_when_it_has_no_room() -> None:
    recorded = Recorded(ring_words(4))
    producer, consumer = RingProducer(recorded), RingConsumer(recorded.words)  # type: ignore[arg-type]
    looks = []
    for first in range(12):
        recorded.loads.clear()
        assert producer.push(numbered(first, 1))
        looks.append(0 in recorded.loads)
        assert consumer.drain() == numbered(first, 1)
    assert looks == [at in (4, 8) for at in range(12)]


def test_a_capacity_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="power of two"):
        RingProducer(ring_words(3))
