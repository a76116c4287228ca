"""The solver process from outside: where there is one, what it says, what its death changes."""

from __future__ import annotations

import os
import signal

import pytest

from tests.blackbox.test_metrics import scrape, value
from tests.procfs import command, stat
from tests.serverproc import Server, concurrently, wait_until

BODY = {"prompt": [5, 6, 7], "max_tokens": 300, "temperature": 0, "ignore_eos": True}
BODY |= {"trserve": {"router": {"tau": 0.05}}}
NICENESS = "5"


def solvers(server: Server) -> list[int]:
    return [pid for pid in server.children() if "trserve.solver.main" in command(pid)]


@pytest.mark.parametrize(
    "more",
    [
        ["--batch-threshold", "1,2"],
        ["--models", "tiny"],
    ],
)
def test_there_is_none_where_nothing_is_to_be_solved(more):
    with Server(["--device", "cpu", *more]) as server:
        assert solvers(server) == []
        assert server.stop() == 0


def test_it_gives_way_to_everybody_and_reports_what_it_finds():
    with Server(["--device", "cpu"]) as server:
        (pid,) = solvers(server)
        assert wait_until(lambda: stat(pid)[16], lambda nice: nice == NICENESS, 10.0)

        def load(index: int) -> None:
            server.post("/v1/completions", BODY | {"prompt": [5 + index, 6, 7]})

        for _ in range(20):
            concurrently(load, range(16), 4)
            found = scrape(server)
            if value(found, "solutions_total") > 0:
                break
        assert value(found, "solutions_total") > 0
        first, second = server.models
        stays = value(found, "routing_probability", model=first, to=first)
        leaves = value(found, "routing_probability", model=first, to=second)
        assert leaves > 0
        assert stays + leaves == pytest.approx(1)
        assert value(found, "step_latency_seconds", model=first) > 0
        assert value(found, "routed_requests_total", model=first, to=second) > 0
        assert value(found, "batch_threshold", model=second) >= 1
        steps = value(found, "steps_total", model=second)
        openings = [v for (name, _), v in found.items() if name == "trserve_gate_openings_total"]
        assert sum(openings) > steps > 0
        assert server.stop() == 0
        assert not server.wait_gone()


def test_its_death_is_a_note_and_no_more_and_neither_is_its_hanging():
    with Server(["--device", "cpu", "--watchdog-s", "2"]) as server:
        (pid,) = solvers(server)
        os.kill(pid, signal.SIGKILL)
        assert server.request("GET", "/readyz").status == 200
        server.post("/v1/completions", BODY)
        found = wait_until(lambda: solvers(server), lambda found: found not in ([], [pid]), 10.0)
        assert "the solver was killed by SIGKILL; it is started again" in server.stderr
        (second,) = found
        os.kill(second, signal.SIGSTOP)
        server.post("/v1/completions", BODY)
        assert server.request("GET", "/readyz").status == 200
        gone = wait_until(lambda: solvers(server), lambda now: now not in ([], [second]), 20.0)
        assert gone not in ([], [second])
        assert "the solver hung for 6 s and was killed; it is started again" in server.stderr
        assert server.request("GET", "/readyz").status == 200
        assert server.stop() == 0
        assert not server.wait_gone()


def test_the_third_death_is_the_last_and_requests_go_on():
    with Server(["--device", "cpu"]) as server:
        dead: list[int] = []
        for _ in range(3):
            (pid,) = wait_until(
                lambda: solvers(server), lambda found: bool(found) and found[0] not in dead, 10.0
            )
            dead.append(pid)
            os.kill(pid, signal.SIGKILL)
        assert wait_until(
            lambda: server.stderr, lambda said: "the third time within a minute" in said, 10.0
        )
        server.post("/v1/completions", BODY)
        assert solvers(server) == []
        assert server.stop() == 0
        assert not server.wait_gone()
