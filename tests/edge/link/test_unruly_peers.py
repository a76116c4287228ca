"""Greetings, numbers and silences of an authorised peer that nobody expected."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.edge.link.joined import HEARTBEAT_S, Joined, joined, side
from tests.edge.link.test_hostile import settled, to_home, to_port, words_of
from tests.edge.link.test_joined import PROMPTS, ROUTER, check, submit_all
from tests.workers.fakes import EOS, VOCAB
from trserve.edge import frames, greeting, port_sessions
from trserve.edge.cloud import Answer, Records, Visit
from trserve.edge.frames import Contact, Handoff, Need
from trserve.edge.outgoing import Outgoing
from trserve.edge.port import MAX_PEERS
from trserve.edge.port_sessions import IDLE_S
from trserve.edge.tcp_cloud import MAX_BAD_FRAMES
from trserve.edge.wire import FrameType
from trserve.grammar_limits import MAX_GRAMMAR_BYTES
from trserve.ipc.baton import MAX_HOP, Finish, unpack
from trserve.params import RequestParams, SamplingParams, encode_params, pack_grammar

SAMPLING = SamplingParams(ignore_eos=True)


def hello(**changes: Any) -> bytes:
    """A greeting that would do, but for ``changes``."""
    given = {"side": side(), "instance": b"new", "model": 1, "max_model_len": 64}
    return greeting.encode(FrameType.HELLO, greeting.Hello(**(given | changes)))


def visit_of(session: int = 99, hop: int = 1, limit: int = 40, **params: Any) -> bytes:
    """A first contact."""
    given = RequestParams(sampling=params.pop("sampling", SAMPLING), **params)
    contact = Contact(2, limit, encode_params(given))
    ids = np.array([1, 2], np.int32)
    return frames.encode_handoff(Handoff(session, hop, 0, ids, (0, 0), contact=contact))


def take_in(j: Joined) -> None:
    j.far.port.take_in(j.now)
    j.far.outbox.flush()


def refusals(j: Joined) -> list[str]:
    connection = next(iter(j.network.open.values()))
    return [greeting.decode(f, str) for f in connection.inbox if f[0] == FrameType.REFUSED]


@pytest.mark.parametrize("model", [70_000, -70_000, 2**40])
def test_a_model_that_nobody_has_is_refused(model: int) -> None:
    with joined(router=ROUTER) as j:
        j.turns(3)
        to_port(j, hello(model=model))
        take_in(j)
        assert any(str(model) in why for why in refusals(j))


def test_what_a_peer_says_of_itself_is_one_line_of_the_log(caplog: Any) -> None:
    with joined(router=ROUTER) as j:
        j.turns(3)
        to_port(j, hello(side=side(router="r\n\x1b[31mtrserve: all is well" + "x" * 5000)))
        take_in(j)
        (record,) = [each for each in caplog.records if "refused" in each.getMessage()]
        assert record.getMessage().isprintable() and len(record.getMessage()) < 1000


def test_a_refusal_is_one_line_of_the_homes_log_too() -> None:
    with joined(router=ROUTER) as j:
        j.turns(3)
        to_home(j, greeting.encode(FrameType.REFUSED, "no\n\x1b[31mtrserve: all is well"))
        j.home.agent.turn(j.now)
        assert j.home.cloud.refused and j.home.cloud.reason.isprintable()


def test_greetings_again_and_again_leave_room_for_others() -> None:
    """One connection is one peer: who greets as another is no longer who it was."""
    with joined(router=ROUTER) as j:
        j.turns(3)
        for number in range(MAX_PEERS + 8):
            to_port(j, hello(instance=b"%d" % number))
        take_in(j)
        assert sum(bool(peer.route) for peer in j.far.port._peers.values()) == 1
        j.turn(100.0)  # the next look at who is gone
        j.turns(3, step_s=1.0)
        for connection in j.network.open.values():
            connection.inbox.clear()
        to_port(j, hello(instance=b"one more"))
        take_in(j)
        assert refusals(j) == []


def test_frames_of_a_connection_that_was_given_up_are_no_offence() -> None:
    """What a network held back comes after the port has given the connection up as silent."""
    with joined(router=ROUTER) as j:
        slot = settled(j)
        route = next(iter(j.network.open))
        j.now += 4 * HEARTBEAT_S
        j.far.port.tend(j.now)
        before = words_of(j)
        for number in range(2 * MAX_BAD_FRAMES):
            to_port(j, frames.encode_number(FrameType.PING, number), route)
        take_in(j)
        assert j.network.barred == [] and words_of(j) == before
        j.until(lambda: j.home.cloud.connected)
        j.run(slot)


def test_answers_for_a_home_that_is_gone_are_made_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    real = port_sessions.encode_answer
    monkeypatch.setattr(port_sessions, "encode_answer", lambda a: made.append(a) or real(a))
    with joined(router=ROUTER) as j:
        slot = settled(j)
        take_in(j)
        j.now += 4 * HEARTBEAT_S
        j.far.port.tend(j.now)
        for _ in range(5):
            j.far.world.workers[1].turn()
            j.far.sessions.look()
        assert made == []
        j.until(lambda: j.home.cloud.connected)
        j.run(slot)
        assert made


def test_a_connection_is_its_keys_alone() -> None:
    """Whoever comes by a name that was another's must greet first."""
    with joined(router=ROUTER) as j:
        slot = settled(j)
        take_in(j)
        sessions = j.far.sessions.num_sessions
        route = next(iter(j.network.open))
        to_port(j, frames.encode_number(FrameType.END, slot.gen), route)
        j.network.to_port[-1] = j.network.to_port[-1]._replace(user="cd" * 32)
        take_in(j)
        assert j.far.sessions.num_sessions == sessions > 0


