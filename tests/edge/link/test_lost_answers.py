"""Answers that are lost, cannot be read or contradict one another stall no request for ever."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.edge.link.joined import Joined, joined
from tests.edge.link.test_hostile import to_home, unreadable
from tests.edge.link.test_joined import DECIDE, EXAMPLES, PROMPTS, ROUTER, check, submit_all
from tests.workers.fakes import VOCAB, hash_token, router_class
from trserve.edge import frames
from trserve.edge.agent import REPEAT_S
from trserve.edge.cloud import STAYS, Answer
from trserve.edge.wire import FrameType
from trserve.ipc.baton import Finish, SlotState

POLICIES = ("wait", "degrade", "fail")
DISCARDING = router_class(DECIDE, keeps=lambda model, row: False)
LEFT_TURNS = 600


def lose(j: Joined, which: Callable[[Answer], bool]) -> int:
    """The answers on their way that are ``which`` get lost; how many."""
    lost = 0
    for connection in j.network.open.values():
        for frame in list(connection.inbox):
            if frame[0] == FrameType.ANSWER and which(
                frames.decode_answer(frame, j.home.cloud._limits)
            ):
                connection.inbox.remove(frame)
                lost += 1
    return lost


def lose_one(j: Joined, which: Callable[[Answer], bool]) -> None:
    for _ in range(LEFT_TURNS):
        j.turn()
        if lose(j, which):
            return
    raise AssertionError("no such answer")


def to_the_end(j: Joined, *slots: Any, step_s: float = 0.1) -> None:
    """In steps that leave time for what is done only once in a while."""
    world = j.home.world
    for _ in range(LEFT_TURNS):
        if all(world.baton(slot).state is SlotState.DONE for slot in slots):
            return
        j.turn(step_s)
    raise AssertionError("a request came to no end")


def check_alone(j: Joined, slot: Any, begin: int, limit: int = 40) -> None:
    """Every token from ``begin`` on is model 1's, of the row before it."""
    found = j.home.world.outcome(slot)
    assert found.finish is Finish.LENGTH and len(found.row) == limit
    for end in range(begin, limit):
        assert found.row[end] == hash_token(1, found.row[:end]), end


def pinned(j: Joined, **more: Any) -> Any:
    j.turns(3)
    return j.home.world.submit(PROMPTS[0], limit=40, entry=1, pinned=True, ignore_eos=True, **more)


def handoffs(j: Joined) -> list[frames.Handoff]:
    found = [frame for frame in j.network.sent if frame[0] == FrameType.HANDOFF]
    return [frames.decode_handoff(frame, j.far.port._limits) for frame in found]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [5, 6, 20, 39])
def test_one_that_is_lost_is_asked_for_again(policy: str, length: int) -> None:
    with joined(policy=policy, router=ROUTER) as j:
        slot = pinned(j)
        lose_one(j, lambda answer: answer.start >= length)
        to_the_end(j, slot)
        check_alone(j, slot, len(PROMPTS[0]))
        assert j.home.world.outcome(slot).hops == 0, "it is the same visit"
        j.check_nothing_held()


@pytest.mark.parametrize("policy", POLICIES)
@EXAMPLES
@given(seed=st.integers(0, 2**32))
def test_any_that_are_lost_change_nothing(policy: str, seed: int) -> None:
    rng = Random(seed)
    with joined(policy=policy, router=ROUTER) as j:
        j.turns(3)
        slots = submit_all(j, 3, limit=30)
        for _ in range(200):
            lose(j, lambda answer: rng.random() < 0.1)
            j.turn(rng.choice([0.001, 0.3]))
        to_the_end(j, *slots)
        check(j, slots, limit=30)
        j.check_nothing_held()


def test_the_last_of_a_visit_is_asked_for_again() -> None:
    with joined(router=ROUTER) as j:
        j.turns(3)
        (slot,) = submit_all(j, 1)
        for _ in range(3):
            lose_one(j, lambda answer: answer.destination != STAYS)
            j.turns(12, step_s=REPEAT_S / 10)
        to_the_end(j, slot)
        check(j, [slot])
        assert j.network.dialled == 1


def test_one_behind_which_others_come_is_missed_at_once() -> None:
    with joined(router=ROUTER) as j:
        slot = pinned(j)
        j.turns(4)
        j.turn(1.5)
        lose_one(j, lambda answer: answer.start >= 10)
        began = j.now
        j.run(slot)
        check_alone(j, slot, len(PROMPTS[0]))
        assert j.now < began + 1.0


@pytest.mark.parametrize("contradicted", [False, True])
def test_the_scores_of_a_prompt_that_are_lost_come_again(contradicted: bool) -> None:
    """The far side scores it for the hop with which a request begins, and for no other."""
    with joined(router=ROUTER) as j:
        slot = pinned(j, tops=2, scores_prompt=True)
        lose_one(j, lambda answer: answer.start == len(PROMPTS[0]))
        if contradicted:
            given = np.array([5], np.int32), np.ones(1, np.uint8)
            to_home(j, frames.encode_answer(Answer(slot.gen, 0, 1, *given)))
        before = len(j.network.answered)
        to_the_end(j, slot)
        check_alone(j, slot, len(PROMPTS[0]))
        later = [frame for frame in j.network.answered[before:] if frame[0] == FrameType.ANSWER]
        answers = [frames.decode_answer(frame, j.home.cloud._limits) for frame in later]
        assert 0 in {a.records.first for a in answers if a.records is not None}


