"""The proxy delays, stalls and stops what goes through it, and changes nothing of it."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from bench.netproxy import NetProxy, obey
from bench.netproxy_check import check
from bench.netproxy_path import PACKET_BYTES, Counts, Path, Relay
from bench.netproxy_weather import Clock, Weather

WAIT_S = 10.0


def arrivals(weather: Weather, sent: list[float], seed: str = "a") -> list[float]:
    clock = Clock(weather, random.Random(seed))
    return [clock.arrival(at, 100) for at in sent]


@contextlib.contextmanager
def echoing() -> Iterator[tuple[str, int]]:
    """A server that sends back what it reads, and ends a connection that was ended."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer(peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            while data := peer.recv(65536):
                peer.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield server.getsockname()[:2]
    finally:
        server.close()


def dialled(proxy: NetProxy) -> socket.socket:
    return socket.create_connection((proxy.host, proxy.port), WAIT_S)


def exactly(peer: socket.socket, count: int) -> bytes:
    got = bytearray()
    while len(got) < count and (data := peer.recv(65536)):
        got += data
    return bytes(got)


def round_trip(peer: socket.socket, message: bytes = b"ping") -> float:
    began = time.perf_counter()
    peer.sendall(message)
    assert exactly(peer, len(message)) == message
    return time.perf_counter() - began


def test_times_are_within_the_jitter_and_in_order() -> None:
    sent = [0.001 * number for number in range(2000)]
    apart = [10.0 * number for number in range(2000)]
    weather = Weather(delay_ms=85, jitter_ms=20)
    took = [at - when for at, when in zip(arrivals(weather, apart), apart, strict=True)]
    assert 0.065 <= min(took) < 0.066
    assert 0.104 < max(took) <= 0.105
    close = arrivals(weather, sent)
    assert close == sorted(close)


def test_a_stalled_packet_holds_up_those_behind_it() -> None:
    weather = Weather(delay_ms=10, stall_chance=0.01, stall_ms=200)
    apart = [float(number) for number in range(20_000)]
    took = [at - when for at, when in zip(arrivals(weather, apart), apart, strict=True)]
    stalled = [each for each in took if each > 0.1]
    assert 150 < len(stalled) < 250
    assert all(each == pytest.approx(0.21, abs=1e-6) for each in stalled)
    every = arrivals(Weather(delay_ms=10, stall_chance=1.0, stall_ms=200), [0.0, 0.5])
    assert every == pytest.approx([0.21, 0.71])
    first = next(at for at in range(20_000) if took[at] > 0.1)
    burst = arrivals(weather, [0.0] * (first + 50))
    assert burst[first - 1] == pytest.approx(0.01)
    assert burst[first:] == pytest.approx([0.21] * 50)


def test_the_same_seed_is_the_same_weather() -> None:
    weather = Weather(delay_ms=10, jitter_ms=5, stall_chance=0.1)
    sent = [0.1 * number for number in range(100)]
    assert arrivals(weather, sent) == arrivals(weather, sent)
    assert arrivals(weather, sent) != arrivals(weather, sent, seed="b")


def test_a_narrow_way_carries_so_much_and_no_more() -> None:
    clock = Clock(Weather(delay_ms=10, kbit_per_s=80), random.Random(0))
    arrived = [clock.arrival(0.0, 1000) for _ in range(3)]
    assert arrived == pytest.approx([0.11, 0.21, 0.31])


def test_planned_outages() -> None:
    path = Path(Weather(outages=((1.0, 2.0),)), began=100.0)
    assert [path.clear_at(at) for at in (100.5, 101.0, 102.9, 103.0)] == [100.5, 103, 103, 103]


def test_its_own_delay_is_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = check(Weather(delay_ms=20, jitter_ms=4))
    assert [row["ok"] for row in rows] == [True, True], rows
    assert all(1.5 < row["jitter_seen_ms"] < 6 for row in rows), rows
    honest = Clock.arrival
    monkeypatch.setattr(Clock, "arrival", lambda *args: honest(*args) + 0.004)
    assert [row["ok"] for row in check(Weather(delay_ms=5))] == [False, False]


