"""Workers that stop and go on, and workers that stop for good."""

from __future__ import annotations

import os
import signal
import time

import pytest

from bench.soak import processes
from tests.faults.streams import (
    Streams,
    check_equal,
    check_nothing_held,
    request,
    undisturbed,
    watched,
    worker_pid,
)
from tests.procfs import start_time
from tests.serverproc import Server

STREAMS = 8
PAUSE_S = 3.0
WATCHDOG_S = 2.0
FOUND_S = WATCHDOG_S + 3.0
"""A look a second, of which the first only begins to count, and the kill."""


@pytest.mark.parametrize("model", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_pause_is_sat_out(model: int) -> None:
    bodies = [request(number) for number in range(STREAMS)]
    with Server(["--device", "cpu"]) as server:
        expected = undisturbed(server, bodies)
        victim = worker_pid(server, model)
        streams = Streams(server, bodies)
        streams.until_begun()
        os.kill(victim, signal.SIGSTOP)
        time.sleep(PAUSE_S)
        assert not all(heard.over for heard in streams.heard)
        os.kill(victim, signal.SIGCONT)
        check_equal(streams.join(), expected)
        assert worker_pid(server, model) == victim
        check_nothing_held(server)


@pytest.mark.parametrize("model", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_hung_worker_is_killed_and_replaced(model: int) -> None:
    bodies = [request(number) for number in range(STREAMS)]
    with Server(["--device", "cpu", "--watchdog-s", f"{WATCHDOG_S}"]) as server:
        expected = undisturbed(server, bodies)
        victim = worker_pid(server, model)
        with watched(server) as readiness:
            streams = Streams(server, bodies)
            streams.until_begun()
            os.kill(victim, signal.SIGSTOP)
            stopped = time.monotonic()
            assert readiness.first(503, after=stopped) <= FOUND_S
            check_equal(streams.join(), expected)
        assert start_time(victim) is None
        assert worker_pid(server, model) != victim
        assert "hung for 2 s" in server.stderr
        check_nothing_held(server)


def test_an_idle_process_is_no_hung_one() -> None:
    with Server(["--device", "cpu", "--watchdog-s", f"{WATCHDOG_S}"]) as server:
        workers = [worker_pid(server, model) for model in range(2)]
        gateway = processes(server.pid)["gateway"]
        time.sleep(3 * WATCHDOG_S)
        assert [worker_pid(server, model) for model in range(2)] == workers
        assert processes(server.pid)["gateway"] == gateway
