"""Two hosts over a network that breaks: every answer is that of a plain loop on one host."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.conftest import FULL
from tests.edge.link.joined import USER, Joined, joined
from tests.workers.fakes import EOS, hash_route, reference, router_class
from trserve.edge.listener import Received
from trserve.edge.wire import FrameType
from trserve.ipc.baton import Finish, SlotState

DECIDE = hash_route(1, 40)
ROUTER = router_class(DECIDE)
KEEPING = router_class(DECIDE, keeps=lambda model, row: True)
EXAMPLES = settings(max_examples=300 if FULL else 8, deadline=None)
PROMPTS = [[n + 1, 9, n * 7 % 60, 4, 33] * (1 + n % 3) for n in range(6)]


def submit_all(j: Joined, count: int, limit: int = 40, **more: object) -> list:
    return [j.home.world.submit(PROMPTS[n], limit=limit, **more) for n in range(count)]


def check(j: Joined, slots: list, limit: int = 40, keeps=None, entry: int = 0) -> None:
    for n, slot in enumerate(slots):
        expected = reference(
            PROMPTS[n], limit=limit, models=2, decide=DECIDE, keeps=keeps, entry=entry
        )
        found = j.home.world.outcome(slot)
        assert (found.row, found.sources) == (expected.row, expected.sources)
        assert found.finish is expected.finish


@pytest.mark.parametrize("entry", [0, 1])
@pytest.mark.parametrize("keeping", [False, True])
def test_what_two_hosts_write_is_what_one_would(entry: int, keeping: bool) -> None:
    with joined(router=KEEPING if keeping else ROUTER) as j:
        slots = submit_all(j, 4, entry=entry)
        j.run(*slots)
        keeps = (lambda model, row: True) if keeping else None
        check(j, slots, keeps=keeps, entry=entry)
        j.check_nothing_held()
        assert j.home.table.dropped == j.far.port.bad_frames == j.far.sessions.stale == 0
        assert j.home.cloud.counts.needs == 0


def test_only_the_suffix_travels() -> None:
    with joined(router=ROUTER, row_tokens=200) as j:
        prompt = [5] * 100
        slot = j.home.world.submit(prompt, limit=180, ignore_eos=True)
        j.run(slot)
        counts = j.home.cloud.counts
        assert counts.contacts == 1 and counts.handoffs >= 10
        assert (counts.handoff_bytes + counts.answer_bytes) / counts.handoffs <= 200
        resident = j.far.world.workers[1].runner.batches
        assert sum(sum(b) for b in resident) < 2 * 180, "the suffix is appended, not the row"


@EXAMPLES
@given(st.integers(0, 2**32))
@example(285)  # the last frame before a break is one that says that a request is over
def test_connections_that_break_at_any_time_change_nothing(seed: int) -> None:
    rng = Random(seed)
    with joined(router=ROUTER, edge_slots=rng.choice([2, 4])) as j:
        slots = submit_all(j, 4, limit=30)
        for _ in range(rng.randrange(1, 6)):
            j.turns(rng.randrange(1, 25))
            if rng.random() < 0.3:
                j.network.to_port += [rng.choice(j.network.to_port)] if j.network.to_port else []
            j.network.cut()
        j.run(*slots, turns=20_000)
        check(j, slots, limit=30)
        j.check_nothing_held()


def test_that_a_request_is_over_is_heard_though_the_connection_breaks_then() -> None:
    """Nothing else of it is said afterwards, and its blocks are not to wait for a long silence."""
    with joined(router=ROUTER) as j:
        slots = submit_all(j, 2, limit=30)

        def end_leaves() -> bool:
            j.now += 0.001
            j.home.turn(j.now)
            if any(frame.frame[0] == FrameType.END for frame in j.network.to_port):
                return True
            j.far.turn(j.now)
            return False

        for _ in range(3):  # the last time one that was said before
            assert any(end_leaves() for _ in range(4000))
            j.network.cut()
        j.run(*slots)
        check(j, slots, limit=30)
        j.check_nothing_held()


@EXAMPLES
@given(st.integers(0, 2**32))
def test_frames_that_come_twice_change_nothing(seed: int) -> None:
    rng = Random(seed)
    with joined(router=ROUTER) as j:
        slots = submit_all(j, 3, limit=30)
        for _ in range(400):
            frames = j.network.to_port
            if frames and rng.random() < 0.4:
                frames.insert(rng.randrange(len(frames) + 1), rng.choice(frames))
            for connection in j.network.open.values():
                if connection.inbox and rng.random() < 0.4:
                    connection.inbox.append(rng.choice(connection.inbox))
            if j.network.sent and rng.random() < 0.1:  # one of long ago
                for received in frames[:1]:
                    frames.append(received._replace(frame=rng.choice(j.network.sent[1:] or [b""])))
            j.turn()
        j.run(*slots)
        check(j, slots, limit=30)
        assert j.home.world.workers[0].table.resident == {}


def test_processes_that_die_and_come_back_change_nothing() -> None:
    for victim in ("agent", "port"):
        with joined(router=ROUTER) as j:
            slots = submit_all(j, 4)
            for _ in range(4):
                j.turns(9)
                j.network.cut()
                if victim == "agent":
                    j.home.cloud.close()
                    j.home.start_agent(j.now)
                else:
                    j.far.start_port()
            j.run(*slots, turns=20_000)
            check(j, slots)


def test_sessions_that_lose_their_slot_are_asked_for_their_tokens_again() -> None:
    with joined(router=ROUTER, edge_slots=1) as j:
        slots = submit_all(j, 3)
        j.run(*slots, turns=20_000)
        check(j, slots)
        assert j.far.sessions.evicted and j.home.cloud.counts.needs


def test_what_waits_for_a_slot_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows beyond what there is room for end their requests; the others are not touched."""
    with joined(router=ROUTER, edge_slots=1, slots=6) as j:
        j.turns(3)
        slots = submit_all(j, 6, limit=30, entry=1)
        j.run(*slots, turns=20_000)
        check(j, slots, limit=30, entry=1)
    monkeypatch.setattr("trserve.edge.port_sessions.MAX_WAITING_TOKENS", 30)
    with joined(router=ROUTER, edge_slots=1, slots=6) as j:
        j.turns(3)
        slots = submit_all(j, 6, limit=30, entry=1)
        j.run(*slots, turns=20_000)
        finishes = [j.home.world.baton(slot).finish for slot in slots]
        assert Finish.WORKER_LOST in finishes and finishes.count(Finish.WORKER_LOST) < 6
        assert len(j.far.sessions._waiting) == 0


