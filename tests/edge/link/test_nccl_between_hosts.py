"""Ids by NCCL between two hosts, over an emulated communicator: tokens, order, and what fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import FULL
from tests.edge.link.joined import USER, Joined, joined
from tests.edge.link.test_frames import answers, handoffs
from tests.edge.link.test_joined import ROUTER, check, submit_all
from tests.ipc.device.emulated_communicator import (
    EARLY_SENDS,
    PARTIAL,
    STALL,
    EmulatedCommunicators,
)
from trserve.edge import frames, nccl_cloud, nccl_frames, nccl_port
from trserve.edge.listener import Received
from trserve.edge.nccl_cloud import NcclCloud
from trserve.edge.nccl_exchange import Exchange
from trserve.edge.nccl_port import NcclPort
from trserve.edge.nccl_side import NcclSide
from trserve.edge.wire import FrameError, FrameType
from trserve.ipc.device.cpu_device import CpuDevice

EXAMPLES = settings(max_examples=100 if FULL else 6, deadline=None)
TIMEOUT_S = 0.3
PATIENCE_S = 10.0


@dataclass
class Hosts:
    """Two joined hosts with one emulated device, and what lies between its communicators."""

    j: Joined
    made: EmulatedCommunicators
    sides: tuple[NcclSide, NcclSide]

    @property
    def cloud(self) -> NcclCloud:
        assert isinstance(self.j.home.cloud, NcclCloud)
        return self.j.home.cloud

    @property
    def port(self) -> NcclPort:
        assert isinstance(self.j.far.port, NcclPort)
        return self.j.far.port

    @property
    def exchanges(self) -> list[Exchange]:
        """Of both sides' connections, as many as there are."""
        here = self.cloud._exchange
        return [*([here] if here else []), *self.port._exchanges.values()]

    def until(self, condition: Callable[[], Any]) -> None:
        """As ``Joined.until``; threads need real time, so turns take some."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "it never came to that"
            self.j.turn(0.0005)
            time.sleep(0.0001)

    def come_up(self) -> None:
        self.until(lambda: len(self.exchanges) == 2 and all(e.is_up for e in self.exchanges))

    def run(self, *slots: Any) -> None:
        baton = self.j.home.world.baton
        self.until(lambda: all(baton(slot).finish for slot in slots))
        self.j.turns(6)

    def stall(self, value: int) -> None:
        """Whether messages stop half-way."""
        for file in self.made.files:
            file.words[STALL] = value


@contextmanager
def hosts(*, timeout_s: float = PATIENCE_S, **given: Any) -> Iterator[Hosts]:
    api = CpuDevice()
    made = EmulatedCommunicators(api)
    sides = tuple(NcclSide(api, made, name="emulated nccl", timeout_s=timeout_s) for _ in "ab")
    with joined(router=ROUTER, nccl=sides, **given) as j:
        found = Hosts(j, made, sides)
        yield found
        assert isinstance(j.far.port, NcclPort)
        j.far.port.close()
        early = [file.words[EARLY_SENDS] for file in made.files]
        assert not any(early), "sent before the receive was posted"


def threads(exchanges: list[Exchange]) -> list[threading.Thread]:
    """Of these alone: those of connections that ended before they were up may sit in a join."""
    found = [d._thread for each in exchanges for d in (each._sending, each._receiving)]
    return [thread for thread in found if thread is not None]


def test_ids_travel_by_nccl_and_tokens_are_those_without() -> None:
    with hosts() as h:
        h.come_up()
        slots = submit_all(h.j, 4)
        h.run(*slots)
        check(h.j, slots)
        counts = h.cloud.counts
        assert counts.nccl_handoffs >= 5 and counts.nccl_answers >= 5
        parted = [f for f in h.j.network.sent if f[0] == FrameType.NCCL_PARTED]
        assert len(parted) == counts.nccl_handoffs
        assert h.j.far.port.bad_frames == counts.bad_frames == h.j.far.sessions.stale == 0
        assert h.j.home.table.dropped == counts.needs == 0
        h.j.check_nothing_held()


def test_what_comes_before_it_is_up_goes_whole() -> None:
    with hosts() as h:
        slots = submit_all(h.j, 3)
        h.run(*slots)
        check(h.j, slots)


@EXAMPLES
@given(st.integers(0, 2**32))
def test_connections_that_break_at_any_time_change_nothing(seed: int) -> None:
    rng = Random(seed)
    with hosts() as h:
        h.come_up()
        slots = submit_all(h.j, 4, limit=30)
        for _ in range(rng.randrange(1, 4)):
            h.j.turns(rng.randrange(1, 25))
            time.sleep(rng.choice([0.0, 0.002]))
            h.j.network.cut()
        h.run(*slots)
        check(h.j, slots, limit=30)
        h.j.check_nothing_held()


def test_a_transfer_that_stops_half_way_costs_the_connection_and_no_token() -> None:
    with hosts(timeout_s=TIMEOUT_S) as h:
        h.come_up()
        h.stall(1)
        slots = submit_all(h.j, 4)
        dialled = h.j.network.dialled
        h.until(lambda: any(file.words[PARTIAL] > 1 for file in h.made.files))
        h.run(*slots)
        check(h.j, slots)
        assert h.j.network.dialled > dialled
        assert not h.exchanges or h.cloud._exchange is None, "tcp alone for a while"
        h.stall(0)
        h.j.check_nothing_held()


def test_a_connection_that_is_lost_amid_a_transfer_leaves_no_thread() -> None:
    with hosts() as h:
        h.come_up()
        h.stall(1)
        slots = submit_all(h.j, 2)
        h.until(lambda: any(file.words[PARTIAL] > 1 for file in h.made.files))
        before = threads(h.exchanges)
        assert len(before) == 4
        h.j.network.cut()
        h.j.turns(3)
        for thread in before:
            thread.join(2.0)
            assert not thread.is_alive()
        h.stall(0)
        h.run(*slots)
        check(h.j, slots)


def test_closing_ends_the_threads_within_a_bound() -> None:
    with hosts() as h:
        h.come_up()
        h.stall(1)
        submit_all(h.j, 2)
        h.until(lambda: any(file.words[PARTIAL] > 1 for file in h.made.files))
        mine, began = threads(h.exchanges), time.monotonic()
        for exchange in h.exchanges:
            exchange.close(1.0)
        assert time.monotonic() - began < 3.0
        assert not any(thread.is_alive() for thread in mine)


def test_a_peer_that_never_posts_costs_the_connection_and_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hosts(timeout_s=TIMEOUT_S) as h:
        h.come_up()
        monkeypatch.setattr(
            "trserve.edge.nccl_directions.Receiving.expect", lambda self, parted: None
        )
        slots = submit_all(h.j, 3)
        dialled = h.j.network.dialled
        h.run(*slots)
        check(h.j, slots)
        assert h.j.network.dialled > dialled
        assert h.cloud.counts.nccl_handoffs == h.cloud.counts.nccl_answers == 0


def test_another_message_than_the_announced_one_is_never_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = nccl_frames.part

    def wrong(number: int, frame: bytes) -> tuple[bytes, bytes] | None:
        parts = part(number, frame)
        return None if parts is None else (parts[0], (part(number + 1, frame) or parts)[1])

    with hosts(timeout_s=TIMEOUT_S) as h:
        h.come_up()
        monkeypatch.setattr("trserve.edge.nccl_frames.part", wrong)
        slots = submit_all(h.j, 3)
        dialled = h.j.network.dialled
        h.run(*slots)
        check(h.j, slots)
        assert h.j.network.dialled > dialled
        assert h.cloud.counts.nccl_answers == 0


def test_it_comes_back_after_its_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_cloud, "PAUSE_S", 0.001)
    with hosts(timeout_s=TIMEOUT_S) as h:
        h.come_up()
        h.cloud._give_up("a test")
        h.j.turns(2, step_s=0.1)
        h.come_up()
        slots = submit_all(h.j, 2)
        h.run(*slots)
        check(h.j, slots)
        assert h.cloud.counts.nccl_handoffs > 0


@pytest.mark.parametrize("lacking", [0, 1])
def test_with_one_side_alone_ids_travel_by_tcp_and_the_log_says_so(
    lacking: int, caplog: pytest.LogCaptureFixture
) -> None:
    api = CpuDevice()
    side = NcclSide(api, EmulatedCommunicators(api), name="emulated nccl")
    with joined(router=ROUTER, nccl=(None, side) if lacking == 0 else (side, None)) as j:
        slots = submit_all(j, 3)
        j.run(*slots)
        check(j, slots)
        assert j.home.cloud.counts.nccl_handoffs == 0
    said = [r.getMessage() for r in caplog.records if "ids travel by tcp" in r.getMessage()]
    assert len(said) == 1
    assert ("whoever dials has no --link nccl" if lacking == 0 else "it has no") in said[0]


def test_frames_of_a_session_keep_their_order_and_others_pass() -> None:
    api = CpuDevice()
    made = EmulatedCommunicators(api)
    side = NcclSide(api, made, name="emulated nccl")
    a, b = (Exchange.open(side, name) for name in "ab")
    assert a is not None and b is not None
    to_b: list[bytes] = []
    to_a: list[bytes] = []
    seen: list[tuple[int, int]] = []

    def say(queue: list[bytes]) -> Callable[[bytes], bool]:
        return lambda frame: not queue.append(frame)  # type: ignore[func-returns-value]

    def note(frame: bytes) -> None:
        found = frames.decode_handoff(frame, LIMITS)
        seen.append((found.session, found.hop))

    def move() -> None:
        for queue, exchange in ((to_b, b), (to_a, a)):
            while queue:
                frame = queue.pop(0)
                if not exchange.takes(FrameType(frame[0]), frame):
                    note(frame)
        a.collect(say(to_b), note)
        b.collect(say(to_a), note)

    def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline
            move()
            time.sleep(0.0005)

    a.begin()
    until(lambda: a.is_up and b.is_up)
    for file in made.files:
        file.words[STALL] = 1
    assert a.send(handoff(1, 1), say(to_b)) and to_b[-1][0] == FrameType.NCCL_PARTED
    for session, hop in ((2, 1), (1, 2), (2, 2), (1, 3)):
        a.send(handoff(session, hop), say(to_b))
        assert to_b[-1][0] == FrameType.HANDOFF, "nothing waits for it to be free"
    for _ in range(20):
        move()
    assert seen == [(2, 1), (2, 2)]
    for file in made.files:
        file.words[STALL] = 0
    until(lambda: len(seen) == 5)
    assert seen[2:] == [(1, 1), (1, 2), (1, 3)]
    # The next may be announced before the last one's end is known here.
    until(lambda: not a._sending.is_busy)
    for hop in range(4, 12):
        until(lambda: not a._sending.is_busy)
        a.send(handoff(1, hop), say(to_b))
        a.send(handoff(1, hop + 100), say(to_b))
    until(lambda: len(seen) == 21)
    wanted = [(1, number) for hop in range(4, 12) for number in (hop, hop + 100)]
    assert seen[5:] == wanted
    for exchange in (a, b):
        exchange.close(1.0)


def handoff(session: int, hop: int) -> bytes:
    ids = np.arange(3, dtype=np.int32)
    return frames.encode_handoff(frames.Handoff(session, hop, 10, ids, (10, 10, 10)))


def test_the_next_message_may_be_announced_before_the_last_is_taken() -> None:
    """Its sender knows of the last one's end first."""
    api = CpuDevice()
    side = NcclSide(api, EmulatedCommunicators(api), name="emulated nccl")
    exchange = Exchange.open(side, "x")
    assert exchange is not None
    exchange._receiving._thread = threading.current_thread()  # as if begun
    parts = [nccl_frames.part(n, handoff(7, n)) for n in (1, 2, 3)]
    first, second, third = [p for p in parts if p is not None]
    assert exchange.takes(FrameType.NCCL_PARTED, first[0])
    assert exchange.takes(FrameType.HANDOFF, handoff(7, 50))
    assert exchange.takes(FrameType.NCCL_PARTED, second[0])
    assert exchange.takes(FrameType.HANDOFF, handoff(7, 60))
    with pytest.raises(FrameError):
        exchange.takes(FrameType.NCCL_PARTED, third[0])
    seen: list[int] = []

    def note(frame: bytes) -> None:
        assert not exchange.takes(FrameType.HANDOFF, frame)
        seen.append(frames.decode_handoff(frame, LIMITS).hop)

    for wanted in ([1, 50], [1, 50, 2, 60]):
        parted = exchange._receiving._expected
        assert parted is not None
        message = (first, second)[parted.number - 1][1]
        exchange._receiving._whole = nccl_frames.whole(parted, message)
        exchange.collect(lambda frame: True, note)
        assert seen == wanted