WORDS = {
    "hops that a word has no room for": visit_of(hop=MAX_HOP),
    "a row that the model has no room for": visit_of(limit=60),
    "a seed below none": visit_of(sampling=SamplingParams(seed=-1)),
    "a top_k of 64 bits": visit_of(sampling=SamplingParams(top_k=2**63)),
    "a min_tokens of 64 bits": visit_of(sampling=SamplingParams(min_tokens=2**63)),
}


@pytest.mark.parametrize("name", WORDS)
def test_numbers_that_a_worker_would_stumble_over_are_refused(name: str) -> None:
    with joined(router=ROUTER) as j:
        slot = settled(j)
        take_in(j)
        j.far.port._facts[1] = greeting.RemoteFacts(max_model_len=50)
        before = words_of(j)
        to_port(j, WORDS[name])
        take_in(j)
        assert j.far.port.bad_frames == 1 and words_of(j) == before
        j.run(slot)


def test_more_annotations_than_one_request_may_have_are_refused() -> None:
    with joined(router=ROUTER) as j:
        j.turns(3)
        j.far.slots.most_pages = 0
        for early in (True, False):
            frame = visit_of(tops=1)
            kind = FrameType.PREFILL if early else FrameType.HANDOFF
            to_port(j, bytes((kind,)) + frame[1:])
        take_in(j)
        (answer,) = [f for f in j.network.answered if f[0] == FrameType.ANSWER]
        found = frames.decode_answer(answer, j.far.port._limits)
        assert found.finish is Finish.WORKER_LOST and not j.far.sessions.num_sessions


def test_a_grammar_that_cannot_be_followed_there_ends_its_request_alone() -> None:
    with joined(router=ROUTER) as j:
        j.turns(3)
        j.far.sessions.grammars = False
        to_port(j, visit_of(grammar=b"x\x9cK\x04\x00\x00b\x00b"))
        take_in(j)
        (answer,) = [f for f in j.network.answered if f[0] == FrameType.ANSWER]
        found = frames.decode_answer(answer, j.far.port._limits)
        assert found.finish is Finish.WORKER_LOST and found.start == 2
        assert not j.far.sessions.num_sessions and j.far.port.bad_frames == 0
        slots = submit_all(j, 2)
        j.run(*slots)
        check(j, slots)


