"""Ids by NCCL between two hosts, over an emulated communicator: tokens, order, and what fails."""

from __future__ import annotations

import gc
import os
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
from tests.edge.link.test_joined import ROUTER, check, submit_all
from tests.ipc.device.emulated_communicator import (
    EARLY_SENDS,
    PARTIAL,
    STALL,
    EmulatedCommunicators,
)
from trserve.edge import frames, nccl_cloud, nccl_frames
from trserve.edge.listener import Received
from trserve.edge.nccl_cloud import NcclCloud
from trserve.edge.nccl_exchange import Exchange
from trserve.edge.nccl_port import NcclPort
from trserve.edge.nccl_side import NcclSide
from trserve.edge.wire import FrameType
from trserve.ipc.device.cpu_device import CpuDevice

EXAMPLES = settings(max_examples=100 if FULL else 6, deadline=None)
TIMEOUT_S = 0.3
PATIENCE_S = 10.0
LIMITS = frames.Limits(row_tokens=64, tokenizer_size=1000, models=3)


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
    api, before = CpuDevice(), set(threading.enumerate())
    made = EmulatedCommunicators(api)
    sides = tuple(NcclSide(api, made, name="emulated nccl", timeout_s=timeout_s) for _ in "ab")
    with joined(router=ROUTER, nccl=sides, **given) as j:
        found = Hosts(j, made, sides)
        try:
            yield found
        finally:  # also where hypothesis gives an example up
            found.cloud.close()
            found.port.close()
            made.close()
        await_ended(before)
        early = [file.words[EARLY_SENDS] for file in made.files]
        assert not any(early), "sent before the receive was posted"


def await_ended(before: set[threading.Thread]) -> None:
    """No thread of a connection outlives its side: one that waits for a message would for ever."""
    ours = ("nccl-hosts", "link-watchdog")
    deadline = time.monotonic() + PATIENCE_S
    while left := [t for t in set(threading.enumerate()) - before if t.name in ours]:
        assert time.monotonic() < deadline, left
        time.sleep(0.001)


def threads(exchanges: list[Exchange]) -> list[threading.Thread]:
    """Of these alone: those of connections that ended before they were up may sit in a join."""
    found = [d._thread for each in exchanges for d in (each._sending, each._receiving)]
    return [thread for thread in found if thread is not None]


def handoff(session: int, hop: int) -> bytes:
    ids = np.arange(3, dtype=np.int32)
    return frames.encode_handoff(frames.Handoff(session, hop, 10, ids, (10, 10, 10)))


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


def test_closing_leaves_no_thread_and_no_descriptor() -> None:
    def left() -> tuple[int, int]:
        gc.collect()
        links = [t for t in threading.enumerate() if t.name in ("link-watchdog", "nccl-hosts")]
        return len(links), len(os.listdir("/proc/self/fd"))

    before = left()
    for _ in range(2):
        with hosts() as h:
            h.come_up()
        del h
    deadline = time.monotonic() + PATIENCE_S
    while any(count > least for count, least in zip(left(), before, strict=True)):
        assert time.monotonic() < deadline, (left(), before)
        time.sleep(0.02)


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
    side.close()
    said = [r.getMessage() for r in caplog.records if "ids travel by tcp" in r.getMessage()]
    assert len(said) == 1
    assert ("whoever dials has no --link nccl" if lacking == 0 else "it has no") in said[0]


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