def test_a_failure_beside_a_frame_that_became_whole_is_noticed_at_once() -> None:
    """The ring that told of both is silenced already."""
    api = CpuDevice()
    exchange = Exchange.open(NcclSide(api, EmulatedCommunicators(api), name="emulated nccl"), "x")
    parts = nccl_frames.part(1, handoff(7, 1))
    assert exchange is not None and parts is not None
    exchange._receiving._thread = threading.current_thread()  # as if begun
    assert exchange.takes(FrameType.NCCL_PARTED, parts[0])
    exchange._receiving._whole = whole = nccl_frames.whole(
        nccl_frames.decode_parted(parts[0]), parts[1]
    )
    exchange._sending._message, exchange._sending.is_over = parts[1], True
    seen: list[bytes] = []
    exchange.collect(lambda frame: True, seen.append)
    assert seen == [whole] and exchange.failure


def test_a_message_that_nobody_aborts_is_given_up_all_the_same() -> None:
    """As where a direction still joins, or the watchdog is stuck within an abort."""
    api = CpuDevice()
    side = NcclSide(api, EmulatedCommunicators(api), name="emulated nccl", timeout_s=0.01)
    exchange, parts = Exchange.open(side, "x"), nccl_frames.part(1, handoff(7, 1))
    assert exchange is not None and parts is not None
    exchange._receiving._thread = threading.current_thread()  # as if begun
    assert exchange.takes(FrameType.NCCL_PARTED, parts[0])
    exchange.collect(lambda frame: True, lambda frame: None)
    assert not exchange.failure
    time.sleep(0.03)
    exchange.collect(lambda frame: True, lambda frame: None)
    assert "overdue" in exchange.failure


