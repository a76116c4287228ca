"""What becomes of requests while the far side is away: they wait, go on alone, or end."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import FULL
from tests.edge.link.joined import HEARTBEAT_S, Joined, joined
from tests.edge.link.test_joined import DECIDE, KEEPING, PROMPTS, ROUTER, check, submit_all
from tests.workers.fakes import hash_token
from trserve.edge.records import read_records
from trserve.ipc.annotations import AnnotationBook
from trserve.ipc.baton import Finish, SlotState
from trserve.ipc.slab import Reach
from trserve.params import RequestParams, SamplingParams

EXAMPLES = settings(max_examples=200 if FULL else 12, deadline=None)
TRACED = RequestParams(sampling=SamplingParams(), trace=True)


def submit_traced(j: Joined, count: int, limit: int = 40) -> list:
    world = j.home.world
    return [
        world.submit(PROMPTS[n], limit=limit, trace=True, ignore_eos=True) for n in range(count)
    ]


def go_away(j: Joined) -> None:
    """The network is gone, for longer than anybody's patience."""
    j.network.up = False
    j.network.cut()
    j.turn()
    j.turn(1.1 * HEARTBEAT_S)
    j.turn()


def marks(j: Joined, slot: Any) -> list[bool]:
    slab = j.home.world.slab
    prompt, end = slab.prompt_len[slot.index], j.home.world.baton(slot).length
    book = AnnotationBook(slab, slot.index, first=prompt, tops=0)
    return [record.alone for record in book.read(prompt, end)]


def check_alone(j: Joined, slot: Any, *, keeps: bool) -> int:
    """Every token is its writer's, and marked if and only if model 1 was to write and did not."""
    found, alone = j.home.world.outcome(slot), marks(j, slot)
    prompt = j.home.world.slab.prompt_len[slot.index]
    wanted = 0  # who was to write the token, by the one before
    for n, (token, source) in enumerate(zip(found.row[prompt:], found.sources, strict=True)):
        row = found.row[: prompt + n]
        assert token == hash_token(source, row)
        leaves = DECIDE(source, [*row, token]) != 0
        if source == 1:
            assert not alone[n]
            wanted = 0 if leaves else 1
        elif keeps:
            assert not alone[n] or leaves or wanted == 1
            assert alone[n] or wanted == 0
            wanted = 1 if leaves and not alone[n] else 0
        else:
            assert alone[n] == (leaves or wanted == 1), n
            wanted = 0
    return sum(alone)


@pytest.mark.parametrize("keeps", [False, True])
@EXAMPLES
@given(seed=st.integers(0, 2**32))
def test_what_is_written_alone_says_so_and_nothing_else_does(keeps: bool, seed: int) -> None:
    rng = Random(seed)
    with joined(policy="degrade", router=KEEPING if keeps else ROUTER) as j:
        j.turns(3)
        slots = submit_traced(j, 4)
        for _ in range(rng.randrange(1, 4)):
            j.turns(rng.randrange(1, 12))
            j.network.up = False
            if rng.random() < 0.8:
                j.network.cut()
            if rng.random() < 0.7:
                j.turn(1.5 * HEARTBEAT_S)
            j.turns(rng.randrange(1, 12))
            j.network.up = True
            j.turns(rng.randrange(1, 6), step_s=0.2)
        j.run(*slots, turns=20_000)
        for slot in slots:
            assert j.home.world.baton(slot).finish is Finish.LENGTH
            check_alone(j, slot, keeps=keeps)


def test_an_outage_leaves_marks_and_routes_go_there_again() -> None:
    with joined(policy="degrade", router=ROUTER, row_tokens=200) as j:
        j.turns(3)
        slot = j.home.world.submit(PROMPTS[0], limit=180, trace=True, ignore_eos=True)
        j.turns(40)
        before = j.home.world.slab.workers[1].get("outages")
        go_away(j)
        j.turns(60)
        assert j.home.world.slab.workers[1].get("reach") == Reach.ALONE
        j.network.up = True
        j.turn(3.0)
        j.run(slot)
        alone = marks(j, slot)
        assert check_alone(j, slot, keeps=False) >= 5
        sources = j.home.world.outcome(slot).sources
        first, last = alone.index(True), len(alone) - alone[::-1].index(True)
        assert 1 in sources[:first] and 1 in sources[last:], "before and after, both write"
        assert 1 not in sources[first + 1 : last]
        assert j.home.world.slab.workers[1].get("outages") == before + 1
        j.check_nothing_held()


def test_those_who_wait_go_on_as_if_nothing_had_been() -> None:
    with joined(policy="wait", router=ROUTER) as j:
        j.turns(3)
        slots = submit_all(j, 4)
        j.turns(15)
        j.network.up = False
        j.network.cut()
        j.turns(50, step_s=1.0)
        before = [j.home.world.baton(slot) for slot in slots]
        assert any(baton.state is SlotState.LIVE and baton.owner == 1 for baton in before)
        assert j.home.world.slab.workers[1].get("reach") == Reach.WAITS
        j.network.up = True
        j.turn(3.0)
        j.run(*slots)
        check(j, slots)


