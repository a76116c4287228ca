"""The control plane: named ends, whole messages, and nobody who waits for the dead."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trserve.ipc.control import GATEWAY_IDENTITY, ControlClient, ControlServer, worker_identity

LONG_S = 10.0


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/c"


@pytest.fixture
def server(endpoint: str) -> Iterator[ControlServer]:
    server = ControlServer(endpoint)
    yield server
    server.close()


def receive(end: ControlServer, count: int) -> list[tuple[str, dict[str, object]]]:
    found: list[tuple[str, dict[str, object]]] = []
    deadline = time.monotonic() + LONG_S
    while len(found) < count and time.monotonic() < deadline:
        found += end.receive_all()
        if len(found) < count:
            # Short, because another call may have consumed the edge.
            select.select([end.fd], [], [], 0.01)
    return found


def test_messages_carry_their_senders_name(server: ControlServer, endpoint: str) -> None:
    names = [worker_identity(0), worker_identity(1), GATEWAY_IDENTITY]
    clients = [ControlClient(endpoint, name) for name in names]
    for client in clients:
        client.send({"type": "hello"})
    assert sorted(receive(server, 3)) == sorted((name, {"type": "hello"}) for name in names)
    for name in names:
        server.send(name, {"type": "plan", "to": name})
    for name, client in zip(names, clients, strict=True):
        assert client.receive(LONG_S) == {"type": "plan", "to": name}
        client.close()


def test_a_launcher_that_says_nothing_is_not_waited_for(endpoint: str) -> None:
    client = ControlClient(endpoint, "worker-0")
    with pytest.raises(TimeoutError, match="launcher"):
        client.receive(0.01)
    client.close()


def test_a_message_to_one_that_is_gone_is_dropped(server: ControlServer) -> None:
    server.send("worker-9", {"type": "stop"})
    assert server.receive_all() == []


def test_a_successor_takes_over_the_name(server: ControlServer, endpoint: str) -> None:
    first = ControlClient(endpoint, "worker-0")
    first.send({"type": "hello", "n": 1})
    assert receive(server, 1) == [("worker-0", {"type": "hello", "n": 1})]
    second = ControlClient(endpoint, "worker-0")
    second.send({"type": "hello", "n": 2})
    assert receive(server, 1) == [("worker-0", {"type": "hello", "n": 2})]
    server.send("worker-0", {"type": "plan"})
    assert second.receive(LONG_S) == {"type": "plan"}
    first.close()
    second.close()


def test_last_words_are_sent_before_the_end(server: ControlServer, endpoint: str) -> None:
    client = ControlClient(endpoint, "worker-0")
    client.send({"type": "failed"})
    client.close(linger_ms=1000)
    assert receive(server, 1) == [("worker-0", {"type": "failed"})]
