"""``trserve trace`` against a running server: a file that Perfetto opens, and clear refusals."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serverproc import Server, run_command

CHAT = {"messages": [{"role": "user", "content": "What is 17 plus 26?"}], "max_tokens": 24}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # Every token is handed over: nothing is certain enough.
    with Server(["--device", "cpu", "--router-config", "tau=0"]) as running:
        yield running


def trace(server: Server, output: Path, *args: str) -> str:
    """Traces ``server`` while it answers; returns standard error."""
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            server.post("/v1/chat/completions", CHAT)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        command = ["trace", "--seconds", "1.5", "-o", str(output), *args]
        done = run_command(command, env={"TMPDIR": str(server.runtime)})
    finally:
        ended.set()
        asking.join()
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr


def entries(output: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(output.read_bytes())["traceEvents"]
    return found


def test_a_trace_has_steps_of_both_workers_and_arrows_between_them(server, tmp_path):
    said = trace(server, tmp_path / "t.json")
    assert "perfetto" in said
    found = entries(tmp_path / "t.json")
    steps = [e for e in found if e["name"] == "step"]
    assert {e["tid"] for e in steps} == {0, 1}
    assert all(e["dur"] > 0 and e["args"]["batch"] == 1 for e in steps)
    for track in (0, 1):
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in steps if e["tid"] == track)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    ends = [e for e in found if e["ph"] in "stf" and e["name"] == "handoff"]
    arrows: dict[str, dict[str, Any]] = {}
    for end in ends:
        arrows.setdefault(end["id"], {})[end["ph"]] = end
    whole = [arrow for arrow in arrows.values() if arrow.keys() == {"s", "t", "f"}]
    assert len(whole) > 5
    assert len(whole) >= len(arrows) - 2, "only the first and the last may be cut by the window"
    known_until = {t: max(s["ts"] + s["dur"] for s in steps if s["tid"] == t) for t in (0, 1)}
    for arrow in whole:
        assert arrow["s"]["tid"] != arrow["t"]["tid"] == arrow["f"]["tid"]
        assert arrow["s"]["ts"] < arrow["t"]["ts"] < arrow["f"]["ts"]
        for end in (arrow["s"], arrow["f"]):  # in a step, or nothing is drawn
            assert end["ts"] > known_until[end["tid"]] or any(
                s["tid"] == end["tid"] and s["ts"] <= end["ts"] <= s["ts"] + s["dur"] for s in steps
            )
    assert {e["name"] for e in found if e["ph"] == "i"} <= {"gate opened"}


def test_a_trace_has_the_gateways_track_and_arrows_to_the_workers(server, tmp_path):
    trace(server, tmp_path / "t.json")
    found = entries(tmp_path / "t.json")
    tracks = {e["args"]["name"]: e["tid"] for e in found if e["name"] == "thread_name"}
    gateway = tracks["gateway"]
    lives: dict[int, list[str]] = {}
    for entry in sorted((e for e in found if e["ph"] == "X"), key=lambda e: e["ts"]):
        if entry["tid"] == gateway:
            lives.setdefault(entry["args"]["gen"], []).append(entry["name"])
    whole = [names for names in lives.values() if names[0] == "published"][:-1]
    assert len(whole) > 3
    assert all(names == ["published", "first token", "answered"] for names in whole)
    ends = sorted((e for e in found if e["ph"] in "sf" and e["name"] == "request"), key=arrow_time)
    arrows: dict[str, list[int]] = {}
    for end in ends:
        arrows.setdefault(end["id"], []).append(end["tid"])
    into = [tids for key, tids in arrows.items() if key.endswith(".in") and len(tids) == 2]
    out = [tids for key, tids in arrows.items() if key.endswith(".out") and len(tids) == 2]
    assert len(into) >= len(whole) - 1 and len(out) >= len(whole) - 1
    assert all(tids == [gateway, tracks["worker 0"]] for tids in into)
    assert all(tids[0] != gateway == tids[1] for tids in out)


def arrow_time(entry: dict[str, Any]) -> float:
    at: float = entry["ts"]
    return at


def test_a_server_is_found_by_its_port_and_by_its_pid(server, tmp_path):
    port = server.url.rpartition(":")[2]
    trace(server, tmp_path / "port.json", "--port", port)
    trace(server, tmp_path / "pid.json", "--pid", str(server.pid))
    for name in ("port.json", "pid.json"):
        named = [e for e in entries(tmp_path / name) if e["name"] == "process_name"]
        assert named[0]["args"]["name"] == f"trserve {server.pid}"


def refused(code: int, *args: str, env: dict[str, str] | None = None) -> str:
    done = run_command(["trace", "-o", os.devnull, *args], env=env)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr


def test_without_a_server():
    assert "no server" in refused(3)


@pytest.mark.slow
def test_of_two_servers_one_must_be_named(server, tmp_path):
    env = {"TMPDIR": str(server.runtime)}
    with Server(["--device", "cpu"], runtime=server.runtime) as second:
        error = refused(2, env=env)
        assert str(server.pid) in error
        assert str(second.pid) in error
        assert "--port" in error
        trace(server, tmp_path / "t.json", "--port", second.url.rpartition(":")[2])


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--pid", str(os.getpid())], "holds no slab"),
        (["--pid", "99999999"], "no such process"),
        (["--port", "1"], "--port 1"),
    ],
    ids=["no server's pid", "no pid", "nobody listens"],
)
def test_what_is_no_server(args, part):
    assert part in refused(3, *args)


def test_contradictions_and_places_that_cannot_be_written(server):
    assert "--pid and --port" in refused(2, "--pid", "1", "--port", "1")
    assert "-o" in refused(2, "-o", "/nonexistent/t.json", "--pid", str(server.pid))
    assert "--seconds" in refused(2, "--seconds", "0")
