"""64 streams over rings of four descriptors, which are full all the time: a rescan finds it all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import FULL
from tests.workers.fakes import (
    VOCAB,
    Worker,
    World,
    hash_route,
    reference,
    router_class,
    world,
)
from tests.workers.running import Running
from trserve.gateway.slots import Slot
from trserve.ipc.baton import Finish, SlotState
from trserve.ipc.layout import DESCRIPTOR_WORDS, LINE, RING_HEADER_WORDS
from trserve.ipc.rings import RingConsumer, RingProducer
from trserve.ipc.slab import Slab

CAPACITY = 4
STREAMS = 64
LIMIT = 28
OVERFLOWS = 2 * LINE // 8


class SmallRings:
    """The slab's own rings, of which only the beginning is used."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab

    def words(self, producer: int, consumer: int) -> memoryview:
        size = RING_HEADER_WORDS + DESCRIPTOR_WORDS * CAPACITY
        return self._slab.ring_words(producer, consumer)[:size]

    def sender(self, producer: int, consumer: int) -> RingProducer:
        return RingProducer(self.words(producer, consumer))

    def receiver(self, producer: int, consumer: int) -> RingConsumer:
        return RingConsumer(self.words(producer, consumer))


@contextmanager
def small_world(models: int, share: int, **more: Any) -> Iterator[World]:
    decide = hash_route(models - 1, share)
    with world(
        slots=STREAMS,
        row_tokens=32,
        workers=models,
        medium=SmallRings,
        router=router_class(decide),
        num_blocks=STREAMS * 8,
        max_rows=STREAMS,
        max_tokens=STREAMS * 4,
        **more,
    ) as w:
        yield w


def overflows(w: World, producer: int) -> int:
    """Pushes of ``producer`` that found no room."""
    rings = SmallRings(w.slab)
    others = [worker.index for worker in w.workers if worker.index != producer]
    return sum(rings.words(producer, other)[OVERFLOWS] for other in others)


def turn(worker: Worker) -> None:
    """As its loop does it."""
    for ring in worker.consumers:
        if ring.overflowed():
            ring.drain()
            worker.table.rescan()
            worker.cycle.look_around()
        worker.take_in(ring.drain())
    worker.turn()


def check_outcomes(
    w: World, prompts: list[list[int]], slots: list[Slot], cancelled: set[int], share: int
) -> None:
    models = len(w.workers)
    for number, (prompt, slot) in enumerate(zip(prompts, slots, strict=True)):
        entry = number % models
        expected = reference(
            prompt, limit=LIMIT, models=models, decide=hash_route(models - 1, share), entry=entry
        )
        found = w.outcome(slot)
        if found.finish is Finish.ABORT:
            assert number in cancelled
            assert found.row == expected.row[: len(found.row)]
            assert found.sources == expected.sources[: len(found.sources)]
        else:
            assert found == expected


@settings(max_examples=40 if FULL else 12)
@given(
    seed=st.integers(0, 2**32),
    models=st.integers(2, 3),
    share=st.sampled_from([20, 60, 100]),
    mode=st.sampled_from(["off", "idle"]),
)
def test_nothing_is_lost_doubled_or_stranded(seed: int, models: int, share: int, mode: str) -> None:
    dice = random.Random(seed)
    prompts = [[dice.randrange(VOCAB) for _ in range(dice.randint(1, 9))] for _ in range(STREAMS)]
    with small_world(models, share, early_prefill=mode) as w:
        slots = [w.submit(p, limit=LIMIT, entry=n % models) for n, p in enumerate(prompts)]
        assert overflows(w, w.slab.layout.gateway), "64 requests in rings of four"
        cancelled: set[int] = set()
        for _ in range(3000):
            turn(dice.choice(w.workers))
            if dice.random() < 0.02:
                number = dice.randrange(STREAMS)
                cancelled.add(number)
                w.slots.cancel(slots[number])
            if all(w.baton(slot).state is SlotState.DONE for slot in slots):
                break
        for worker in w.workers:  # what is over is told in full rings, too
            turn(worker)
        assert sum(overflows(w, worker.index) for worker in w.workers), "handoffs found them full"
        check_outcomes(w, prompts, slots, cancelled, share)
        w.check_nothing_held()
        for slot in slots:
            w.slots.release(slot)
        w.slots.collect()
        assert w.slots.num_free == STREAMS


def test_the_loops_themselves_go_on_at_full_rings() -> None:
    """Each in a thread of its own, asleep on its doorbell whenever it has nothing to do."""
    prompts = [[n % VOCAB, 5, n // 7] for n in range(STREAMS)]
    with small_world(2, 60) as w:
        slots = [w.submit(p, limit=LIMIT, entry=n % 2) for n, p in enumerate(prompts)]
        assert overflows(w, w.slab.layout.gateway), "nobody has taken anything out yet"
        running = Running(w)
        running.start()
        running.until(lambda: all(is_closed(w, slot) for slot in slots))
        running.close()
        assert overflows(w, 0) + overflows(w, 1)
        assert [loop.belt_finds for loop in running.loops] == [0, 0]
        check_outcomes(w, prompts, slots, set(), 60)
        w.check_nothing_held()


def is_closed(w: World, slot: Slot) -> bool:
    sent = w.slab.sent[slot.index]
    told = [closed for worker, closed in enumerate(w.slab.closed) if sent >> worker & 1]
    return all(closed[slot.index] == slot.gen for closed in told)
