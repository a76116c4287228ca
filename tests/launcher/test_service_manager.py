"""What a service manager hears of a server, by a socket that stands for it."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serverproc import Server
from trserve.service_manager import VARIABLE, ServiceManager


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.settimeout(10.0)
        yield found


def heard(listener: socket.socket) -> dict[str, str]:
    lines = listener.recv(4096).decode().splitlines()
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_both_kinds_of_addresses(tmp_path, listener, kind):
    name = f"@{uuid.uuid4()}" if kind == "abstract" else str(tmp_path / "notify")
    listener.bind("\0" + name[1:] if kind == "abstract" else name)
    environment = {VARIABLE: name, "OTHER": "1"}
    ServiceManager.of(environment).tell(READY="1", STATUS="well")
    assert heard(listener) == {"READY": "1", "STATUS": "well"}
    assert environment == {"OTHER": "1"}, "children have nothing to say"


@pytest.mark.parametrize("environment", [{}, {VARIABLE: ""}, {VARIABLE: "/nobody/listens"}])
def test_nobody_who_listens_is_no_error(environment):
    ServiceManager.of(environment).tell(READY="1")


def test_a_server_says_that_it_is_ready_and_that_it_stops(listener):
    path = Path(f"/tmp/trs-notify-{uuid.uuid4().hex}")
    listener.bind(str(path))
    try:
        alone = ["--models", "tiny", "--max-requests", "4"]
        with Server(alone, env={VARIABLE: str(path)}) as server:
            ready = heard(listener)
            assert ready["READY"] == "1"
            assert ready["STATUS"].startswith("serving on 127.0.0.1:")
            assert server.stop() == 0
            assert heard(listener)["STOPPING"] == "1"
    finally:
        path.unlink()
