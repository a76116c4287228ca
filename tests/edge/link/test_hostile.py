"""Peers that do not behave: nothing of what they send reaches a row, and they are cut off."""

from __future__ import annotations

import math
import zlib
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.edge.link.joined import USER, Joined, joined, side
from tests.edge.link.test_joined import EXAMPLES, PROMPTS, ROUTER, check, submit_all
from tests.edge.link.test_outages import marks
from tests.workers.fakes import VOCAB, hash_route, router_class
from trserve.edge import frames, greeting
from trserve.edge.cloud import STAYS, Answer
from trserve.edge.frames import Contact, Handoff
from trserve.edge.listener import Received
from trserve.edge.tcp_cloud import MAX_BAD_FRAMES
from trserve.edge.wire import FrameType
from trserve.ipc.baton import Finish, SlotState, unpack
from trserve.ipc.layout import PARAMS_BYTES
from trserve.params import RequestParams, SamplingParams, encode_params


def words_of(j: Joined) -> tuple[bytes, ...]:
    """Everything that the two slabs say of requests."""
    found = []
    for slab in (j.home.world.slab, j.far.world.slab):
        found += [bytes(slab.baton), slab.tokens.tobytes(), slab.source.tobytes()]
    return tuple(found)


def to_port(j: Joined, frame: bytes, route: bytes | None = None) -> None:
    route = next(iter(j.network.open)) if route is None else route
    j.network.to_port.append(Received(route, USER, frame))


def to_home(j: Joined, frame: bytes) -> None:
    next(iter(j.network.open.values())).inbox.append(frame)


def settled(j: Joined) -> Any:
    """A request whose visit is under way at a far host that stands still."""
    j.turns(3)
    slot = j.home.world.submit(PROMPTS[0], limit=40, entry=1, ignore_eos=True)
    j.turn()
    assert j.home.world.baton(slot).owner == 1
    return slot


@EXAMPLES
@given(st.lists(st.binary(max_size=120), min_size=1, max_size=14))
def test_random_frames_change_no_row_at_either_side(garbage: list[bytes]) -> None:
    with joined(router=ROUTER) as j:
        settled(j)
        before = words_of(j)
        kept = [g for g in garbage if not g or g[0] not in (FrameType.HELLO, FrameType.PING)]
        for frame in kept:
            to_port(j, frame)
        j.far.port.take_in(j.now)
        j.far.outbox.flush()
        for frame in kept:
            to_home(j, frame)
        j.home.agent.turn(j.now)
        assert words_of(j) == before
        assert j.far.port.bad_frames == len(kept)


def test_who_keeps_sending_what_is_no_frame_is_cut_off() -> None:
    with joined(router=ROUTER) as j:
        settled(j)
        for _ in range(MAX_BAD_FRAMES):
            to_port(j, b"\xffnonsense")
        j.turn()
        assert j.network.barred == [USER]
        j.turn()
        assert not j.home.cloud.connected
        assert j.home.cloud.reason


def test_a_far_side_that_sends_what_is_no_frame_is_left() -> None:
    with joined(router=ROUTER) as j:
        settled(j)
        for _ in range(MAX_BAD_FRAMES):
            to_home(j, frames.encode_number(FrameType.END, 1))
        j.home.agent.turn(j.now)
        assert not j.home.cloud.connected
        assert "sends frames that are none" in j.home.cloud.reason


def test_nothing_is_taken_before_a_greeting() -> None:
    with joined(router=ROUTER) as j:
        settled(j)
        before, sessions = words_of(j), j.far.sessions.num_sessions
        handoff = Handoff(99, 1, 0, np.array([1, 2], np.int32), (0, 0))
        to_port(j, frames.encode_handoff(handoff), route=b"a stranger")
        j.far.port.take_in(j.now)
        assert words_of(j) == before and j.far.port.bad_frames == 1
        assert j.far.sessions.num_sessions == sessions


WRONG = {
    "another hop": {"hop": 7},
    "another start": {"start": 4},
    "too many tokens": {"count": 36},
    "a source that is here": {"sources": 0},
    "a destination that is the model itself": {"destination": 1},
    "an end without its token": {"finish": Finish.STOP},
    "nobody's session": {"session": 1234},
}


