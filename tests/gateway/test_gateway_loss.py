"""What a dead gateway left in the slab, ended by the launcher and taken over by the next one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.fakes import EOS, World, hash_token, router_class, world
from trserve.gateway.slots import Slot, SlotTable
from trserve.gateway_loss import GatewayDeaths, cancel_requests
from trserve.ipc.baton import Baton, Finish, SlotState, unpack
from trserve.ipc.rings import Descriptor, Kind, RingProducer
from trserve.ipc.shared import Shared

TO_THE_PEER = router_class(lambda model, row: 1 if model == 0 else 0)


def endless(model: int, row: Any) -> int:
    token = hash_token(model, row)
    return token + 1 if token == EOS else token


def next_gateway(w: World) -> SlotTable:
    return SlotTable(w.slab, w.memory.outbox(w.slab, w.memory.layout.gateway))


def cancel(w: World) -> int:
    return cancel_requests(Shared(w.memory.fd, w.memory.bells), w.memory.layout)


def work(w: World, turns: int = 2) -> None:
    for _ in range(turns):
        for worker in w.workers:
            worker.turn()


def test_a_slab_in_use_is_taken_over_and_comes_back() -> None:
    with world(slots=4, token=endless) as w:
        for n in range(3):
            w.submit([n + 1], limit=40)
        work(w)
        assert cancel(w) == 3
        slots = next_gateway(w)
        assert (slots.num_free, slots.num_closing) == (1, 3)
        assert not slots.collect(), "no worker has heard of it yet"
        work(w)
        w.check_nothing_held()
        assert slots.collect()
        assert (slots.num_free, slots.num_closing) == (4, 0)


def test_pending_holders_of_blocks_give_them_up_too() -> None:
    with world(slots=1, workers=2, router=TO_THE_PEER, token=endless) as w:
        slot = w.submit([1, 2, 3], limit=40)
        w.workers[0].turn()
        w.workers[1].turn()
        assert w.baton(slot).owner == 1
        assert w.workers[0].table.resident[slot.index].num_blocks
        cancel(w)
        w.workers[0].turn()  # the one that does not hold the baton
        assert w.workers[0].pool.num_available == w.num_blocks
        work(w)
        assert w.baton(slot).finish is Finish.ABORT
        w.check_nothing_held()


def test_a_baton_whose_descriptor_died_with_the_gateway_is_found() -> None:
    with world(slots=1, token=endless) as w:
        slot = w.submit([1], limit=40)
        w.workers[0].drain()  # as if it had never been pushed
        cancel(w)
        work(w)
        assert w.baton(slot).state is SlotState.DONE
        w.check_nothing_held()


def test_a_slot_that_was_being_filled_is_free_at_once() -> None:
    with world(slots=2, token=endless) as w:
        w.slab.baton[0] = Baton(0, 0, SlotState.FILLING, Finish.NONE, 0, 0).pack()
        assert cancel(w) == 0
        slots = next_gateway(w)
        assert (slots.num_free, slots.num_closing) == (2, 0)
        assert unpack(w.slab.baton[0]).state is SlotState.FREE


def test_a_request_that_ended_before_stays_as_it_ended() -> None:
    with world(slots=2, token=endless) as w:
        slot = w.submit([1], limit=3)
        w.run(slot)
        assert cancel(w) == 0
        assert w.baton(slot).finish is Finish.LENGTH
        slots = next_gateway(w)
        assert slots.num_closing == 1
        assert slots.collect()
        assert slots.num_free == 2


def test_generations_go_on_beyond_the_largest() -> None:
    with world(slots=2, token=endless) as w:
        last: Slot | None = None
        for _ in range(5):
            last = w.submit([1], limit=2)
            w.run(last)
            w.slots.release(last)
            w.slots.collect()
        assert last is not None
        slots = next_gateway(w)
        w.slots = slots
        assert w.submit([1], limit=2).gen == last.gen + 1 == 6


def test_a_stale_end_of_the_last_use_does_not_touch_the_next() -> None:
    """With generations from 1 again, ``closed`` of old would free what has just begun."""
    with world(slots=1, token=endless) as w:
        first = w.submit([1], limit=2)
        w.run(first)
        w.slots = next_gateway(w)
        assert w.slots.collect()
        second = w.submit([1], limit=9)
        w.workers[0].turn()
        assert w.baton(second).state is SlotState.LIVE
        assert w.workers[0].table.resident


@pytest.mark.parametrize("tops", [0, 20])
def test_pages_come_back_with_the_slots(tops: int) -> None:
    with world(slots=4, workers=1, row_tokens=512, token=endless) as w:
        everything = w.slots.num_free_pages
        one = w.submit([1], limit=500, tops=tops, scores_prompt=True)
        w.submit([1], limit=300)
        work(w)
        cancel(w)
        held = everything - w.slots.num_free_pages
        slots = next_gateway(w)
        assert held and slots.num_free_pages == everything - held
        taken = w.slab.page_table[one.index, :held].tolist()
        w.slots = slots
        other = w.submit([1], limit=500, tops=tops)
        pages = w.slab.page_table[other.index, :held].tolist()
        assert not set(pages) & set(taken), "two requests write into one page"
        work(w)
        assert slots.collect()
        assert slots.num_free_pages == everything - len(pages)


def test_a_full_ring_does_not_keep_a_cancel_away() -> None:
    with world(slots=1, token=endless) as w:
        slot = w.submit([1], limit=40)
        work(w)
        ring = RingProducer(w.slab.ring_words(w.memory.layout.gateway, 0))
        while ring.push([Descriptor(Kind.RUN, slot.index, slot.gen, 0)]):
            pass
        consumer = w.workers[0].consumers[-1]
        assert consumer.overflowed()
        cancel(w)
        assert consumer.overflowed(), "the worker is told to look at every slot"
        w.workers[0].drain()
        w.workers[0].table.rescan()
        w.workers[0].outbox.flush()
        assert w.baton(slot).finish is Finish.ABORT


def test_the_third_death_in_a_minute_is_one_too_many() -> None:
    deaths = GatewayDeaths()
    assert [deaths.note(now) for now in (0.0, 30.0, 61.0, 91.0)] == [True] * 4
    assert not deaths.note(100.0)
