"""The ring's two ends in every interleaving, and with the end of either after every prefix."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.ipc.interleaving import Explorer, Memory, Process, Program, Violation, Words
from trserve.ipc import rings
from trserve.ipc.layout import DESCRIPTOR_WORDS, RING_HEADER_WORDS
from trserve.ipc.rings import Descriptor, Kind, RingConsumer, RingProducer

CAPACITY = 2
SIZE = RING_HEADER_WORDS + DESCRIPTOR_WORDS * CAPACITY
HEAD, OTHERS = range(8), range(8, RING_HEADER_WORDS)
LONG, SHORT = (1, 2, 1, 2), (1, 2, 1)
BELL = "bell"


def descriptor(number: int) -> Descriptor:
    """Every field depends on the number, so that half of one and half of another is neither."""
    return Descriptor(Kind(number % 3), 40 + number, 100 + number, 7 + number)


def producer(batches: Sequence[int]) -> Program:
    """Sends the batches in order; a successor goes on with the one that was not noted as sent."""

    def program(process: Process) -> None:
        produce(process, batches)

    return program


def produce(process: Process, batches: Sequence[int]) -> None:
    ring = RingProducer(Words(process, "ring", SIZE, OTHERS))  # type: ignore[arg-type]
    first = 1
    for batch, size in enumerate(batches):
        if process.load("sent", private=True) <= batch:
            process.store("slab", first + size - 1)  # the batons come before their descriptors
            fits = ring.push([descriptor(first + n) for n in range(size)])
            process.store("sent", batch + 1)
            process.store(BELL, 1)
            if not fits:
                dropped = process.load("dropped", private=True) or ()
                process.store("dropped", (*dropped, *range(first, first + size)))
        first += size
    process.wait("never")


def consumer(process: Process) -> None:
    """Drains whenever the bell has rung and notes the numbers; a rescan as what it found, negated.

    A rescan finds what is in the slab, whatever became of the descriptors.
    """
    ring = RingConsumer(Words(process, "ring", SIZE, HEAD))  # type: ignore[arg-type]
    process.store("found", (*process.load("found", private=True), -process.load("slab")))
    while True:
        mark = process.mark()
        found = (-process.load("slab"),) if ring.overflowed() else ()
        for each in ring.drain():
            if each != descriptor(each.slot - 40):
                raise Violation(f"{each} was never sent")
            found += (each.slot - 40,)
        if found:
            process.store("found", (*process.load("found", private=True), *found))
        else:
            process.wait(BELL)
            process.rewind(mark)


def nothing(memory: Memory) -> None:
    """Whole descriptors are checked where they are drained."""


def check_end(memory: Memory, total: int, *, crashes: int) -> None:
    """Everybody sleeps: all numbers came, once and in order, or a rescan made up for them."""
    found, dropped = memory["found"], memory.get("dropped", ())
    numbers = [number for number in found if number > 0]
    rescanned = -min(found)
    if not crashes and numbers != sorted(set(numbers)):
        raise Violation(f"out of order, or twice: {found}")
    if any(numbers.count(number) > 1 + crashes for number in numbers):
        raise Violation(f"too often: {found}")
    for number in set(range(1, 1 + total)).difference(numbers):
        if not crashes and number not in dropped:
            raise Violation(f"{number} is lost: {found}")
        if number > rescanned:
            raise Violation(f"{number} did not fit, or was read by one that ended: {found}")


def explorer(batches: Sequence[int], *, victims: Sequence[int] = ()) -> Explorer:
    def reaped(memory: Memory) -> None:
        memory[BELL] = 1

    crashes = min(1, len(victims))
    return Explorer(
        [producer(batches), consumer],
        {"found": ()},
        nothing,
        lambda memory: check_end(memory, sum(batches), crashes=crashes),
        victims=victims,
        crashes=crashes,
        on_crash=reaped,
    )


def test_every_order_of_pushes_and_drains() -> None:
    found = explorer(LONG)
    found.run()
    assert found.states > 1_000 and found.ends > 1


@pytest.mark.parametrize("victim", [0, 1], ids=["producer", "consumer"])
def test_the_end_of_either_after_every_prefix(victim: int) -> None:
    found = explorer(SHORT, victims=[victim])
    found.run()
    assert found.states > 2_000 and found.ends > 1


def test_a_tail_that_is_stored_first_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def push(ring: RingProducer, descriptors: Sequence[Descriptor]) -> bool:
        words = ring._words
        tail = words[rings._TAIL]
        if tail + len(descriptors) > words[rings._HEAD] + CAPACITY:
            words[rings._OVERFLOWS] += 1
            return False
        words[rings._TAIL] = tail + len(descriptors)
        words[rings._TAIL] = tail
        return real(ring, descriptors)

    real = RingProducer.push
    monkeypatch.setattr(RingProducer, "push", push)
    with pytest.raises(Violation):
        explorer(LONG).run()