def test_every_byte_comes_in_order_through_jitter_stalls_and_a_reset_of_nothing() -> None:
    weather = Weather(delay_ms=2, jitter_ms=2, stall_chance=0.05, stall_ms=20, seed=3)
    sent = random.Random(0).randbytes(400 * PACKET_BYTES)
    with echoing() as target, NetProxy(target, weather) as proxy, dialled(proxy) as peer:
        sender = threading.Thread(target=peer.sendall, args=(sent,))
        sender.start()
        assert exactly(peer, len(sent)) == sent
        sender.join(WAIT_S)
        peer.shutdown(socket.SHUT_WR)
        assert peer.recv(1) == b""
        counts = proxy.counts()
        assert (counts.up_bytes, counts.down_bytes) == (len(sent), len(sent))
        assert counts.up_packets >= 400
        assert counts.stalls > 0
        assert counts.connections == 1
        log = proxy.log()
        assert sum(size for _, up, size in log if up) == len(sent)
        assert sum(size for _, up, size in log if not up) == len(sent)
        assert proxy.log() == []


def test_the_first_bytes_wait_for_the_handshake_and_the_others_do_not() -> None:
    with echoing() as target, NetProxy(target, Weather(delay_ms=30)) as proxy:
        with dialled(proxy) as peer:
            assert round_trip(peer) == pytest.approx(0.12, abs=0.03)
            assert round_trip(peer) == pytest.approx(0.06, abs=0.02)
        proxy.set_weather(Weather(delay_ms=1))
        with dialled(proxy) as peer:
            round_trip(peer)
            assert round_trip(peer) < 0.03


def test_an_outage_holds_back_and_loses_nothing() -> None:
    with (
        echoing() as target,
        NetProxy(target, Weather(delay_ms=1)) as proxy,
        dialled(proxy) as peer,
    ):
        round_trip(peer)
        proxy.outage(0.4)
        began = time.perf_counter()
        with dialled(proxy) as late:
            late.sendall(b"late")
            assert round_trip(peer) >= 0.38
            assert exactly(late, 4) == b"late"
        assert 0.38 <= time.perf_counter() - began < 2.0
        assert round_trip(peer) < 0.3


def test_a_cut_resets_and_refuses_until_it_is_restored() -> None:
    with echoing() as target, NetProxy(target, Weather(delay_ms=1)) as proxy:
        with dialled(proxy) as peer:
            round_trip(peer)
            proxy.cut()
            with pytest.raises(ConnectionResetError):
                peer.recv(1)
        with dialled(proxy) as peer, pytest.raises(ConnectionResetError):
            peer.recv(1)
        proxy.restore()
        with dialled(proxy) as peer:
            round_trip(peer)
            proxy.reset()
            with pytest.raises(ConnectionResetError):
                peer.recv(1)
            assert proxy.counts().connections == 3


def test_nobody_at_the_other_end_is_a_reset() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[:2]
    with (
        NetProxy(free, Weather(delay_ms=1)) as proxy,
        dialled(proxy) as peer,
        pytest.raises(ConnectionResetError),
    ):
        peer.recv(1)


@pytest.mark.parametrize(
    ("weather", "said"),
    [
        (Weather(delay_ms=-1), "negative"),
        (Weather(delay_ms=1, jitter_ms=2), "more than the delay"),
        (Weather(stall_chance=1.5), "1.5"),
        (Weather(kbit_per_s=float("nan")), "finite"),
        (Weather(outages=((1.0, 0.0),)), "outage"),
    ],
)
def test_weather_that_makes_no_sense_is_refused(weather: Weather, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        NetProxy(("127.0.0.1", 1), weather)


@pytest.mark.parametrize(
    "flags", [["--delay-ms=5"], ["--to=nowhere"], ["--check", "--jitter-ms=1"]]
)
def test_flags_that_make_no_sense_end_it(flags: list[str]) -> None:
    command = [sys.executable, "-m", "bench.netproxy", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 2
    assert "error:" in done.stderr


class Idle(Relay):
    """A relay without a loop: what the commands reach of it."""

    def __init__(self) -> None:
        self.path = Path(Weather(), 0.0)
        self._pairs = {}


@pytest.mark.parametrize("command", ["", "fly", "outage soon", "weather {", 'weather {"rain": 1}'])
def test_commands_that_say_nothing_are_answered_with_an_error(command: str) -> None:
    assert "error" in obey(Idle(), command)


def test_commands() -> None:
    relay = Idle()
    assert obey(relay, "cut\n") == {"done": "cut"}
    assert relay.path.blocked
    assert obey(relay, 'weather {"delay_ms": 7}') == {"done": "weather"}
    assert relay.path.weather == Weather(delay_ms=7)
    assert Counts(**obey(relay, "counts")) == Counts()
