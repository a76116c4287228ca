"""A worker that dies too often: nobody hangs, everybody is told, nothing is left.

One that dies once is replaced, which ``tests/faults`` tests.
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.faults.streams import worker_pid
from tests.serverproc import Server, concurrently, wait_until

COMPLETIONS = "/v1/completions"
GONE_S = 10.0
BACK_S = 20.0


def live(server: Server) -> int:
    return int(server.request("GET", "/health").json()["requests"]["live"])


def is_ready(server: Server) -> bool:
    return server.request("GET", "/readyz").status == 200


def kill(server: Server, model: int, *, times: int) -> None:
    """SIGKILL to one worker after the other, each as soon as its predecessor is replaced."""
    for time in range(times):
        if time:
            assert wait_until(lambda: is_ready(server), bool, BACK_S)
        os.kill(worker_pid(server, model), signal.SIGKILL)
        assert wait_until(lambda: is_ready(server), lambda ready: not ready, BACK_S) is False


def body(stream: bool) -> dict[str, object]:
    lengths = {"max_tokens": 900, "ignore_eos": True, "temperature": 0}
    router = {"trserve": {"router": {"tau": 0.0}}}
    return {"model": "trserve", "prompt": [5] * 8, "stream": stream} | lengths | router


@pytest.mark.parametrize("which", [pytest.param(0, marks=pytest.mark.slow), 1], ids=["slm", "llm"])
def test_every_client_is_told_and_the_server_ends(which):
    with Server(["--device", "cpu"]) as server:
        kill(server, which, times=2)
        assert wait_until(lambda: is_ready(server), bool, BACK_S)
        streams = [server.stream(COMPLETIONS, body(stream=True)) for _ in range(4)]
        for stream in streams:
            next(stream)
        os.kill(worker_pid(server, which), signal.SIGKILL)
        for stream in streams:
            last = list(stream)[-1]
            assert last["error"]["code"] == "worker_lost"
            assert "SIGKILL" in last["error"]["message"]
        assert server.wait() == 5
        assert f"worker {which}" in server.stderr.strip().splitlines()[-1]
        assert not server.wait_gone(GONE_S)


def test_answers_sent_as_a_whole_end_too():
    with Server(["--device", "cpu"]) as server:
        kill(server, 0, times=2)
        assert wait_until(lambda: is_ready(server), bool, BACK_S)

        def ask(index: int) -> int:
            if index == 0:
                wait_until(lambda: live(server), lambda count: count == 4, 10.0)
                os.kill(worker_pid(server, 0), signal.SIGKILL)
                return 503
            return server.request("POST", COMPLETIONS, body(stream=False), timeout_s=20.0).status

        assert concurrently(ask, range(5), 5) == [503] * 5
        assert server.wait() == 5
        assert not server.wait_gone(GONE_S)