def test_a_far_side_that_takes_its_time_is_left_to_it() -> None:
    """Two visits are with its model, two wait for a slot there: they keep their places."""
    with joined(router=ROUTER, edge_slots=2) as j:
        j.turns(3)
        slots = submit_all(j, 4, entry=1, pinned=True, ignore_eos=True)
        j.turn()
        worker = j.far.world.workers[1]
        turn, worker.turn = worker.turn, lambda: None
        waiting = []
        j.turn()
        for _ in range(300):
            j.turn(0.1)
            waiting.append(list(j.far.sessions._waiting))
        told = handoffs(j)
        assert {handoff.hop for handoff in told} == {0}
        assert 4 * (1 + 4) <= len(told) <= 4 * (1 + 6)
        assert sum(len(handoff.ids) > 0 for handoff in told) == 4, "tokens travel once"
        assert waiting[0] == waiting[-1] and len(waiting[0]) == 2
        worker.turn = turn
        to_the_end(j, *slots)
        for n, slot in enumerate(slots):
            check_alone(j, slot, len(PROMPTS[n]))
        assert j.home.cloud.counts.needs == j.far.sessions.stale == 0


def test_who_is_left_alone_for_a_while_keeps_what_it_has() -> None:
    """A visit that is said again would be taken back there, as none is sent meanwhile."""
    with joined(policy="degrade", timeout_s=20.0, router=ROUTER) as j:
        slot = pinned(j)
        j.turns(2)
        j.far.world.workers[1].turn = lambda: None
        j.turns(3)
        j.home.reach.rest(j.now, 20.0)
        before = len(handoffs(j))
        for _ in range(150):
            j.turn(0.1)
        assert slot.gen in j.home.table.held and len(handoffs(j)) == before


def forge(j: Joined, slot: Any, count: int) -> int:
    """Put tokens that the far side has not written before what it says; where the row ends then."""
    held = j.home.table.held[slot.gen]
    given = np.full(count, 7, np.int32), np.ones(count, np.uint8)
    answer = Answer(slot.gen, held.hop, held.length, *given)
    next(iter(j.network.open.values())).inbox.insert(0, frames.encode_answer(answer))
    return held.length + count


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_far_side_that_contradicts_itself_goes_on_from_the_homes_row(
    policy: str, count: int
) -> None:
    with joined(policy=policy, router=ROUTER) as j:
        slot = pinned(j)
        j.turns(6)
        assert any(connection.inbox for connection in j.network.open.values())
        end = forge(j, slot, count)
        to_the_end(j, slot)
        check_alone(j, slot, end)
        assert j.home.world.outcome(slot).hops == 1, "its answers to the old row came too late"
        j.check_nothing_held()


def test_whoever_succeeds_an_agent_knows_the_hop_that_the_far_side_knows() -> None:
    with joined(router=ROUTER) as j:
        slot = pinned(j)
        j.turns(6)
        end = forge(j, slot, 2)
        send, said = j.home.cloud.visit, []

        def visit(given: Any) -> None:
            said.append((given.hop, j.home.world.baton(slot).hop))
            send(given)

        j.home.cloud.visit = visit
        j.until(lambda: bool(said))
        assert said == [(1, 1)]
        j.turn()
        j.network.cut()
        j.home.cloud.close()
        j.home.start_agent(j.now)
        to_the_end(j, slot)
        check_alone(j, slot, end)


@pytest.mark.parametrize("seed", range(12))
def test_what_a_visit_committed_counts_although_it_had_to_begin_there_again(seed: int) -> None:
    """Of hops that commit nothing two in a row are one too many, and this one committed."""
    rng = Random(seed)
    with joined(router=DISCARDING) as j:
        j.turns(3)
        slots = submit_all(j, 4)
        for _ in range(rng.randrange(1, 6)):
            j.turns(rng.randrange(1, 15))
            j.network.cut()
            j.far.start_port()
        j.run(*slots, turns=20_000)
        check(j, slots, keeps=lambda model, row: False)


def test_one_that_cannot_be_read_and_is_not_waited_for_is_no_frame() -> None:
    with joined(router=ROUTER) as j:
        slot = pinned(j)
        j.turn()
        whole = unreadable(j, slot)
        other = frames.decode_answer(whole[:-4] + bytes(4), j.home.cloud._limits)
        given = other._replace(ids=np.array([VOCAB], np.int32))
        to_home(j, frames.encode_answer(given._replace(session=slot.gen + 1)))
        to_home(j, frames.encode_answer(given._replace(hop=9)))
        to_home(j, whole[:20])
        j.home.agent.turn(j.now)
        assert (j.home.cloud.counts.bad_frames, j.home.table.dropped) == (3, 0)
