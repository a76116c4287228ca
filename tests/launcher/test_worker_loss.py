"""The launcher in the slab, in the place of workers that are gone: what it may do, and does."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.fakes import (
    VOCAB,
    HashRunner,
    World,
    hash_route,
    hash_token,
    reference,
    router_class,
    world,
)
from tests.workers.test_crashes import MAX_TURNS, Gateway, chaos
from trserve.gateway.slots import Slot
from trserve.ipc.baton import Finish
from trserve.ipc.doorbell import silence
from trserve.ipc.extras import read_extras
from trserve.ipc.slab import WorkerStatus
from trserve.worker_loss import StandIn, Step

ROUTE = hash_route(1, 40)
NOTHING = Step(frozenset(), frozenset())


class DeadError(Exception):
    """The worker is gone."""


def die_in_step(w: World, index: int) -> None:
    """The worker's next step is its last."""

    class Deadly(HashRunner):
        def forward(self, inputs: object, also: object = None) -> object:
            raise DeadError

    worker = w.workers[index]
    worker.runner.forward = Deadly(index, worker.pool).forward  # type: ignore[method-assign]
    with pytest.raises(DeadError):
        for _ in range(50):
            worker.turn()


def succeed(w: World, index: int) -> None:
    """The next worker on the same memory."""
    w.workers[index] = w.create(index)
    rescan(w)


def rescan(w: World) -> None:
    for worker in w.workers:
        if worker.table.outdated:
            worker.table.rescan()
            worker.cycle.look_around()


def stand_in(w: World) -> StandIn:
    return StandIn(w.slab, w.memory.bells)


def test_taking_over_tells_everybody() -> None:
    with world() as w:
        for bell in w.memory.bells:
            silence(bell)
        launcher, epoch = stand_in(w), w.slab.epoch
        assert launcher.take_over(1) == NOTHING
        assert launcher.status(1) is WorkerStatus.RESTARTING
        assert w.slab.epoch == epoch + 1
        assert all(silence(bell) for bell in w.memory.bells)


def test_nobodys_gate_waits_for_a_step_of_the_dead() -> None:
    with world(slots=2, thresholds=(1, 2)) as w:
        for prompt in [1], [2]:
            w.submit(prompt, limit=8)
        dead = w.slab.workers[0]
        dead.set("in_step", 1)
        dead.set("buffered", 1)
        waiting = w.workers[1].gate
        assert waiting.wait_s(1, 1) > 0
        stand_in(w).take_over(0)
        assert (dead.get("in_step"), dead.get("buffered")) == (0, 0)


def test_what_is_over_is_closed_for_the_dead_and_for_nobody_else() -> None:
    with world(workers=3, router=router_class(hash_route(2, 60))) as w:
        slots = [w.submit([n, 5], limit=30, ignore_eos=True) for n in range(3)]
        alone = w.submit([9, 9], limit=20, pinned=True, entry=2)
        w.run(*slots, alone)
        for closed in w.slab.closed:
            for slot in (*slots, alone):
                closed[slot.index] = 0
        stand_in(w).take_over(0)
        assert [w.slab.closed[0][slot.index] for slot in slots] == [slot.gen for slot in slots]
        assert w.slab.closed[0][alone.index] == 0, "it never heard of it"
        for other in (1, 2):
            assert not any(w.slab.closed[other])


def test_who_was_in_the_step_is_suspected_once_and_then_ended() -> None:
    with world(workers=1) as w:
        launcher = stand_in(w)
        slots = [w.submit([n, 5], limit=40, pinned=True, ignore_eos=True) for n in range(2)]
        for _ in range(4):
            w.workers[0].turn()
        die_in_step(w, 0)
        uses = frozenset((slot.index, slot.gen) for slot in slots)
        assert launcher.take_over(0) == Step(uses, frozenset())
        assert [w.slab.suspect[slot.index] for slot in slots] == [slot.gen for slot in slots]
        assert launcher.take_over(0) == NOTHING, "a successor that dies while loading"
        succeed(w, 0)
        die_in_step(w, 0)  # of the first that is tried alone
        step = launcher.take_over(0)
        assert len(step.requests) == 1 and step.poison == step.requests
        ((guilty, _),) = step.poison
        succeed(w, 0)
        w.run(*slots)
        for n, slot in enumerate(slots):
            expected = reference([n, 5], limit=40, models=1, decide=hash_route(1, 0), stop_ids=())
            found = w.outcome(slot)
            if slot.index == guilty:
                assert found.finish is Finish.WORKER_CRASHED
                assert found.row == expected.row[: len(found.row)]
            else:
                assert found == expected
            w.slots.release(slot)
        assert w.slots.collect() and w.slots.num_free == 4


def test_who_came_a_token_further_is_not_found_guilty() -> None:
    with world(workers=1) as w:
        launcher = stand_in(w)
        slots = [w.submit([n, 5], limit=40, pinned=True, ignore_eos=True) for n in range(2)]
        for _ in range(6):
            die_in_step(w, 0)
            step = launcher.take_over(0)
            assert step.requests and not step.poison
            succeed(w, 0)
            for _ in range(4):
                w.workers[0].turn()
        w.run(*slots)
        assert {w.outcome(slot).finish for slot in slots} == {Finish.LENGTH}


