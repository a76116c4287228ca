"""A model that is down, and one that does not come back: what clients and probes are told."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tests.blackbox.test_metrics import scrape, value
from tests.machine_speed import slowness
from tests.procfs import command
from tests.serverproc import Response, Server, concurrently, wait_until

COMPLETIONS = "/v1/completions"
READY_AGAIN_S = 15.0
BODY = {"prompt": [5, 6, 7], "max_tokens": 12, "ignore_eos": True, "temperature": 0}


def readyz(server: Server) -> Response:
    return server.request("GET", "/readyz", timeout_s=5.0)


def kill_worker(server: Server, model: int) -> None:
    """SIGKILL, if it is there; a process that has just begun or ended has no command line yet."""
    own = {"trserve.workers.main", f"--index={model}"}
    for pid in server.children():
        if own <= set(command(pid).split()):
            os.kill(pid, signal.SIGKILL)


def wait_ready(server: Server) -> Any:
    return wait_until(lambda: readyz(server), lambda answer: answer.status == 200, READY_AGAIN_S)


def lose(server: Server, model: int) -> None:
    """Kill its worker whenever it is up, until the server gives it up."""

    def lost(look: Response) -> bool:
        state = look.json()["models"][model]["status"]
        if state == "up":
            kill_worker(server, model)
        return state == "lost"

    assert lost(wait_until(lambda: readyz(server), lost, 60.0))


def test_requests_wait_while_a_worker_is_restarted():
    with Server(["--device", "cpu"]) as server:
        before = server.post(COMPLETIONS, BODY)
        killed = time.monotonic()
        kill_worker(server, 1)
        look = wait_until(lambda: readyz(server), lambda answer: answer.status == 503, 5.0)
        assert time.monotonic() - killed < 1.0 * slowness()
        found = look.json()
        assert found["status"] == "unavailable"
        assert "worker 1 (small) was killed by SIGKILL" in found["detail"]
        assert [model["status"] for model in found["models"]] == ["up", "restarting"]
        assert server.request("GET", "/health").status == 503
        assert server.request("GET", "/livez").status == 200
        only = {"trserve": {"only": server.models[1]}}
        answers = concurrently(lambda _: server.post(COMPLETIONS, BODY | only), range(3), 3)
        assert all(len(answer["choices"][0]["text"]) for answer in answers)
        assert readyz(server).json()["status"] == "ok"
        again = server.post(COMPLETIONS, BODY)
        assert again["choices"] == before["choices"]
        assert again["usage"]["trserve"]["degraded"] is False
        assert value(scrape(server), "worker_restarts_total", model=server.models[1]) == 1


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_model_that_is_left_goes_on(lost):
    with Server(["--device", "cpu", "--on-peer-loss", "degrade"]) as server:
        names, left = server.models, 1 - lost
        reference = server.post(COMPLETIONS, BODY | {"trserve": {"only": names[left]}})
        at_the_lost_one = {"trserve": {"router": {"tau": 1.0 - lost}}}
        wanted_anyway = {"trserve": {"trace": True, **at_the_lost_one["trserve"]}}
        long = BODY | {"max_tokens": 900} | at_the_lost_one
        stream = server.stream(COMPLETIONS, long | {"stream_options": {"include_usage": True}})
        next(stream)
        lose(server, lost)
        assert list(stream)[-1]["usage"]["trserve"]["degraded"] is True
        look = wait_ready(server).json()
        assert look["status"] == "degraded"
        assert look["models"][lost]["status"] == "lost"
        answer = server.post(COMPLETIONS, BODY)
        assert answer["choices"] == reference["choices"]
        alone = server.post(COMPLETIONS, BODY | wanted_anyway)["choices"][0]["trserve"]["alone"]
        assert alone == [True] * BODY["max_tokens"]
        own = answer["usage"]["trserve"]
        assert own["degraded"] is True
        assert own["tokens"] == {names[lost]: 0, names[left]: BODY["max_tokens"]}
        pinned = server.post(COMPLETIONS, BODY | {"trserve": {"only": names[left]}})
        assert pinned["usage"]["trserve"]["degraded"] is False
        for member in ("only", "entry_model"):
            refused = server.request("POST", COMPLETIONS, BODY | {"trserve": {member: names[lost]}})
            assert refused.status == 503
            assert refused.json()["error"]["code"] == "model_unavailable"
        samples = scrape(server)
        assert value(samples, "worker_status", model=names[lost], status="lost") == 1
        assert server.stop() == 0
        assert not server.wait_gone()