@pytest.mark.parametrize("name", WRONG)
def test_an_answer_that_does_not_fit_changes_nothing(name: str) -> None:
    with joined(router=ROUTER) as j:
        slot = settled(j)
        held = j.home.table.held[slot.gen]
        given: dict[str, Any] = {"hop": held.hop, "start": held.length, "destination": 0}
        given |= {"session": slot.gen, "sources": 1, "finish": Finish.NONE, "count": 1}
        given |= WRONG[name]
        count = given["count"]
        answer = Answer(
            session=given["session"],
            hop=given["hop"],
            start=given["start"],
            ids=np.full(count, 5, np.int32),
            sources=np.full(count, given["sources"], np.uint8),
            destination=given["destination"] if not given["finish"] else STAYS,
            finish=given["finish"],
            left=(0, 0),
        )
        before, dropped = words_of(j), j.home.table.dropped
        to_home(j, frames.encode_answer(answer))
        j.home.agent.turn(j.now)
        assert words_of(j) == before
        assert j.home.table.dropped == dropped + 1
        j.run(slot)


def impossible(j: Joined, slot: Any) -> bytes:
    """An answer to the visit under way whose tokens are said to be of the home's own model."""
    held = j.home.table.held[slot.gen]
    ids, sources = np.full(1, 5, np.int32), np.zeros(1, np.uint8)
    answer = Answer(slot.gen, held.hop, held.length, ids, sources, 0, left=(0, 0))
    return frames.encode_answer(answer)


def unreadable(j: Joined, slot: Any) -> bytes:
    """One with a token that there is not."""
    held = j.home.table.held[slot.gen]
    given = np.array([VOCAB], np.int32), np.ones(1, np.uint8)
    return frames.encode_answer(Answer(slot.gen, held.hop, held.length, *given))


KINDS = pytest.mark.parametrize("wrong", [impossible, unreadable])


def say(j: Joined, frame: bytes) -> None:
    """The far side answers so."""
    to_home(j, frame)
    j.home.agent.turn(j.now)


@KINDS
@pytest.mark.parametrize("policy", ["wait", "degrade", "fail"])
def test_who_answers_what_cannot_be_is_asked_again(policy: str, wrong: Any) -> None:
    with joined(policy=policy, router=ROUTER) as j:
        j.turns(3)
        (slot,) = submit_all(j, 1, entry=1)
        j.turn()
        for _ in range(2):
            j.network.sent.clear()
            say(j, wrong(j, slot))
            assert [frame[0] for frame in j.network.sent] == [FrameType.HANDOFF]
        assert (j.home.table.dropped, j.home.cloud.counts.bad_frames) == (2, 0)
        j.run(slot)
        check(j, [slot], entry=1)


@KINDS
@pytest.mark.parametrize("policy", ["wait", "degrade", "fail"])
def test_who_answers_nothing_else_is_done_without(policy: str, wrong: Any) -> None:
    with joined(policy=policy, router=ROUTER) as j:
        slot = settled(j)
        for _ in range(3):
            say(j, wrong(j, slot))
        baton = j.home.world.baton(slot)
        if policy == "degrade":
            assert (baton.state, baton.owner) == (SlotState.LIVE, 0)
        else:
            assert (baton.state, baton.finish) == (SlotState.DONE, Finish.WORKER_LOST)
        j.run(slot)
        j.check_nothing_held()


def test_a_request_comes_to_its_end_beside_a_far_side_that_is_never_right() -> None:
    """Model 0 would hand every token on, and discard its own."""
    with joined(policy="degrade", router=router_class(hash_route(1, 100))) as j:
        j.turns(3)
        slot = j.home.world.submit(PROMPTS[0], limit=40, trace=True, ignore_eos=True)
        words = j.home.world.slab.workers[1]
        outages, asked = words.get("outages"), 0
        for _ in range(2000):
            j.now += 0.001
            j.home.turn(j.now)
            j.network.to_port.clear()
            if slot.gen in j.home.table.held:
                asked += 1
                say(j, impossible(j, slot))
        baton = j.home.world.baton(slot)
        assert (baton.state, baton.finish, baton.length) == (SlotState.DONE, Finish.LENGTH, 40)
        assert 3 <= asked < 40
        assert set(j.home.world.outcome(slot).sources) == {0}
        assert all(marks(j, slot)), "every token was another model's to write"
        assert words.get("outages") > outages, "and its client is told"