def test_those_who_fail_say_so_at_once_and_later_ones_do_too() -> None:
    with joined(policy="fail", router=ROUTER) as j:
        j.turns(3)
        slots = submit_all(j, 2, ignore_eos=True)
        j.turns(9)
        go_away(j)
        j.turns(60)
        finishes = {j.home.world.baton(slot).finish for slot in slots}
        assert Finish.WORKER_LOST in finishes
        late = j.home.world.submit(PROMPTS[3], limit=40, entry=1)
        j.turns(3)
        assert j.home.world.baton(late).finish is Finish.WORKER_LOST
        alone = j.home.world.submit(PROMPTS[3], limit=20, pinned=True)
        j.run(alone)
        assert j.home.world.baton(alone).finish is not Finish.WORKER_LOST
        assert j.home.world.slab.workers[1].get("reach") == Reach.FAILS


def test_a_pinned_request_does_not_go_on_with_another_model() -> None:
    with joined(policy="degrade", router=ROUTER) as j:
        j.turns(3)
        slot = j.home.world.submit(PROMPTS[0], limit=60, entry=1, pinned=True, ignore_eos=True)
        j.turns(6)
        go_away(j)
        assert j.home.world.baton(slot).finish is Finish.WORKER_LOST


def test_a_visit_that_takes_too_long_is_taken_back_and_its_answer_comes_too_late() -> None:
    """Nothing moves at the far side for a while: a model that is slow, over a link that is well."""
    with joined(policy="degrade", timeout_s=0.5, router=ROUTER, row_tokens=120) as j:
        j.turns(3)
        slot = j.home.world.submit(PROMPTS[0], limit=110, trace=True, ignore_eos=True)
        j.turns(2)
        j.until(lambda: j.home.world.baton(slot).owner == 1)
        for _ in range(20):
            j.now += 0.05
            j.far.port.take_in(j.now)  # what comes is taken in, and pings are answered
            j.far.outbox.flush()
            j.far.port.tend(j.now)
            j.home.turn(j.now)
        assert j.home.cloud.connected
        j.run(slot)
        assert check_alone(j, slot, keeps=False) >= 1
        assert 1 in j.home.world.outcome(slot).sources
        assert j.home.table.dropped >= 1, "the answer that came too late"
        j.check_nothing_held()


def test_a_deadline_is_kept_while_the_far_side_is_away() -> None:
    with joined(policy="wait", router=ROUTER) as j:
        slot = j.home.world.submit(PROMPTS[0], limit=60, entry=1, ignore_eos=True)
        j.network.up = False
        j.network.cut()
        j.turns(5)
        held = j.home.table.held[slot.gen]
        params = RequestParams(sampling=held.params.sampling, deadline_ns=1)
        held.params = params
        j.turns(3)
        assert j.home.world.baton(slot).finish is Finish.ABORT


def test_a_model_that_is_lost_there_is_out_of_reach_here() -> None:
    with joined(policy="degrade", router=ROUTER) as j:
        j.turns(3)
        slots = submit_traced(j, 2)
        j.turns(8)
        j.far.status = "its model could not be started again"
        j.turns(3)
        j.turn(1.2 * HEARTBEAT_S)
        assert j.home.world.slab.workers[1].get("reach") == Reach.ALONE
        assert "could not be started again" in j.home.cloud.reason
        j.run(*slots)
        j.far.status = ""
        j.turns(5)
        assert j.home.reach.reachable


def test_traces_and_log_probabilities_travel() -> None:
    with joined(router=ROUTER) as j:
        j.turns(3)
        world = j.home.world
        slot = world.submit(PROMPTS[0], limit=40, trace=True, tops=2, ignore_eos=True)
        j.run(slot)
        slab, prompt = world.slab, len(PROMPTS[0])
        params = RequestParams(sampling=SamplingParams(), trace=True, tops=2)
        assert read_records(slab, slot.index, params, prompt, range(prompt, 40)) is not None
        records = AnnotationBook(slab, slot.index, first=prompt, tops=2).read(prompt, 40)
        row, sources = world.outcome(slot).row, world.outcome(slot).sources
        for record, token, source in zip(records, row[prompt:], sources, strict=True):
            assert token == record.top_ids[0], source
            assert record.logprob == pytest.approx(record.top_logprobs[0])
        arrivals = [record.handoff_us for record in records]
        moves = [n for n in range(1, len(sources)) if sources[n] == 1 and sources[n - 1] == 0]
        assert moves and all(arrivals[n] is not None for n in moves)