def test_requests_are_bounded_and_idle_ones_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ends get lost with connections: what they would have ended must not keep others out."""
    monkeypatch.setattr("trserve.edge.port_sessions.MAX_SESSIONS", 2)
    monkeypatch.setattr("trserve.edge.port_sessions.PortSessions.on_end", lambda *_: None)
    with joined(router=ROUTER, slots=8) as j:
        for _ in range(4):
            slots = submit_all(j, 2)
            j.run(*slots)
            check(j, slots)
            assert j.far.sessions.num_sessions <= 2
        assert j.far.sessions.evicted >= 4


def test_a_request_beyond_the_bound_is_refused_and_not_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trserve.edge.port_sessions.MAX_SESSIONS", 2)
    with joined(router=ROUTER, slots=8) as j:
        j.turns(3)
        slots = submit_all(j, 6, limit=30, entry=1)
        j.run(*slots)
        finishes = [j.home.world.baton(slot).finish for slot in slots]
        assert finishes.count(Finish.WORKER_LOST) == 4 and not j.home.cloud.counts.needs
        assert j.far.port.bad_frames == 0
        slots = submit_all(j, 1)
        j.run(*slots)
        check(j, slots)


def test_a_socket_without_room_delays_and_loses_nothing() -> None:
    with joined(router=ROUTER) as j:
        j.turns(5)
        slots = submit_all(j, 4)
        for _ in range(300):
            j.network.room = 1 if j.network.room <= 0 and int(j.now * 1000) % 5 == 0 else 0
            j.turn()
        j.network.room = 10**9
        j.run(*slots)
        check(j, slots)


def test_a_request_that_is_cancelled_leaves_nothing_there() -> None:
    with joined(router=ROUTER) as j:
        slots = submit_all(j, 4, limit=60, ignore_eos=True)
        j.turns(20)
        for slot in slots:
            j.home.world.slots.cancel(slot)
        j.run(*slots)
        assert all(j.home.world.baton(slot).finish is Finish.ABORT for slot in slots)
        j.check_nothing_held()


def test_prompts_are_computed_before_the_first_visit() -> None:
    with joined(router=ROUTER, early_prefill="idle") as j:
        j.turns(3)
        slots = submit_all(j, 3)
        j.run(*slots)
        check(j, slots)
        assert j.far.world.slab.workers[1].get("early_tokens") > 0
        assert j.home.cloud.counts.contacts == 3
        j.check_nothing_held()


def test_visits_stream_before_they_are_over() -> None:
    """One model alone writes at the far side: its tokens come one by one."""
    with joined(router=ROUTER) as j:
        slot = j.home.world.submit(PROMPTS[0], limit=40, entry=1, pinned=True, ignore_eos=True)
        lengths = set()
        for _ in range(4000):
            j.turn()
            lengths.add(j.home.world.baton(slot).length)
            if j.home.world.baton(slot).state is SlotState.DONE:
                break
        assert len(lengths) > 20
        assert j.home.world.outcome(slot).sources == [1] * (40 - len(PROMPTS[0]))


def test_an_end_is_an_end_at_both_sides() -> None:
    def token(model: int, row) -> int:
        return EOS if model == 1 and len(row) > 12 else 1 + len(row) % 5

    with joined(router=ROUTER, token=token) as j:
        slots = submit_all(j, 4)
        j.run(*slots)
        for n, slot in enumerate(slots):
            expected = reference(PROMPTS[n], limit=40, models=2, decide=DECIDE, token=token)
            assert j.home.world.outcome(slot).row == expected.row
            assert j.home.world.baton(slot).finish is expected.finish
        j.check_nothing_held()


@EXAMPLES
@given(st.integers(0, 2**32))
def test_visits_that_are_sent_twice_are_answered_to_their_end(seed: int) -> None:
    """The second comes when tokens of the first are on their way: none is missing behind them."""
    rng = Random(seed)
    with joined(router=ROUTER, edge_slots=rng.choice([1, 4])) as j:
        slots = submit_all(j, 2, entry=1, pinned=True, ignore_eos=True)
        for _ in range(300):
            handoffs = [f for f in j.network.sent if f[0] == FrameType.HANDOFF]
            if handoffs and j.network.open and rng.random() < 0.2:
                route = next(iter(j.network.open))
                j.network.to_port.append(Received(route, USER, handoffs[-1]))
            j.turn()
        j.run(*slots)
        for n, slot in enumerate(slots):
            assert j.home.world.outcome(slot).sources == [1] * (40 - len(PROMPTS[n]))
