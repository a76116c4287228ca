"""One connection's exchange: order, what fails beside it, what closing waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.edge.link.test_nccl_between_hosts import (
    LIMITS,
    PATIENCE_S,
    handoff,
    hosts,
)
from tests.ipc.device.emulated_communicator import (
    STALL,
    EmulatedCommunicators,
)
from trserve.edge import frames, nccl_frames, nccl_port
from trserve.edge.nccl_exchange import Exchange
from trserve.edge.nccl_side import NcclSide
from trserve.edge.wire import FrameError, FrameType
from trserve.ipc.device.cpu_device import CpuDevice


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
    side.close()


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
    side.close()


def test_a_failure_beside_a_frame_that_became_whole_is_noticed_at_once() -> None:
    """The ring that told of both is silenced already."""
    api = CpuDevice()
    side = NcclSide(api, EmulatedCommunicators(api), name="emulated nccl")
    exchange = Exchange.open(side, "x")
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
    side.close()


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
    side.close()


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
