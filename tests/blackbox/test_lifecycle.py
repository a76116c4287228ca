"""How an instance ends, and that nothing of it stays: processes, socket files, shared memory."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.procfs import cpu_seconds
from tests.serverproc import Server, wait_until

ARGS = ("--device", "cpu")
GONE_S = 10.0
COMPLETIONS = "/v1/completions"


def long_request(max_tokens: int) -> dict[str, Any]:
    """Decodes for a while whatever the model says."""
    lengths = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    return {"model": "trserve", "prompt": [5] * 8, **lengths}


def assert_answers(server: Server) -> None:
    assert server.post(COMPLETIONS, long_request(4), timeout_s=20.0)["choices"]


@pytest.fixture
def bystander() -> Iterator[Server]:
    """A second instance beside the one that ends; it must not notice."""
    with Server(ARGS) as running:
        before = running.children()
        yield running
        assert_answers(running)
        assert running.children() == before, "a process of the other instance was replaced"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_polite_end_leaves_nothing(number):
    with Server(ARGS) as server:
        assert_answers(server)
        assert server.leftovers().processes, "the harness must see what is there"
        server.send_signal(number)
        assert server.wait() == 0
        assert not server.wait_gone(GONE_S)
        assert server.stdout == [server.ready_line]


def test_sigterm_lets_an_open_stream_finish():
    with Server(ARGS) as server:
        expected = server.post(COMPLETIONS, long_request(300))["choices"][0]["text"]
        stream = server.stream(COMPLETIONS, long_request(300))
        text = next(stream)["choices"][0]["text"]
        server.send_signal(signal.SIGTERM)
        text += "".join(event["choices"][0]["text"] for event in stream)
        assert text == expected
        assert server.wait() == 0
        assert not server.wait_gone(GONE_S)


def test_a_second_signal_forces_the_end():
    with Server(ARGS) as server:
        # Nothing is below this threshold: every token costs a hop, so the stream lasts.
        body = long_request(900) | {"trserve": {"router": {"tau": 0.0}}}
        stream = server.stream(COMPLETIONS, body)
        next(stream)
        server.send_signal(signal.SIGINT)
        time.sleep(0.05)
        assert server.process.poll() is None, "the open stream was not waited for"
        server.send_signal(signal.SIGINT)
        assert server.wait() == 128 + signal.SIGINT
        assert not server.wait_gone(GONE_S)


def test_death_of_the_launcher_takes_everything_with_it(bystander):
    with Server(ARGS, runtime=bystander.runtime) as server:
        before = set(bystander.leftovers().files)
        assert_answers(server)
        assert len(server.children()) > len(server.models)
        server.kill()
        left = server.wait_gone(GONE_S)
        assert not left.processes
        assert not left.shared_memory
        # Both share a directory for temporary files, as two servers on one machine do.
        assert set(left.files) <= before


def test_next_start_sweeps_what_a_killed_instance_left():
    """With every process killed at once nobody could clean up: the next start does."""
    with Server(ARGS) as dead:
        others = set(dead.runtime.rglob("*"))
        dead.kill_all()
        assert not wait_until(lambda: dead.leftovers().processes, lambda left: not left, GONE_S)
        assert not dead.leftovers().shared_memory
        with Server(ARGS, runtime=dead.runtime) as successor:
            assert_answers(successor)
            assert not [path for path in others if path.exists()]
            assert successor.stop() == 0
        assert not dead.wait_gone(GONE_S)


class Clients:
    """Long requests, half of them streamed, whose clients may go away."""

    COUNT = 16

    def __init__(self, server: Server) -> None:
        self.server = server
        # Nothing is below this threshold: the SLM hands over at once and stays pending.
        body = long_request(480) | {"trserve": {"router": {"tau": 0.0}}}
        self.streams = [server.stream(COMPLETIONS, body) for _ in range(self.COUNT // 2)]
        self.sockets = [_post_only(server, body) for _ in range(self.COUNT // 2)]
        for stream in self.streams:
            next(stream)

    def leave(self) -> None:
        for stream in self.streams:
            stream.close()
        for waiting in self.sockets:
            waiting.close()


def _post_only(server: Server, body: dict[str, Any]) -> socket.socket:
    """Sends a request and reads nothing."""
    address = urlsplit(server.url)
    raw = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection = socket.create_connection((address.hostname, address.port), timeout=10.0)
    connection.sendall(head.encode() + raw)
    return connection


def busy_share(server: Server, seconds: float) -> float:
    """Processor seconds of all processes of the instance, per second of the clock."""
    family = [server.pid, *server.children()]
    start, before = time.perf_counter(), sum(map(cpu_seconds, family))
    time.sleep(seconds)
    return (sum(map(cpu_seconds, family)) - before) / (time.perf_counter() - start)


def test_clients_that_go_away_end_their_work():
    """Seen from outside: a server whose clients left does not compute on, and then serves."""
    with Server(ARGS) as server:
        clients = Clients(server)
        working = busy_share(server, 0.5)
        clients.leave()
        time.sleep(0.5)
        resting = busy_share(server, 1.0)
        assert working > 0.5, "the requests ended too soon to show anything"
        assert resting < 0.1, f"{resting:.2f} processors busy after all clients left"
        assert_answers(server)
        assert not server.stop()


def test_an_idle_server_does_not_spin():
    with Server(ARGS) as server:
        assert_answers(server)
        time.sleep(0.5)
        assert busy_share(server, 2.0) < 0.05
