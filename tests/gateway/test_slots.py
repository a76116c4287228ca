"""The life of a slot, and that it is used again only when nobody means its last use any more."""

from __future__ import annotations

import pytest

from tests.workers.fakes import EOS, hash_token, router_class, world
from trserve.errors import RequestError
from trserve.gateway.slots import Slot
from trserve.ipc.baton import Baton, Finish, SlotState, unpack
from trserve.ipc.rings import Descriptor, Kind
from trserve.params import RequestParams, SamplingParams, decode_params, encode_params

PARAMS = encode_params(RequestParams(sampling=SamplingParams(seed=2**64 - 1)))
TO_THE_PEER = router_class(lambda model, row: 1 if model == 0 else 0)


def endless(model: int, row: object) -> int:
    token = hash_token(model, row)  # type: ignore[arg-type]
    return token + 1 if token == EOS else token


def test_publication_writes_everything_and_names_the_entry_worker() -> None:
    with world(slots=2, workers=3) as w:
        slot = w.slots.publish([5, 6, 7], PARAMS, limit=20, entry=2)
        assert w.baton(slot) == Baton(3, 2, SlotState.LIVE, Finish.NONE, 0, 0)
        assert w.slab.gen[slot.index] == slot.gen > 0
        assert w.slab.sent[slot.index] == 0b100
        assert w.slab.limit[slot.index] == 20
        assert w.slab.tokens[slot.index, :3].tolist() == [5, 6, 7]
        assert decode_params(w.slab.params(slot.index)).sampling.seed == 2**64 - 1
        assert w.workers[2].drain() == [Descriptor(Kind.RUN, slot.index, slot.gen, 0)]
        assert w.workers[0].drain() == w.workers[1].drain() == []


def test_generations_are_never_used_twice() -> None:
    with world(slots=1, token=endless) as w:
        gens = []
        for _ in range(5):
            slot = w.submit([1], limit=2)
            gens.append(slot.gen)
            w.run(slot)
            w.slots.release(slot)
            assert w.slots.collect()
        assert len(set(gens)) == 5


def test_a_slot_is_free_once_every_worker_that_heard_of_it_has_closed_it() -> None:
    with world(slots=1, workers=3, router=TO_THE_PEER, token=endless) as w:
        slot = w.submit([1, 2, 3], limit=4)
        w.workers[0].turn()
        w.slots.release(slot)
        assert not w.slots.collect()  # LIVE
        w.workers[1].turn()
        assert w.baton(slot).state is SlotState.DONE
        assert not w.slots.collect()  # worker 0 still holds blocks
        assert (w.slots.num_free, w.slots.num_closing) == (0, 1)
        w.workers[0].turn()
        assert w.slots.collect()  # worker 2 never heard of it
        assert (w.slots.num_free, w.slots.num_closing) == (1, 0)
        assert unpack(w.slab.baton[slot.index]).state is SlotState.FREE


def test_closing_an_earlier_use_does_not_free_this_one() -> None:
    with world(slots=1, token=endless) as w:
        first = w.submit([1], limit=2)
        w.run(first)
        w.slots.release(first)
        w.slots.collect()
        second = w.submit([1], limit=2)
        w.workers[0].take_in(w.workers[0].drain())
        w.workers[0].cycle.run(0)
        w.slab.baton[second.index] = Baton(2, 0, SlotState.DONE, Finish.LENGTH, 1, 0).pack()
        w.slots.release(second)
        assert w.slab.closed[0][second.index] == first.gen
        assert not w.slots.collect()


def test_a_slot_that_was_not_released_is_not_taken_back() -> None:
    with world(slots=1, token=endless) as w:
        slot = w.submit([1], limit=2)
        w.run(slot)
        assert not w.slots.collect()


def test_a_cancel_reaches_everybody_who_heard_of_the_request() -> None:
    with world(workers=3, router=TO_THE_PEER, token=endless) as w:
        slot = w.submit([1, 2], limit=9)
        w.workers[0].turn()
        for worker in w.workers:
            worker.drain()
        w.slots.cancel(slot)
        assert w.slab.cancel[slot.index] == slot.gen
        expected = [Descriptor(Kind.CANCEL, slot.index, slot.gen, 0)]
        assert [worker.drain() for worker in w.workers] == [expected, expected, []]


def test_a_cancel_of_what_is_done_is_nothing() -> None:
    with world(token=endless) as w:
        slot = w.submit([1], limit=2)
        w.run(slot)
        w.slots.cancel(slot)
        assert w.slab.cancel[slot.index] == 0
        assert w.workers[0].drain() == []
        assert w.baton(slot).finish is Finish.LENGTH


def test_a_stale_cancel_word_does_not_end_the_next_use() -> None:
    with world(slots=1, token=endless) as w:
        first = w.submit([1], limit=9)
        w.slots.cancel(first)
        w.run(first)
        assert w.baton(first).finish is Finish.ABORT
        w.slots.release(first)
        assert w.slots.collect()
        second = w.submit([1], limit=4)
        w.slab.cancel[second.index] = first.gen
        w.workers[0].take_in([Descriptor(Kind.CANCEL, first.index, first.gen, 0)])
        w.run(second)
        assert w.baton(second).finish is Finish.LENGTH


def test_parameters_that_do_not_fit_take_no_slot() -> None:
    with world(slots=1) as w:
        with pytest.raises(RequestError, match="4096") as raised:
            w.slots.publish([1], bytes(4097), limit=2, entry=0)
        assert raised.value.status == 400
        assert w.slots.num_free == 1
        w.slots.publish([1], bytes(4096), limit=2, entry=0)


def test_a_prompt_that_is_no_list_of_ids_takes_no_slot() -> None:
    with world(slots=1) as w:
        with pytest.raises((ValueError, OverflowError)):
            w.slots.publish([1, 2**40], PARAMS, limit=5, entry=0)
        assert w.slots.num_free == 1


def test_every_slot_can_be_used_at_once_and_no_more() -> None:
    with world(slots=3) as w:
        slots = [w.submit([1], limit=2) for _ in range(3)]
        assert {slot.index for slot in slots} == {0, 1, 2}
        assert w.slots.num_free == 0
        with pytest.raises(IndexError):
            w.submit([1], limit=2)
        assert isinstance(slots[0], Slot)


def test_pages_come_back_with_the_slot_and_run_out() -> None:
    with world(slots=2, workers=1) as w:
        free = w.slots.num_free_pages
        assert free == 2
        one = w.submit([1], limit=3, tops=20)
        two = w.submit([1], limit=3, tops=0)
        assert w.slots.num_free_pages == 0
        tables = [w.slab.page_table[slot.index, 0] for slot in (one, two)]
        assert tables[0] != tables[1]
        w.run(one)
        w.slots.release(one)
        w.slots.collect()
        assert w.slots.num_free_pages == 1
        slots = w.slots.num_free
        with pytest.raises(RequestError) as refused:
            w.slots.publish([1], b"", limit=3, entry=0, pages=2)
        assert (refused.value.status, refused.value.retry_after) == (429, 1)
        assert (w.slots.num_free, w.slots.num_free_pages) == (slots, 1), "nothing was taken"
