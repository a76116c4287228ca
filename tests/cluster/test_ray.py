"""A cluster of two raylets on this machine: it serves, loses one, and has it back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="trserve[cluster] is not installed: no ray")

pytestmark = pytest.mark.skipif(
    not os.environ.get("TRSERVE_FULL"), reason="a cluster of raylets: with full counts only"
)
START_S = 120.0
BACK_S = 120.0
STREAMS = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    memory = 80 * 2**20
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": memory}
    )
    made.raylets = [made.add_node(num_cpus=2, object_store_memory=memory) for _ in range(2)]
    yield made
    made.shutdown()


class Launched:
    """``trserve launch --executor ray``, until the end of the test."""

    def __init__(self, address: str, *flags: str) -> None:
        command = [sys.executable, "-m", "trserve", "launch", "--executor", "ray", "--port", "0"]
        command += ["--ray-address", address, "--threads", "1,1", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        timer = threading.Timer(START_S, self.process.kill)
        timer.start()
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        timer.cancel()
        assert words[:2] == ["trserve", "ready"], words
        self.url, self.words = words[2], words

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            return json.load(reply)

    def groups(self) -> list[dict[str, Any]]:
        return list(self.get("/v1/trserve/groups")["groups"])


class Stream(threading.Thread):
    """One answer, read to its end; ``group`` is known once it has begun."""

    def __init__(self, url: str, session: int) -> None:
        super().__init__()
        body = {"prompt": f"Tom has {session} pens.", "stream": True, "max_tokens": 400}
        body |= {"ignore_eos": True, "temperature": 0, "session_id": str(session)}
        self.request = urllib.request.Request(
            url + "/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        self.group = -1
        self.begun = threading.Event()
        self.lines: list[bytes] = []

    def run(self) -> None:
        with urllib.request.urlopen(self.request, timeout=60) as reply:
            self.group = int(reply.headers["x-trserve-group"])
            for line in reply:
                if line.strip():
                    self.lines.append(line)
                    self.begun.set()

    @property
    def finished(self) -> bool:
        return bool(self.lines) and self.lines[-1].strip() == b"data: [DONE]"


def wait(condition: Any, bound_s: float) -> None:
    deadline = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {bound_s:g} s"
        time.sleep(0.2)


def test_a_lost_host_costs_its_own_streams_only_and_its_group_comes_back(cluster: Any) -> None:
    server = Launched(cluster.address, "--replicas", "2")
    try:
        assert server.words[3].startswith("models=tiny,small")
        streams = [Stream(server.url, number) for number in range(STREAMS)]
        for stream in streams:
            stream.start()
        assert all(stream.begun.wait(30) for stream in streams)
        assert {stream.group for stream in streams} == {0, 1}
        cluster.remove_node(cluster.raylets.pop(), allow_graceful=False)
        wait(lambda: sum(group["ready"] for group in server.groups()) == 1, 30)
        (lost,) = [group["index"] for group in server.groups() if not group["ready"]]
        for stream in streams:
            stream.join(60)
            assert not stream.is_alive()
        for stream in streams:
            if stream.group != lost:
                assert stream.finished
                assert not any(b'"error"' in line for line in stream.lines)
            elif not stream.finished:  # it may have ended before the host did
                assert any(b'"error"' in line for line in stream.lines)
        assert server.get("/readyz")["status"] == "degraded"
        after = Stream(server.url, 99)
        after.start()
        after.join(60)
        assert (after.group, after.finished) == (1 - lost, True)
        cluster.raylets.append(cluster.add_node(num_cpus=2, object_store_memory=80 * 2**20))
        wait(lambda: all(group["ready"] for group in server.groups()), BACK_S)
        assert server.groups()[lost]["losses"] == 1
    finally:
        assert server.end() == 0


def ask(server: Launched) -> dict[str, Any]:
    """One whole answer, greedy."""
    body = {"prompt": "Tom has 12 pens. He buys 30 more.", "max_tokens": 120, "temperature": 0}
    request = urllib.request.Request(
        server.url + "/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return dict(json.load(reply))


def test_a_model_on_a_host_of_its_own_is_lost_and_comes_back(cluster: Any) -> None:
    """The answers are those of one host, before and after; meanwhile the home writes on alone."""
    server = Launched(cluster.address, "--host-groups", "0/1", "--on-peer-loss", "degrade")
    try:
        before = ask(server)
        assert before["usage"]["trserve"]["tokens"]["small"] > 0
        ((_, member),) = server.get("/v1/trserve/groups")["parts"]
        (holder,) = [each for each in cluster.raylets if each.node_id == member["node"]]
        cluster.remove_node(holder, allow_graceful=False)
        cluster.raylets.remove(holder)
        wait(lambda: ask(server)["usage"]["trserve"]["degraded"], 60)
        cluster.raylets.append(cluster.add_node(num_cpus=2, object_store_memory=80 * 2**20))
        wait(lambda: not ask(server)["usage"]["trserve"]["degraded"], BACK_S)
        assert ask(server)["choices"][0]["text"] == before["choices"][0]["text"]
    finally:
        assert server.end() == 0
