"""A server that has nothing to do does nothing: no process of it polls or spins."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.serverproc import Server, concurrently

MOST_OF_A_CORE = 0.01


def cpu_seconds(pids: list[int]) -> float:
    """Time that these processes have run so far, in user and kernel mode."""
    ticks = 0
    for pid in pids:
        # The name, in brackets, may hold spaces; utime and stime are the fields 14 and 15.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_an_idle_server_takes_less_than_a_hundredth_of_a_core(full):
    seconds = 60.0 if full else 10.0
    body = {"model": "trserve", "prompt": [5, 6, 7], "max_tokens": 40, "temperature": 0}
    body |= {"ignore_eos": True, "trserve": {"router": {"tau": 0.0}}}
    with Server(["--device", "cpu"]) as server:
        pids = [server.pid, *server.children()]
        assert len(pids) >= 4, "launcher, gateway and two workers"
        concurrently(lambda _: server.post("/v1/completions", body), range(8), 4)
        worked = cpu_seconds(pids)
        time.sleep(2.0)  # what follows the last answers: slots, blocks, closed connections
        before, since = cpu_seconds(pids), time.monotonic()
        assert before >= worked > 0.5
        time.sleep(seconds)
        used = (cpu_seconds(pids) - before) / (time.monotonic() - since)
        assert [server.pid, *server.children()] == pids
    assert used < MOST_OF_A_CORE, f"{used:.2%} of a core"
