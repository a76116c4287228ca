"""A worker's requests against the slab: hints of any kind and number, batons, cancels, closing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.workers.fakes import (
    EOS,
    Worker,
    World,
    hash_route,
    hash_token,
    reference,
    router_class,
    world,
)
from trserve.gateway.slots import Slot
from trserve.ipc.baton import Finish, SlotState, pack
from trserve.ipc.extras import read_extras
from trserve.ipc.rings import Descriptor, Kind
from trserve.workers import table as table_module
from trserve.workers.states import State

PROMPT = [11, 12, 13, 14, 15]
TO_THE_PEER = router_class(lambda model, row: 1 if model == 0 else 0)


def endless(model: int, row: Sequence[int]) -> int:
    token = hash_token(model, row)
    return token + 1 if token == EOS else token


def run_hint(slot: Slot, hop: int = 0) -> Descriptor:
    return Descriptor(Kind.RUN, slot.index, slot.gen, hop)


def publish(worker: Worker) -> None:
    worker.outbox.flush()


def test_a_hint_given_twice_runs_once() -> None:
    with world() as w:
        slot = w.submit(PROMPT, limit=30)
        worker = w.workers[0]
        worker.take_in([*worker.drain(), run_hint(slot), run_hint(slot)])
        assert list(worker.table.runnable) == [slot.index]
        worker.table.hand_off(worker.table.resident[slot.index], 1, empty=False)
        # The word still names this worker until the flush.
        worker.take_in([run_hint(slot)])
        assert not worker.table.runnable
        publish(worker)
        worker.take_in([run_hint(slot)])
        assert not worker.table.runnable
        assert worker.table.resident[slot.index].state is State.PENDING


def test_hints_of_another_use_of_the_slot_mean_nothing() -> None:
    with world() as w:
        slot = w.submit(PROMPT, limit=30)
        worker = w.workers[0]
        worker.take_in([Descriptor(kind, slot.index, gen, 0) for kind in Kind for gen in (0, 2)])
        assert worker.table.resident == {}


def test_a_late_hint_at_a_finished_request_does_not_bring_it_back() -> None:
    with world(token=endless) as w:
        slot = w.submit(PROMPT, limit=6)
        worker = w.workers[0]
        worker.take_in(worker.drain())
        worker.cycle.run(0)  # DONE, but not published yet: the word still says LIVE
        assert w.baton(slot).state is SlotState.LIVE
        worker.take_in([run_hint(slot)])
        assert worker.table.resident == {}
        publish(worker)
        worker.take_in([run_hint(slot), Descriptor(Kind.DONE, slot.index, slot.gen, 0)])
        assert worker.table.resident == {}
        assert w.outcome(slot) == reference(
            PROMPT, limit=6, models=2, decide=lambda model, row: 0, token=endless
        )


def test_a_handoff_is_one_word_one_descriptor_one_bell() -> None:
    with world(router=TO_THE_PEER, token=endless) as w:
        slot = w.submit(PROMPT, limit=30)
        w.workers[0].turn()
        baton = w.baton(slot)
        assert (baton.owner, baton.hop, baton.length) == (1, 1, 5)
        assert w.slab.sent[slot.index] == 0b11
        assert w.workers[1].drain() == [run_hint(slot, 1)]
        extras = read_extras(w.slab.extras(slot.index, baton.bank))
        assert (extras.empty, extras.length) == (True, 5)


def test_a_worker_without_the_baton_never_runs_the_request() -> None:
    with world(router=TO_THE_PEER, token=endless) as w:
        slot = w.submit(PROMPT, limit=30)
        w.workers[1].take_in([run_hint(slot), run_hint(slot, 5)])
        assert w.workers[1].table.resident == {}


def test_what_comes_back_is_appended_and_nothing_is_computed_twice() -> None:
    decide = lambda model, row: 1 if len(row) % 4 == 0 else 0  # noqa: E731
    with world(router=router_class(decide), token=endless) as w:
        slot = w.submit(PROMPT, limit=30)
        w.run(slot)
        first = [tokens for batch in w.workers[0].runner.batches for tokens in batch]
        assert first[0] == 5
        assert max(first[1:]) <= 5  # suffixes, never the whole row again


@pytest.mark.parametrize("published", [False, True])
def test_a_successor_takes_up_what_the_word_says(published: bool) -> None:
    """A worker that ended before or after its words were stored."""
    decide = hash_route(1, 40)
    with world(router=router_class(decide), token=endless) as w:
        slot = w.submit(PROMPT, limit=30)
        for _ in range(3):
            w.workers[0].turn()
        w.workers[0].take_in(w.workers[0].drain())
        w.workers[0].cycle.run(0)
        if published:
            publish(w.workers[0])
        w.workers[0] = w.create(0)
        w.workers[0].table.rescan()
        w.run(slot)
        assert w.outcome(slot) == reference(
            PROMPT, limit=30, models=2, decide=decide, token=endless
        )
        w.check_nothing_held()


def test_a_successor_knows_what_was_committed_since_the_baton_came() -> None:
    """Model 1 gets an empty hop, writes one token, is restarted, and leaves with nothing: legal."""
    decide = lambda model, row: 1 if model == 0 or len(row) == 8 else 0  # noqa: E731
    keeps = lambda model, row: 0  # noqa: E731
    with world(router=router_class(decide, keeps), token=endless) as w:
        slot = w.submit([1] * 6, limit=20)
        w.workers[0].turn()
        w.workers[1].turn()
        assert (w.baton(slot).length, w.baton(slot).owner) == (7, 1)
        w.workers[1] = w.create(1)
        w.workers[1].table.rescan()
        w.run(slot)
        assert w.outcome(slot) == reference(
            [1] * 6, limit=20, models=2, decide=decide, keeps=keeps, token=endless
        )


def test_done_is_told_to_everybody_who_ever_heard() -> None:
    with world(workers=3, router=TO_THE_PEER, token=endless) as w:
        slot = w.submit(PROMPT, limit=6)
        w.workers[0].turn()
        w.workers[1].turn()
        assert w.baton(slot).state is SlotState.DONE
        assert w.workers[0].pool.num_available < 64
        assert w.workers[0].drain() == [Descriptor(Kind.DONE, slot.index, slot.gen, 1)]
        assert w.workers[2].drain() == []
        w.workers[0].take_in([Descriptor(Kind.DONE, slot.index, slot.gen, 1)])
        publish(w.workers[0])
        w.check_nothing_held()
        assert w.slab.closed[2][slot.index] == 0


def cancel_word_only(w: World, slot: Slot) -> None:
    w.slab.cancel[slot.index] = slot.gen


def test_a_cancel_ends_the_request_where_the_baton_is_and_frees_the_rest() -> None:
    with world(router=TO_THE_PEER, token=endless) as w:
        slot = w.submit(PROMPT, limit=30)
        w.workers[0].turn()
        w.workers[1].turn()
        w.slots.cancel(slot)
        w.workers[0].take_in(w.workers[0].drain())
        # Not the holder: it gives its blocks up at once, and stores nothing.
        assert w.workers[0].pool.num_available == 64
        assert w.baton(slot).state is SlotState.LIVE
        w.workers[1].turn()
        assert (w.baton(slot).state, w.baton(slot).finish) == (SlotState.DONE, Finish.ABORT)
        assert w.baton(slot).length == 6  # nothing was committed after the cancel
        w.workers[0].turn()
        w.check_nothing_held()


def test_a_lost_cancel_costs_one_step() -> None:
    with world(token=endless) as w:
        slot = w.submit(PROMPT, limit=30)
        w.workers[0].turn()
        cancel_word_only(w, slot)
        w.workers[0].turn()
        assert (w.baton(slot).finish, w.baton(slot).length) == (Finish.ABORT, 6)


def test_a_cancelled_request_ends_as_its_baton_arrives() -> None:
    with world(router=TO_THE_PEER, token=endless) as w:
        slot = w.submit(PROMPT, limit=30)
        w.workers[0].turn()
        cancel_word_only(w, slot)
        w.workers[1].turn()
        assert w.baton(slot).finish is Finish.ABORT
        assert w.workers[1].runner.batches == []


def test_a_stale_cancel_means_nothing() -> None:
    with world(token=endless) as w:
        slot = w.submit(PROMPT, limit=8)
        w.slab.cancel[slot.index] = slot.gen + 1
        w.run(slot)
        assert w.baton(slot).finish is Finish.LENGTH
        w.slab.cancel[slot.index] = slot.gen
        w.workers[0].take_in([Descriptor(Kind.CANCEL, slot.index, slot.gen, 0)])
        assert w.baton(slot).finish is Finish.LENGTH  # DONE stays DONE


def test_a_rescan_finds_what_no_ring_brought() -> None:
    with world(router=TO_THE_PEER, token=endless) as w:
        slots = [w.submit(PROMPT, limit=8) for _ in range(3)]
        w.slab.baton[3] = pack(5, 1, SlotState.FILLING, Finish.NONE, 0, 0)
        w.workers[0].drain()
        w.workers[0].table.rescan()
        assert sorted(w.workers[0].table.runnable) == sorted(slot.index for slot in slots)
        w.workers[0].table.rescan()
        assert len(w.workers[0].table.runnable) == 3


def test_a_rescan_takes_no_earlier_end_for_that_of_the_use_it_has_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fence stands for all that a processor may have read ahead."""
    with world(token=endless) as w:
        slot, table = w.submit(PROMPT, limit=8), w.workers[0].table
        baton = w.slab.baton[slot.index]
        w.slab.baton[slot.index] = pack(5, 0, SlotState.DONE, Finish.LENGTH, 0, 0)

        def load_fence() -> None:
            w.slab.baton[slot.index] = baton

        monkeypatch.setattr(table_module, "load_fence", load_fence)
        table.rescan()
        assert list(table.runnable) == [slot.index]


def test_a_request_arrives_once_a_hop() -> None:
    seen: list[int] = []
    with world(token=endless) as w:
        slot = w.submit(PROMPT, limit=8)
        worker = w.workers[0]
        worker.table.on_arrival = lambda request: seen.append(request.slot)
        worker.take_in([*worker.drain(), run_hint(slot)])
        worker.table.rescan()
        assert seen == [slot.index]
