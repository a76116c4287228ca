"""A gateway that dies: its clients lose their connections, the next one serves, nothing is left."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from bench.soak import open_descriptors, processes, what_is_left
from tests.blackbox.test_worker_death import COMPLETIONS, live
from tests.machine_speed import slowness
from tests.serverproc import Server, concurrently, wait_until

SERVES_WITHIN_S = 2.0
STREAMS = 64
CUT = (http.client.HTTPException, OSError, AssertionError)
"""What a reader of a stream meets whose connection ends in the middle."""


def start_streams(server: Server, count: int = STREAMS, **fields: object) -> list[Iterator[dict]]:
    """Streams on both models that go on for long, each with its first event read."""
    lengths = {"max_tokens": 900, "ignore_eos": True, "temperature": 0}
    router = {"trserve": {"router": {"tau": 0.0}}}

    def begin(index: int) -> Iterator[dict]:
        prompt = [5 + index % 50] * 8
        stream = server.stream(COMPLETIONS, {"prompt": prompt} | lengths | router | fields)
        next(stream)
        return stream

    return concurrently(begin, range(count), count)


def kill_gateway(server: Server) -> float:
    """SIGKILL; returns the time until a new gateway says that it is ready."""
    victim = processes(server.pid)["gateway"]
    started = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: ready(server), bool, 10.0)
    assert processes(server.pid)["gateway"] != victim
    return time.monotonic() - started


def ready(server: Server) -> bool:
    """Whether it is; a connection that the dead gateway held says nothing."""
    try:
        return server.request("GET", "/readyz", timeout_s=5.0).status == 200
    except (OSError, http.client.HTTPException):
        return False


def check_all_free(server: Server) -> None:
    left = wait_until(
        lambda: what_is_left(server.request("GET", "/health").json()), lambda left: not left, 5.0
    )
    assert left == {}


def descriptors(server: Server) -> dict[str, int]:
    return {name: open_descriptors(pid) for name, pid in processes(server.pid).items()}


def answers(server: Server) -> list[dict]:
    body = {"temperature": 0, "max_tokens": 40, "return_token_ids": True, "ignore_eos": True}
    own = {"trserve": {"trace": True, "router": {"tau": 0.05}}}
    choices = [
        server.post(COMPLETIONS, {"prompt": [7 + n, 9, 11]} | body | own)["choices"][0]
        for n in range(4)
    ]
    for choice in choices:
        del choice["trserve"]["handoff_us"]  # each time another
    return choices


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(["--device", "cpu", "--max-requests", "80"]) as running:
        yield running


def test_a_new_one_serves_and_nothing_is_held(server):
    expected = answers(server)
    before = descriptors(server)
    assert sorted(before) == ["gateway", "launcher", "solver", "worker 0", "worker 1"]
    streams = start_streams(server)
    wait_until(lambda: live(server), lambda count: count == STREAMS, 10.0)
    assert kill_gateway(server) < SERVES_WITHIN_S * slowness()
    for stream in streams:
        with pytest.raises(CUT):
            list(stream)
    check_all_free(server)
    assert answers(server) == expected
    # A connection of a client is closed a moment after its answer, one of before the kill too. The
    # solver, which starts beside the ready line, may have been opening its own at first.
    del before["solver"]

    def grown(now: dict[str, int]) -> list[str]:
        return [name for name, count in before.items() if now[name] > count]

    now = wait_until(lambda: descriptors(server), lambda now: not grown(now), 5.0)
    assert not grown(now), (before, now)
    assert "gateway was killed by SIGKILL; 64 requests are cancelled" in server.stderr


def test_clients_that_connect_meanwhile_are_served_and_a_signal_ends_the_server():
    with Server(["--device", "cpu"]) as server:
        host, port = server.url.removeprefix("http://").split(":")
        os.kill(processes(server.pid)["gateway"], signal.SIGKILL)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:  # the socket is the launcher's, and never refuses
            socket.create_connection((host, int(port)), timeout=1.0).close()
            time.sleep(0.01)
        body = {"prompt": [5, 6], "max_tokens": 2, "temperature": 0}
        assert wait_until(lambda: ready(server), bool, 10.0)
        assert server.request("POST", COMPLETIONS, body, timeout_s=10.0).status == 200
        os.kill(processes(server.pid)["gateway"], signal.SIGKILL)
        time.sleep(0.1)
        assert server.stop() == 0  # while the third is starting
        assert not server.wait_gone()


def test_three_deaths_in_a_minute_end_the_server():
    with Server(["--device", "cpu"]) as server:
        kill_gateway(server)
        kill_gateway(server)
        os.kill(processes(server.pid)["gateway"], signal.SIGKILL)
        assert server.wait() == 5
        last = server.stderr.strip().splitlines()[-1]
        assert "gateway was killed by SIGKILL; 3 gateways in a minute" in last
        assert not server.wait_gone()


@pytest.mark.parametrize("model", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_worker_that_dies_with_it_is_replaced_too(model):
    """The next gateway was not there to be told: it finds the worker's state in the slab."""
    with Server(["--device", "cpu", "--max-requests", "16"]) as server:
        expected = answers(server)
        found = processes(server.pid)  # takes longer than many tokens
        streams = start_streams(server, count=8)
        os.kill(found[f"worker {model}"], signal.SIGKILL)
        os.kill(found["gateway"], signal.SIGKILL)
        for stream in streams:
            with pytest.raises(CUT):
                list(stream)
        assert wait_until(lambda: ready(server), bool, 15.0)
        check_all_free(server)
        assert answers(server) == expected
        assert server.stop() == 0
        assert not server.wait_gone()


def test_one_that_hangs_is_killed_and_replaced():
    with Server(["--device", "cpu", "--watchdog-s", "2", "--max-requests", "16"]) as server:
        expected = answers(server)
        victim = processes(server.pid)["gateway"]
        streams = start_streams(server, count=8)
        os.kill(victim, signal.SIGSTOP)
        said = "gateway hung for 2 s and was killed; "
        assert wait_until(lambda: said in server.stderr, bool, 6.0)
        with pytest.raises(CUT):
            list(streams[-1])
        assert wait_until(lambda: ready(server), bool, 10.0)
        assert processes(server.pid)["gateway"] != victim
        check_all_free(server)
        assert answers(server) == expected
        assert server.stop() == 0
        assert not server.wait_gone()