def test_what_is_needed_is_sent_although_it_was_needed_before() -> None:
    """Two visits were on their way when the far side lost the session: it asks for both."""
    outgoing, row = Outgoing(), np.arange(12, dtype=np.int32)
    for have in (0, 5):
        first = Visit(1, 1, row[:8], 4, 40, RequestParams(sampling=SAMPLING), (0, 0))
        later = first._replace(hop=3, row=row)
        outgoing.forget()
        for visit in (first, first, later):
            outgoing.visit = visit
            outgoing.was_sent(outgoing.handoff(visit, b""))
        assert not outgoing.is_needed(Need(1, 1, have)), "that visit is over"
        assert outgoing.is_needed(Need(1, 3, have))
        again = outgoing.handoff(later, b"")
        assert again.start == have and (again.contact is None) == (have > 0)
        outgoing.was_sent(again)
        assert not outgoing.is_needed(Need(1, 3, have)), "it is on its way"


def test_a_visit_that_waits_long_for_its_token_is_not_forgotten() -> None:
    """The model there is busy, or being started again, for longer than idle sessions are kept."""
    with joined(router=ROUTER) as j:
        j.turns(3)
        slot = j.home.world.submit(PROMPTS[0], limit=40, entry=1, pinned=True, ignore_eos=True)
        j.turn()
        take_in(j)
        assert j.far.sessions.num_away == 1
        j.far.sessions.tend(j.now + 2 * IDLE_S)
        assert j.far.sessions.num_away == 1
        j.run(slot)
        j.far.sessions.tend(j.now + 2 * IDLE_S)
        assert j.far.sessions.num_sessions == 0


def test_an_answer_that_nobody_fetches_is_forgotten() -> None:
    with joined(router=ROUTER) as j:
        settled(j)
        take_in(j)
        j.network.up = False
        j.network.cut()
        j.turns(20)
        assert j.far.sessions.num_away == 1
        j.far.sessions.tend(j.now + 2 * IDLE_S)
        assert j.far.sessions.num_sessions == 0


def test_an_end_that_the_tokenizer_has_not_ends_nothing() -> None:
    """A checkpoint may name one; nobody can draw it, and nobody must wait for it."""
    with joined(router=ROUTER) as j:
        j.turns(3)
        ends = (EOS, VOCAB + 7)
        slots = submit_all(j, 2, entry=1, pinned=True, eos_token_ids=ends, min_tokens=3)
        j.run(*slots)
        for n, slot in enumerate(slots):
            found = j.home.world.outcome(slot)
            assert found.sources == [1] * (len(found.row) - len(PROMPTS[n]))
            assert found.finish in (Finish.STOP, Finish.LENGTH) and len(found.sources) > 3
        assert j.far.port.bad_frames == 0


def test_a_visit_that_is_refused_is_not_waited_for() -> None:
    with joined(router=ROUTER) as j:
        j.turns(3)
        slot = j.home.world.submit(PROMPTS[0], limit=40, entry=1, stop_token_ids=(VOCAB,))
        j.run(slot)
        assert j.home.world.baton(slot).finish is Finish.WORKER_LOST
        assert j.far.port.bad_frames == 1


@pytest.mark.parametrize(
    "params",
    [
        {"grammar": pack_grammar(" " * (MAX_GRAMMAR_BYTES + 1))},
        {"sampling": SamplingParams(stop_token_ids=(VOCAB,))},
    ],
)
def test_what_one_client_asks_for_bars_nobody(params: dict[str, Any]) -> None:
    """Its visits are refused, each alone; the others of its host are none the worse."""
    with joined(router=ROUTER) as j:
        j.turns(3)
        sent = range(100, 100 + 2 * MAX_BAD_FRAMES)
        for session in sent:
            frame = visit_of(session=session, **params)
            to_port(j, frame)
            to_port(j, bytes((FrameType.PREFILL,)) + frame[1:])
        take_in(j)
        answers = [f for f in j.network.answered if f[0] == FrameType.ANSWER]
        found = [frames.decode_answer(f, j.far.port._limits) for f in answers]
        assert [(each.session, each.finish) for each in found] == [
            (session, Finish.WORKER_LOST) for session in sent
        ]
        assert j.network.barred == [] and not j.far.sessions.num_sessions
        slots = submit_all(j, 2)
        j.run(*slots)
        check(j, slots)