class Stuck:
    """An exchange whose threads sit in a join."""

    waited_s = 0.0

    def close(self, wait_s: float = 0.0) -> None:
        time.sleep(wait_s)
        Stuck.waited_s += wait_s


def test_closing_a_port_has_one_bound_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_port, "CLOSE_S", 0.02)
    with hosts() as h:
        stuck: Any = {b"%d" % n: Stuck() for n in range(8)}
        h.port._exchanges.update(stuck)
        h.port.close()
        assert 0 < Stuck.waited_s <= 0.02 and not h.port._exchanges


def test_what_waited_for_a_peer_that_was_cut_off_is_nobodys_fault() -> None:
    with hosts() as h:
        h.come_up()
        ((key, exchange),) = h.port._exchanges.items()
        peer = h.port._peers[key]
        h.port._by_route.pop(peer.route)
        peer.route = b""
        h.port._take_whole(peer, exchange, h.j.now, b"\xff")
        assert h.port.bad_frames == 0


@EXAMPLES
@given(st.lists(st.tuples(st.integers(14, 17), st.binary(max_size=140)), max_size=8), st.data())
def test_frames_of_its_own_that_are_none_change_nothing(
    given: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    with hosts(timeout_s=TIMEOUT_S) as h:
        h.come_up()
        slots = submit_all(h.j, 2, limit=30)
        for kind, body in given:
            h.j.turns(data.draw(st.integers(0, 5)))
            for route, connection in h.j.network.open.items():
                if data.draw(st.booleans()):
                    connection.inbox.append(bytes([kind]) + body)
                else:
                    h.j.network.to_port.append(Received(route, USER, bytes([kind]) + body))
        h.run(*slots)
        check(h.j, slots, limit=30)
        h.j.check_nothing_held()


def test_an_announcement_without_a_message_ends_the_connection_alone() -> None:
    with hosts(timeout_s=TIMEOUT_S) as h:
        h.come_up()
        parts = nccl_frames.part(1, handoff(1, 1))
        assert parts is not None
        (route,) = h.j.network.open
        h.j.network.to_port.append(Received(route, USER, parts[0]))
        dialled = h.j.network.dialled
        h.until(lambda: h.j.network.dialled > dialled)
        slots = submit_all(h.j, 2)
        h.run(*slots)
        check(h.j, slots)


# -- frames --------------------------------------------------------------------------------------


LIMITS = frames.Limits(row_tokens=64, tokenizer_size=1000, models=3)
ENCODED = st.one_of(handoffs().map(frames.encode_handoff), answers().map(frames.encode_answer))


@given(ENCODED, st.integers(0, 2**63))
def test_what_was_parted_is_whole_again(frame: bytes, number: int) -> None:
    parts = nccl_frames.part(number, frame)
    if parts is None:
        return
    parted = nccl_frames.decode_parted(parts[0])
    assert parted.number == number and len(parts[1]) == 4096
    assert nccl_frames.whole(parted, parts[1]) == frame
    assert nccl_frames.session_of(parted.rest) == nccl_frames.session_of(frame)


@given(ENCODED, st.data())
def test_messages_that_were_tampered_with_are_refused(frame: bytes, data: st.DataObject) -> None:
    parts = nccl_frames.part(5, frame)
    if parts is None:
        return
    parted, message = nccl_frames.decode_parted(parts[0]), bytearray(parts[1])
    used = 12 + 4 * parted.num_ids
    at = data.draw(st.integers(0, used - 1).map(lambda n: n if n < 12 else n + 4))
    message[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FrameError):
        nccl_frames.whole(parted, bytes(message))


def refused_or(frame: bytes) -> None:
    for decode in (
        nccl_frames.decode_parted,
        nccl_frames.decode_offer,
        nccl_frames.decode_fault,
        nccl_frames.session_of,
        nccl_frames.ids_behind,
        lambda frame: nccl_frames.part(1, frame),
    ):
        try:
            decode(frame)
        except FrameError:
            continue


@given(st.one_of(st.binary(max_size=200), st.integers(0, 17).map(lambda k: bytes([k]) * 60)))
def test_random_bytes_are_refused(frame: bytes) -> None:
    refused_or(frame)


@given(ENCODED, st.data())
def test_parted_frames_that_were_tampered_with(frame: bytes, data: st.DataObject) -> None:
    parts = nccl_frames.part(1, frame)
    if parts is None:
        return
    changed = bytearray(parts[0])
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    refused_or(bytes(changed))
    refused_or(bytes(changed[: data.draw(st.integers(0, len(changed)))]))