def test_a_death_at_anothers_prompt_is_laid_to_it_and_ends_nothing() -> None:
    with world(workers=2, early_prefill="idle") as w:
        launcher = stand_in(w)
        slot = w.submit([5, 6, 7], limit=20, ignore_eos=True)
        for _ in range(2):
            w.slab.suspect[slot.index] = 0  # as if the second had begun before it was marked
            die_in_step(w, 1)
            use = (slot.index, slot.gen)
            assert launcher.take_over(1) == Step(frozenset(), frozenset(), frozenset({use}))
            assert w.slab.suspect[slot.index] == slot.gen
            succeed(w, 1)
            w.workers[1].table.expect(slot.index, slot.gen)  # the hint comes again
        w.run(slot)
        assert w.workers[1].runner.batches == [], "nobody computes it early again"
        expected = reference([5, 6, 7], limit=20, models=2, decide=hash_route(1, 0), stop_ids=())
        assert w.outcome(slot) == expected
        w.check_nothing_held()


def test_who_arrives_after_a_death_at_its_prompt_has_two_more_to_be_found_out() -> None:
    with world(workers=2, early_prefill="idle", router=router_class(hash_route(1, 100))) as w:
        launcher = stand_in(w)
        slot = w.submit([5, 6, 7], limit=20, ignore_eos=True)
        use = frozenset({(slot.index, slot.gen)})
        die_in_step(w, 1)
        assert launcher.take_over(1).early == use
        succeed(w, 1)
        w.workers[0].turn()
        assert w.baton(slot).owner == 1
        for poison in (frozenset(), use):
            die_in_step(w, 1)
            assert launcher.take_over(1) == Step(use, poison)
            succeed(w, 1)
        assert w.baton(slot).finish is Finish.WORKER_CRASHED


def test_a_lost_workers_requests_go_to_one_that_is_left() -> None:
    with world(workers=3, router=router_class(hash_route(2, 50))) as w:
        launcher = stand_in(w)
        slot = w.submit([5, 6], limit=40, ignore_eos=True, entry=1)
        pinned = w.submit([7, 8], limit=40, ignore_eos=True, entry=1, pinned=True)
        w.workers[1].turn()
        before = w.baton(slot)
        assert before.owner == 1
        launcher.take_over(1)
        launcher.give_up(1)
        after = w.baton(slot)
        assert (after.owner, after.hop, after.length) == (0, before.hop + 1, before.length)
        extras = read_extras(w.slab.extras(slot.index, after.bank))
        assert extras.length == after.length and not extras.empty
        assert extras.alone, "the lost one was to write the next token"
        assert w.slab.left[1][slot.index] == before.length
        assert w.baton(pinned).finish is Finish.WORKER_LOST
        assert w.slab.closed[1][pinned.index] == pinned.gen
        rescan(w)
        lost = w.workers.pop(1)
        w.run(slot)
        assert lost.table.resident, "it was not asked"
        assert {*w.outcome(slot).sources[before.length - 2 :]} <= {0, 2}
        launcher.tend(1)
        w.slots.release(slot)
        w.slots.release(pinned)
        w.slots.collect()
        assert w.slots.num_free == 4


def test_the_last_workers_requests_end() -> None:
    with world(workers=2) as w:
        launcher = stand_in(w)
        slots = [w.submit([n], limit=40, ignore_eos=True, entry=n) for n in range(2)]
        for worker in w.workers:
            worker.turn()
        for index in range(2):
            launcher.take_over(index)
            launcher.give_up(index)
        assert {w.baton(slot).finish for slot in slots} == {Finish.WORKER_LOST}


def is_sound(w: World, slot: Slot) -> bool:
    """Every token is what the model that is said to have written it writes there."""
    found = w.outcome(slot)
    prompt = len(found.row) - len(found.sources)
    return all(
        token == hash_token(source, found.row[:at])
        for at, (token, source) in enumerate(
            zip(found.row[prompt:], found.sources, strict=True), prompt
        )
    )


class Degraded(Gateway):
    """Looks at each answer as it ends."""

    def _look(self, number: int, slot: Slot) -> None:
        assert is_sound(self.world, slot)
        super()._look(number, slot)


@given(seed=st.integers(0, 2**32), models=st.integers(1, 3))
def test_no_schedule_strands_a_request_of_a_lost_worker(seed: int, models: int) -> None:
    """Workers die at random stores, one for good; what it held and what still comes goes on."""
    dice = random.Random(seed)
    decide = hash_route(models - 1, 60) if models > 1 else hash_route(1, 0)
    prompts = [[dice.randrange(VOCAB) for _ in range(dice.randint(1, 20))] for _ in range(6)]
    lost, when = dice.randrange(models), dice.randrange(120)
    settings = {"router": router_class(decide), "num_blocks": 11, "max_rows": 3}
    with chaos(dice, slots=3, workers=models, **settings) as w:
        launcher, gateway = stand_in(w), Degraded(w, prompts)
        for turn in range(MAX_TURNS):
            w.calm = turn > 300
            gateway.turn()
            if gateway.idle:
                break
            index = dice.randrange(models)
            if turn == when:
                launcher.take_over(lost)
                launcher.give_up(lost)
            if index != lost or turn < when:
                w.chaotic_turn(index)
            elif turn > when:
                launcher.tend(lost)
        assert gateway.idle, f"no end: {gateway.open} {gateway.todo}"
        assert w.slots.num_free == 3
        ends = set(gateway.ended.values())
        assert Finish.WORKER_CRASHED not in ends
        assert models == 1 or Finish.WORKER_LOST not in ends
        for index, worker in enumerate(w.workers):
            if index != lost or turn < when:
                assert worker.table.resident == {}
                assert worker.pool.num_available == w.num_blocks
