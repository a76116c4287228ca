"""A server whose workers share a GPU through MPS, both EMULATED: one dies, all are replaced.

Real processes on the CPU; the daemon lists them as its clients, as MPS would.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import procfs
from tests.faults.streams import Streams, check_equal, request, undisturbed, worker_pid
from tests.gpus.programs import install_mps
from tests.serverproc import Server

REPLACED_S = 60.0
"""Two workers load at once, on a machine that may be busy."""

pytestmark = pytest.mark.slow  # what it rests on is tested by single events in test_restart_unit


class SharedServer(Server):
    COMMAND = (sys.executable, "-m", "tests.gpus.shared_on_cpu", "launch", "--port", "0")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    install_mps(tmp_path)
    return tmp_path


def start(programs: Path) -> SharedServer:
    env = {"PATH": f"{programs}:{os.environ['PATH']}"}
    return SharedServer(["--device", "cpu"], env)


def health(server: Server) -> dict[str, Any]:
    return server.request("GET", "/health").json()


def orders(server: Server) -> list[str]:
    (file,) = server.runtime.glob("**/mps-0/log/orders")
    return file.read_text().splitlines()


def test_a_death_takes_everybody_off_the_gpu_and_no_stream_notices(programs: Path) -> None:
    bodies = [request(number) for number in range(4)]
    with start(programs) as server:
        assert [model["mps"] for model in health(server)["models"]] == ["on", "on"]
        expected = undisturbed(server, bodies)
        before = [worker_pid(server, model) for model in (0, 1)]
        streams = Streams(server, bodies)
        streams.until_begun()
        os.kill(before[1], signal.SIGKILL)
        check_equal(streams.join(), expected)
        deadline = time.monotonic() + REPLACED_S
        while server.request("GET", "/health").status != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert procfs.stat(before[0]) is None, "it is on the GPU that had the death"
        assert not {worker_pid(server, model) for model in (0, 1)} & set(before)
        said = orders(server)
        (ended,) = [order for order in said if order.startswith("terminate_client")]
        assert ended.endswith(f" {before[0]}"), "taken off the GPU before it was killed"
        assert (
            'trserve_mps_status{model="tiny",status="on"} 1.0'
            in server.request("GET", "/metrics").body.decode()
        )
        assert server.stop() == 0
        assert not server.wait_gone()


def test_a_launcher_that_is_killed_leaves_no_daemon(programs: Path) -> None:
    with start(programs) as server:
        server.send_signal(signal.SIGKILL)
        server.wait()
        assert not server.wait_gone()


def test_a_daemon_that_cannot_be_had_is_a_state(programs: Path) -> None:
    (programs / "EMULATED_MPS").write_text("refuse")
    with start(programs) as server:
        (first, _) = health(server)["models"]
        assert first["mps"] == "unavailable"
        assert "refused" in first["mps_reason"]
        assert "take turns" in server.stderr
        assert server.stop() == 0