PARAMS = {
    "ids beyond the vocabulary": {"stop_token_ids": (VOCAB,)},
    "a bias for no token": {"logit_bias": {-1: 1.0}},
    "a temperature that is none": {"temperature": math.nan},
    "an endless temperature": {"temperature": math.inf},
    "fewer tokens than none": {"min_tokens": -1},
    "a top_p of 0": {"top_p": 0.0},
    "no penalty": {"repetition_penalty": 0.0},
}
BLOBS = {
    **{n: encode_params(RequestParams(sampling=SamplingParams(**p))) for n, p in PARAMS.items()},
    "too many tops": encode_params(RequestParams(sampling=SamplingParams(), tops=21)),
    "a bomb": encode_params(
        RequestParams(sampling=SamplingParams(), grammar=zlib.compress(b"a" * 3_000_000, 9))
    ),
    "a router's value that is none": encode_params(
        RequestParams(sampling=SamplingParams(), router={"tau": math.nan})
    ),
    "no parameters": b"\x93nonsense",
}


@pytest.mark.parametrize("name", BLOBS)
def test_parameters_that_could_harm_a_worker_are_refused(name: str) -> None:
    with joined(router=ROUTER) as j:
        settled(j)
        j.far.port.take_in(j.now)
        j.far.outbox.flush()
        before, sessions = words_of(j), j.far.sessions.num_sessions
        assert len(BLOBS[name]) <= PARAMS_BYTES
        contact = Contact(2, 40, BLOBS[name])
        handoff = Handoff(99, 1, 0, np.array([1, 2], np.int32), (0, 0), contact=contact)
        for early in (False, True):
            to_port(j, frames.encode_handoff(handoff, early=early))
        j.far.port.take_in(j.now)
        j.far.outbox.flush()
        assert j.far.port.bad_frames == 2 and j.far.sessions.num_sessions == sessions
        assert words_of(j) == before


def test_tokens_beyond_an_end_do_not_count() -> None:
    """Whoever commits checks the end, whatever the far side says."""
    with joined(router=ROUTER) as j:
        j.turns(3)
        slot = j.home.world.submit(PROMPTS[0], limit=40, entry=1, stop_token_ids=(9,))
        j.turn()
        held = j.home.table.held[slot.gen]
        ids, sources = np.array([5, 9, 6], np.int32), np.ones(3, np.uint8)
        answer = Answer(slot.gen, held.hop, held.length, ids, sources, 0, left=(0, 0))
        to_home(j, frames.encode_answer(answer))
        j.home.agent.turn(j.now)
        baton = j.home.world.baton(slot)
        assert baton.finish is Finish.STOP and baton.length == len(PROMPTS[0]) + 2


@EXAMPLES
@given(st.integers(0, 2**32))
def test_all_that_was_ever_said_is_said_again(seed: int) -> None:
    """A recording of the whole connection, played again in any order beside the real one."""
    rng = Random(seed)
    with joined(router=ROUTER) as j:
        slots = submit_all(j, 3, limit=30)
        j.turns(60)
        said, heard = list(j.network.sent), list(j.network.answered)
        for _ in range(60):
            if j.network.open:
                to_port(j, rng.choice(said))
                to_home(j, rng.choice(heard))
            j.turn()
        j.run(*slots, turns=20_000)
        check(j, slots, limit=30)


def test_a_version_that_nobody_knows_is_told_so() -> None:
    with joined(router=ROUTER) as j:
        j.turns(3)
        hello = greeting.Hello(side=side(protocol=2), instance=b"new", model=1, max_model_len=64)
        connection = next(iter(j.network.open.values()))
        to_port(j, greeting.encode(FrameType.HELLO, hello))
        j.far.port.take_in(j.now)
        (frame,) = [f for f in connection.inbox if f[0] == FrameType.REFUSED]
        assert "version 2" in greeting.decode(frame, str)
        j.home.agent.turn(j.now)
        assert j.home.cloud.refused and "version 2" in j.home.cloud.reason
        assert unpack(j.home.world.slab.baton[0]).length == 0
