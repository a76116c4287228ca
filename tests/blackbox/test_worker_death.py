"""A worker that dies: nobody hangs, everybody is told, nothing is left."""

from __future__ import annotations

import os
import signal

import pytest

from tests.procfs import maps
from tests.serverproc import Server, concurrently, wait_until

COMPLETIONS = "/v1/completions"
GONE_S = 10.0


def workers(server: Server) -> list[int]:
    """The processes that have torch loaded: one a model, in the order of their start."""
    return sorted(pid for pid in server.children() if "libtorch" in maps(pid))


def live(server: Server) -> int:
    return server.request("GET", "/health").json()["requests"]["live"]


def body(stream: bool) -> dict[str, object]:
    lengths = {"max_tokens": 900, "ignore_eos": True, "temperature": 0}
    router = {"trserve": {"router": {"tau": 0.0}}}
    return {"model": "trserve", "prompt": [5] * 8, "stream": stream} | lengths | router


@pytest.mark.parametrize("which", [0, 1], ids=["slm", "llm"])
def test_every_client_is_told_and_the_server_ends(which):
    with Server(["--device", "cpu"]) as server:
        victim = workers(server)[which]
        streams = [server.stream(COMPLETIONS, body(stream=True)) for _ in range(4)]
        for stream in streams:
            next(stream)
        os.kill(victim, signal.SIGKILL)
        for stream in streams:
            last = list(stream)[-1]
            assert last["error"]["code"] == "worker_lost"
            assert "SIGKILL" in last["error"]["message"]
        assert server.wait() == 5
        assert f"worker {which}" in server.stderr.strip().splitlines()[-1]
        assert not server.wait_gone(GONE_S)


def test_answers_sent_as_a_whole_end_too():
    with Server(["--device", "cpu"]) as server:
        victim = workers(server)[0]

        def ask(index: int) -> int:
            if index == 0:
                wait_until(lambda: live(server), lambda count: count == 4, 10.0)
                os.kill(victim, signal.SIGKILL)
                return 503
            return server.request("POST", COMPLETIONS, body(stream=False), timeout_s=20.0).status

        assert concurrently(ask, range(5), 5) == [503] * 5
        assert server.wait() == 5
        assert not server.wait_gone(GONE_S)
