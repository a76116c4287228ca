"""Frames that take longer to arrive than silence is borne, on a network that is slow or stops."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.edge.link.test_sockets import LONG_S
from tests.machine_speed import slowness
from trserve.edge.cloud import Visit
from trserve.edge.curve import read_client_keys, read_server_keys
from trserve.edge.dial import MOST_FRAMES
from trserve.edge.facts import RemoteFacts
from trserve.edge.greeting import Hello, Side
from trserve.edge.keys_command import make_files
from trserve.edge.listener import Listener
from trserve.edge.port import Port
from trserve.edge.tcp_cloud import LOST_AFTER, TcpCloud
from trserve.edge.wire import PROTOCOL_VERSION, Limits
from trserve.params import RequestParams, SamplingParams

TOKENS = 30_000
LIMITS = Limits(2 * TOKENS, 1000, 2)


class Proxy:
    """Passes on so many bytes a second in each direction, or nothing at all."""

    def __init__(self, port: int, up: float, down: float) -> None:
        self._port = port
        self._rates = up, down
        self.stopped = False
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                home = self._listening.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._port))
                self._open += [home, far]
                for ends, rate in zip(((home, far), (far, home)), self._rates, strict=True):
                    threading.Thread(target=self._pass, args=(*ends, rate), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, rate: float) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(max(256, int(rate / 50))):
                while self.stopped:
                    time.sleep(0.01)
                sink.sendall(data)
                time.sleep(len(data) / rate)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in (self._listening, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


class Pair:
    """A home's cloud and a far port with a proxy between them; sessions are only counted.

    Args:
        up_beats, down_beats: heartbeats that the ids of a row take to go over.
    """

    def __init__(self, folder: Path, up_beats: float, down_beats: float) -> None:
        self.beat_s = 0.1 * slowness()
        up, down = (4 * TOKENS / (beats * self.beat_s) for beats in (up_beats, down_beats))
        make_files(folder / "far", folder / "home", "home")
        listener = Listener(
            "127.0.0.1", 0, read_server_keys(str(folder / "far")), LIMITS.frame_bytes
        )
        self.listener, self.visits, self.keys = listener, list[int](), list[bytes]()
        facts = [None, RemoteFacts(max_model_len=2 * TOKENS)]
        self.port = Port(listener, self._side("edge"), facts, LIMITS, lambda model: "", b"far")
        self.port.sessions = self  # type: ignore[assignment]
        self.proxy = Proxy(listener.port, up, down)
        hello = Hello(side=self._side("small"), instance=b"home", model=1, max_model_len=2 * TOKENS)
        address = f"127.0.0.1:{self.proxy.port}"
        self.cloud = TcpCloud(address, read_client_keys(str(folder / "home")), hello, LIMITS)
        self.cloud.start(time.monotonic())

    def _side(self, first: str) -> Side:
        return Side(
            protocol=PROTOCOL_VERSION,
            software="test",
            models=[first, "large"],
            router="none",
            router_texts={},
            vocabulary="v",
            tokenizer_size=1000,
            heartbeat_s=self.beat_s,
        )

    def on_handoff(self, key: bytes, model: int, handoff: Any, now: float) -> None:
        self.visits.append(len(handoff.ids))
        self.keys.append(key)

    def peers(self) -> set[bytes]:
        return set(self.keys)

    def visit(self, tokens: int) -> None:
        row = np.zeros(tokens, np.int32)
        params = RequestParams(sampling=SamplingParams())
        self.cloud.visit(Visit(2, 1, row, tokens, 2 * TOKENS, params, (0, 0)))

    def until(self, condition: Callable[[], Any]) -> float:
        """Seconds that it took."""
        began = time.monotonic()
        while not condition():
            now = time.monotonic()
            assert now < began + 4 * LONG_S, "it never came to that"
            self.port.take_in(now)
            self.port.tend(now)
            self.cloud.poll(now)
            time.sleep(0.002)
        return time.monotonic() - began

    def close(self) -> None:
        self.cloud.close()
        self.proxy.close()
        self.listener.close()


@pytest.fixture
def new_pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(up_beats: float = 1e-6, down_beats: float = 1e-6) -> Pair:
        made.append(Pair(tmp_path, up_beats, down_beats))
        made[0].until(lambda: made[0].cloud.connected)
        return made[0]

    yield make
    for each in made:
        each.close()


def test_a_long_row_arrives_over_a_slow_uplink(new_pair: Callable[..., Pair]) -> None:
    pair = new_pair(up_beats=12)
    pair.visit(TOKENS)
    took_s = pair.until(lambda: pair.visits)
    assert took_s > 2 * LOST_AFTER * pair.beat_s, "nothing was tested"
    assert (pair.visits, pair.cloud.connections) == ([TOKENS], 1)
    assert pair.cloud.greeted


def test_a_long_answer_arrives_over_a_slow_downlink(new_pair: Callable[..., Pair]) -> None:
    pair = new_pair(down_beats=12)
    pair.visit(1)
    pair.until(lambda: pair.visits)
    assert pair.port.send(pair.keys[0], b"\xff" * 4 * TOKENS)
    took_s = pair.until(lambda: pair.cloud.counts.bad_frames)  # it came whole, whatever it is
    assert took_s > 2 * LOST_AFTER * pair.beat_s, "nothing was tested"
    assert pair.cloud.connections == 1 and pair.cloud.greeted


def test_a_network_that_stops_within_a_frame_is_noticed(new_pair: Callable[..., Pair]) -> None:
    pair = new_pair(up_beats=12)
    pair.visit(TOKENS)
    far_bytes = pair.listener.bytes_from
    route = next(iter(pair.listener._descriptors))
    pair.until(lambda: far_bytes(route) > TOKENS)
    pair.proxy.stopped = True
    took_s = pair.until(lambda: not pair.cloud.greeted)
    assert took_s < (LOST_AFTER + 3) * pair.beat_s
    pair.until(lambda: not pair.port._by_route)
    pair.proxy.stopped = False
    pair.until(lambda: pair.cloud.connected)


def test_whoever_floods_does_not_keep_a_port_from_all_else(new_pair: Callable[..., Pair]) -> None:
    pair = new_pair()
    count = 0
    while count < 3 * MOST_FRAMES and pair.cloud._send(b"\xff"):
        count += 1
    received: list[int] = []
    deadline = time.monotonic() + LONG_S
    while sum(received) < count and time.monotonic() < deadline:
        received.append(len(list(pair.listener.receive(time.monotonic()))))
        assert received[-1] <= MOST_FRAMES
        assert pair.listener.has_more or received[-1] < MOST_FRAMES or sum(received) == count
