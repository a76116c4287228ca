"""Real sockets on loopback: who is let in, who is told why not, and that nothing is overheard."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from trserve.edge.curve import ClientKeys, KeyPair, read_client_keys, read_server_keys
from trserve.edge.dial import Connection
from trserve.edge.keys_command import make_files
from trserve.edge.listener import Listener, Received
from trserve.errors import PortInUseError

FRAME_BYTES = 100_000
LONG_S = 5.0


class Link:
    """A listener and whoever dials it."""

    def __init__(self, folder: Path) -> None:
        make_files(folder / "far", folder / "home", "home")
        self.server = read_server_keys(str(folder / "far"))
        self.client = read_client_keys(str(folder / "home"))
        self.listener = Listener("127.0.0.1", 0, self.server, FRAME_BYTES)
        self.context: zmq.Context[Any] = zmq.Context()
        self.connections: list[Connection] = []
        self.received: list[Received] = []

    def dial(self, keys: ClientKeys | None = None, port: int | None = None) -> Connection:
        address = f"127.0.0.1:{port or self.listener.port}"
        made = Connection(self.context, address, keys or self.client, FRAME_BYTES)
        self.connections.append(made)
        return made

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + LONG_S
        while not condition():
            assert time.monotonic() < deadline, "it never came to that"
            self.received += self.listener.receive(time.monotonic())
            time.sleep(0.002)

    def hear(self, connection: Connection) -> list[bytes]:
        heard: list[bytes] = []
        self.until(lambda: heard.extend(connection.receive()) or heard or connection.failure)
        return heard

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.listener.close()
        self.context.destroy(linger=0)


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    made = Link(tmp_path)
    yield made
    made.close()


def test_who_is_listed_is_let_in_and_known_by_its_key(link: Link) -> None:
    connection = link.dial()
    assert connection.send(b"hello")
    link.until(lambda: link.received)
    (received,) = link.received
    assert (received.frame, received.user) == (b"hello", link.client.pair.public.hex())
    assert link.listener.name_of(received.user) == "home"
    assert link.listener.send(received.route, b"welcome")
    assert link.hear(connection) == [b"welcome"]
    assert not connection.failure


def test_who_is_not_listed_is_told_so(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    connection = link.dial(ClientKeys(KeyPair.new(), link.client.server))
    connection.send(b"hello")
    assert link.hear(connection) == []
    assert connection.refused and "refuses the key" in connection.failure
    assert "or it has barred it for a while" in connection.failure
    assert "is not in --edge-keys" in caplog.text
    assert link.received == []


def test_another_server_than_the_one_named_is_noticed(link: Link) -> None:
    connection = link.dial(ClientKeys(link.client.pair, KeyPair.new().public))
    connection.send(b"hello")
    assert link.hear(connection) == []
    assert "ends the handshake" in connection.failure and link.received == []


def test_a_port_where_nobody_listens_is_noticed(link: Link) -> None:
    free = Listener("127.0.0.1", 0, link.server, FRAME_BYTES)
    port = free.port
    free.close()
    connection = link.dial(port=port)
    assert link.hear(connection) == [] and "nobody answers" in connection.failure


def test_a_port_that_is_in_use_is_refused(link: Link) -> None:
    with pytest.raises(PortInUseError, match="--edge-listen"):
        Listener("127.0.0.1", link.listener.port, link.server, FRAME_BYTES)


def test_who_is_barred_is_cut_off_and_not_let_in_again(link: Link) -> None:
    connection = link.dial()
    connection.send(b"nonsense")
    link.until(lambda: link.received)
    link.listener.bar(link.received[0].route, link.received[0].user, time.monotonic() + 60.0)
    link.until(lambda: connection.receive() or connection.failure)
    again = link.dial()
    again.send(b"hello")
    assert link.hear(again) == [] and again.refused
    with pytest.raises(ConnectionError):
        link.until(lambda: link.listener.send(link.received[0].route, b"x") is False)


def test_a_frame_that_is_too_long_ends_its_connection(link: Link) -> None:
    connection = link.dial()
    connection.send(b"x" * (FRAME_BYTES + 1))
    link.until(lambda: connection.receive() or connection.failure)
    assert link.received == []


def test_what_a_send_swallowed_is_still_known_to_be_there(link: Link) -> None:
    """ZeroMQ's descriptor is edge-triggered, and a send takes the edge with it."""
    connection = link.dial()
    connection.send(b"hello")
    link.until(lambda: link.received)
    route = link.received[0].route
    assert connection.receive() == []
    link.listener.send(route, b"answer")
    sent: list[bytes] = []

    def send_until_it_has_more() -> bool:
        if connection.send(b"another"):
            sent.append(b"another")
        return connection.has_more

    link.until(send_until_it_has_more)
    assert connection.receive() == [b"answer"] and not connection.has_more
    link.until(lambda: len(link.received) >= 1 + len(sent))
    connection.send(b"more")
    deadline = time.monotonic() + LONG_S
    while not (link.listener.send(route, b"again") and link.listener.has_more):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    found = [each.frame for each in link.listener.receive(time.monotonic())]
    assert found[-1:] == [b"more"] and not link.listener.has_more
