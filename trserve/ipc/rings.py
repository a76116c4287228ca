"""Single-producer single-consumer rings of descriptors. Knows no slots, batons or doorbells.

A descriptor ``(slot, gen, hop, kind)`` is a hint: the slab is the truth, so one that is lost,
doubled or late changes nothing. All descriptors of a step are written first and the tail is
stored once, because descriptors that become visible one by one let an awake peer start a step
with a fraction of them.

Memory order. Producer: entries, ``store_fence``, tail. Consumer: tail, ``load_fence``, entries,
then head. The head store needs no fence on the consumer's side beyond program order: a producer
that sees an old head only thinks the ring fuller than it is. On AArch64 the consumer's entry
loads must not sink below its head store; they produce Python integers before the store executes,
and ``store_fence`` (release) orders earlier loads too.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from trserve.ipc.fence import load_fence, store_fence
from trserve.ipc.layout import DESCRIPTOR_WORDS, LINE, RING_HEADER_WORDS

_HEAD: Final = 0
_TAIL: Final = LINE // 8
_OVERFLOWS: Final = 2 * LINE // 8
_SLOT_BITS: Final = 24
_KIND_BITS: Final = 4
_SLOT_MASK: Final = (1 << _SLOT_BITS) - 1
_KIND_MASK: Final = (1 << _KIND_BITS) - 1
_HOP_SHIFT: Final = _SLOT_BITS + _KIND_BITS


class Kind(IntEnum):
    """What a descriptor hints at."""

    RUN = 0
    DONE = 1
    CANCEL = 2
    PREFILL = 3  # of a prompt that another worker begins with; from the gateway alone


class Descriptor(NamedTuple):
    """A hint that the baton word of ``slot`` deserves a look."""

    kind: Kind
    slot: int
    gen: int
    hop: int


# Half of a drain's time would go into the checks of Kind(...) and Descriptor(...).
_KINDS: Final = tuple(Kind)
_new: Final = tuple.__new__


class _Ring:
    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._capacity = (len(words) - RING_HEADER_WORDS) // DESCRIPTOR_WORDS
        if self._capacity & (self._capacity - 1):
            raise ValueError(f"ring capacity {self._capacity} is not a power of two")
        self._mask = self._capacity - 1


class RingProducer(_Ring):
    """The writing end.

    How far there is room is kept from the last look at the head, which only makes the ring look
    fuller than it is: a look at every push fetches the consumer's cache line, which costs a tenth
    of a handoff.
    """

    def __init__(self, words: memoryview) -> None:
        super().__init__(words)
        self._room_until = words[_HEAD] + self._capacity

    def push(self, descriptors: Sequence[Descriptor]) -> bool:
        """Publish all of a step's descriptors at once.

        Returns False when they do not fit: nothing is written, and the overflow count, which the
        consumer compares with the last that it saw, tells it to rescan.
        """
        words, mask = self._words, self._mask
        tail = words[_TAIL]
        if tail + len(descriptors) > self._room_until:
            self._room_until = words[_HEAD] + self._capacity
            if tail + len(descriptors) > self._room_until:
                words[_OVERFLOWS] += 1
                return False
        for kind, slot, gen, hop in descriptors:
            at = RING_HEADER_WORDS + DESCRIPTOR_WORDS * (tail & mask)
            words[at] = gen
            words[at + 1] = (hop << _KIND_BITS | kind) << _SLOT_BITS | slot
            tail += 1
        store_fence()
        words[_TAIL] = tail
        return True


class RingConsumer(_Ring):
    """The reading end; a process that takes it over from another creates its own."""

    def __init__(self, words: memoryview) -> None:
        super().__init__(words)
        self._head = words[_HEAD]
        self._overflows = words[_OVERFLOWS]

    def overflowed(self) -> bool:
        """Whether the producer met a full ring since the last call."""
        count = self._words[_OVERFLOWS]
        if count == self._overflows:
            return False
        self._overflows = count
        load_fence()  # the batons that did not fit were stored before the count
        return True

    def drain(self) -> list[Descriptor]:
        """Everything published so far, oldest first."""
        words, head = self._words, self._head
        tail = words[_TAIL]
        if head == tail:
            return []
        load_fence()
        mask, found = self._mask, []
        while head != tail:  # of usually one descriptor: cheaper than a range
            at = RING_HEADER_WORDS + DESCRIPTOR_WORDS * (head & mask)
            packed = words[at + 1]
            kind = _KINDS[packed >> _SLOT_BITS & _KIND_MASK]
            hop = packed >> _HOP_SHIFT
            found.append(_new(Descriptor, (kind, packed & _SLOT_MASK, words[at], hop)))
            head += 1
        store_fence()
        words[_HEAD] = self._head = head
        return found