def test_a_row_that_is_shorter_than_its_prompt_is_refused() -> None:
    """What lies before a request's first annotation is another's."""
    with joined(router=ROUTER) as j:
        j.turns(3)
        to_port(j, visit_of(tops=1))
        take_in(j)
        before = words_of(j)
        for hop in (1, 2):
            ids = np.array([1], np.int32)
            to_port(j, frames.encode_handoff(Handoff(99, hop, 0, ids, (0, 0))))
        take_in(j)
        assert j.far.port.bad_frames == 2 and words_of(j) == before


def test_a_prompt_that_is_to_be_scored_is_not_computed_early() -> None:
    """Who has it first scores it: of one that was computed early nobody wrote the annotations."""
    with joined(router=ROUTER) as j:
        j.turns(3)
        frame = visit_of(tops=1, scores_prompt=True)
        to_port(j, bytes((FrameType.PREFILL,)) + frame[1:])
        take_in(j)
        assert not j.far.sessions.num_sessions and not j.far.port.bad_frames


def test_annotations_of_another_width_harm_nobody() -> None:
    with joined(router=ROUTER) as j:
        j.turns(3)
        slot = j.home.world.submit(PROMPTS[0], limit=40, trace=True, ignore_eos=True)
        j.until(lambda: bool(j.home.table.held))
        held = j.home.table.held[slot.gen]
        given = np.array([5], np.int32), np.ones(1, np.uint8)
        answer = Answer(slot.gen, held.hop, held.length, *given, destination=0, left=(0, 0))
        records = Records(held.length, np.zeros((1, 1), np.int32))
        to_home(j, frames.encode_answer(answer._replace(records=records)))
        j.home.agent.turn(j.now)
        assert not j.home.table.held


def test_slots_of_who_has_gone_are_there_for_others() -> None:
    """Answers that nobody fetches give way; whoever comes back for one is asked for the row."""
    with joined(router=ROUTER, edge_slots=2) as j:
        j.turns(3)
        slots = submit_all(j, 2, entry=1, pinned=True)
        j.turn()
        take_in(j)
        j.network.up = False
        j.network.cut()
        j.turns(60)
        assert j.far.sessions.num_away == 2, "they are answered, and nobody hears it"
        j.network.up = True
        route = b"other"
        j.network.open[route] = SimpleNamespace(inbox=[], failure="")  # type: ignore[assignment]
        to_port(j, hello(instance=b"another"), route)
        to_port(j, visit_of(hop=1), route)
        for _ in range(30):
            j.now += 0.001
            j.far.turn(j.now)
        assert j.far.sessions.evicted == 1
        answers = [f for f in j.network.answered if f[0] == FrameType.ANSWER]
        assert 99 in {frames.decode_answer(f, j.far.port._limits).session for f in answers}
        j.turn(3.0)
        j.run(*slots)


def test_visits_that_commit_nothing_never_run_out_of_hops() -> None:
    """A peer that counts slower than the hops there gets a word that begins anew."""
    with joined(router=ROUTER) as j:
        j.turns(3)
        to_port(j, visit_of(hop=1))
        j.until(lambda: j.far.sessions.num_sessions == 1 and not j.far.sessions.num_away)
        (session,) = j.far.sessions._sessions.values()
        slab, index = j.far.world.slab, session.slot.index
        slab.baton[index] = unpack(slab.baton[index])._replace(hop=MAX_HOP).pack()
        row = slab.tokens[index, : unpack(slab.baton[index]).length].copy()
        to_port(j, frames.encode_handoff(Handoff(99, 2, 0, row, (0, 0))))
        j.until(lambda: session.hop == 2 and not j.far.sessions.num_away)
        assert unpack(slab.baton[session.slot.index]).hop < 100
