"""Whether a server grows: its memory and descriptors over many short requests.

A server of the ``zero-layer`` model (whose steps cost next to nothing) answers ``--requests``
requests over kept-alive connections. Warm-up is the first tenth of them, at least 2,000: until
then slots are touched for the first time and the prefix cache fills. After it, no process's
resident memory may change by more than 5 %. One row a process; ``private`` is what it has written
and shares with nobody. ``fds`` are open descriptors: while no client is connected after the
warm-up, at most, and when all clients have left.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any, Final
from urllib.parse import urlsplit

from bench.common import Row, parser, report
from bench.soak_load import Load, make_request

MODEL: Final = "zero-layer"
TOKEN_IDS: Final = 512
"""Prompts are of ids below this; the tokenizer that lends itself to the model has more."""
ARGUMENTS: Final = (
    "--models",
    MODEL,
    "--load-format",
    "dummy",
    "--device",
    "cpu",
    "--threads",
    "1",
)
REQUESTS: Final = 100_000
QUICK_REQUESTS: Final = 10_000
WARM_UP_SHARE: Final = 0.1
LEAST_WARM_UP: Final = 2_000
ALLOWED_CHANGE: Final = 0.05
SAMPLE_EVERY_S: Final = 0.5
IDLE_TIMEOUT_S: Final = 10.0
START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 30.0
_TITLES: Final = {
    "trserve.workers.main": "worker",
    "trserve.gateway.main": "gateway",
    "trserve.solver.main": "solver",
}
_READY: Final = re.compile(r"trserve ready (http://\S+) ")


@dataclass
class Samples:
    """What was seen of one process: MiB of memory after the warm-up, and open descriptors."""

    fds_before: int
    """When no client was connected, after the warm-up."""
    rss: list[float] = field(default_factory=list)
    private: list[float] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)

    def add(self, pid: int) -> None:
        """Look at the process; raises FileNotFoundError if it has ended."""
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        self.rss.append(_mib(rollup, "Rss"))
        self.private.append(_mib(rollup, "Private_Dirty"))
        self.fds.append(open_descriptors(pid))

    def row(self, process: str) -> Row:
        """The row of the process."""
        return {
            "process": process,
            "rss_warm_mib": self.rss[0],
            "rss_max_mib": max(self.rss),
            "rss_end_mib": self.rss[-1],
            "rss_change": change(self.rss),
            "private_change": change(self.private),
            "fds_before": self.fds_before,
            "fds_max": max(self.fds),
            "fds_after": self.fds[-1],
        }


def change(values: Sequence[float]) -> float:
    """By how much ``values`` differ at most, as a share of the first."""
    return (max(values) - min(values)) / values[0]


def _mib(rollup: str, name: str) -> float:
    found = re.search(rf"^{name}:\s+(\d+) kB$", rollup, re.MULTILINE)
    assert found, f"no {name} in smaps_rollup"
    return int(found[1]) / 1024


def open_descriptors(pid: int) -> int:
    """How many descriptors the process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def processes(root: int) -> dict[str, int]:
    """The server's processes, by what they are: launcher, gateway, workers, and a solver."""
    children = Path(f"/proc/{root}/task/{root}/children").read_text().split()
    found = {"launcher": root}
    for pid in map(int, children):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        title = next((title for module, title in _TITLES.items() if module in words), None)
        if title is None:
            continue  # started a moment ago, and not yet what it is to be
        index = next(word for word in words if word.startswith("--index="))[8:]
        found[f"{title} {index}" if title == "worker" else title] = pid
    return found


async def soak(url: str, root: int, *, requests: int, seed: int = 0) -> list[Row]:
    """Send ``requests`` to the server at ``url``, whose launcher is ``root``; one row a process.

    Raises:
        RuntimeError: an answer was wrong, or the server did not become idle.
        FileNotFoundError: a process ended meanwhile.
    """
    address = urlsplit(url)
    assert address.hostname and address.port
    make = partial(make_request, seed=seed, vocab=TOKEN_IDS)
    warm_up = min(max(int(requests * WARM_UP_SHARE), LEAST_WARM_UP), requests // 2)
    started = time.perf_counter()
    await Load(address.hostname, address.port, make, range(warm_up)).run()
    await _wait_idle(url)
    pids = processes(root)
    samples = {name: Samples(open_descriptors(pid)) for name, pid in pids.items()}

    def look() -> None:
        for name, pid in pids.items():
            samples[name].add(pid)

    load = Load(address.hostname, address.port, make, range(warm_up, requests))
    running = asyncio.create_task(load.run())
    while not running.done():
        look()
        await asyncio.wait([running], timeout=SAMPLE_EVERY_S)
    await running
    per_s = requests / (time.perf_counter() - started)
    await _wait_idle(url)
    look()
    total = {"process": "all", "requests": requests, "warm_up": warm_up, "requests_per_s": per_s}
    return [*(each.row(name) for name, each in samples.items()), total]


async def _wait_idle(url: str) -> None:
    """Return when nothing of a request is left and all blocks are free or cached."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while (left := what_is_left(_health(url))) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    if left:
        raise RuntimeError(f"not idle {IDLE_TIMEOUT_S:.0f} s after the last request: {left}")


def what_is_left(health: Mapping[str, Any]) -> dict[str, Any]:
    """Counts in ``/health`` that are not zero, and blocks that are missing."""
    left = {name: count for name, count in health["requests"].items() if count}
    for model in health["models"]:
        missing = model["total_blocks"] - model["free_blocks"] - model["cached_blocks"]
        counts = {"blocks": missing, "kv_repairs": model["kv_repairs"]}
        counts |= {name: model[name] for name in ("running", "pending")}
        left |= {f"{model['name']} {name}": count for name, count in counts.items() if count}
    return left


def _health(url: str) -> Any:
    with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
        return json.load(response)


@contextmanager
def launched(arguments: Sequence[str]) -> Iterator[tuple[str, int]]:
    """A server on a free port, ended afterwards: its URL and the launcher's process id."""
    command = [sys.executable, "-m", "trserve", "launch", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        limit = Timer(START_TIMEOUT_S, server.kill)
        limit.start()
        try:
            assert server.stdout is not None
            ready = _READY.match(server.stdout.readline())
            limit.cancel()
            if ready is None:
                sys.exit("the server did not start; its messages are above")
            yield ready[1], server.pid
        finally:
            limit.cancel()
            server.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                server.wait(STOP_TIMEOUT_S)
            server.kill()


def verdict(rows: Sequence[Row]) -> list[str]:
    """What grew, one line each; nothing if all is flat."""
    grown = []
    for row in rows:
        if row.get("rss_change", 0.0) > ALLOWED_CHANGE:
            grown.append(f"{row['process']}: resident memory changed by {row['rss_change']:.1%}")
        if row.get("fds_after", 0) > row.get("fds_before", 0):
            more = row["fds_after"] - row["fds_before"]
            grown.append(f"{row['process']}: {more} more open descriptors than before")
    return grown


def main(argv: Sequence[str] | None = None) -> None:
    """Run the soak and report; exit status 1 if something grew."""
    made = parser("soak", "Memory and descriptors of a server over many short requests.")
    made.add_argument("--requests", type=int, default=REQUESTS)
    made.add_argument("--seed", type=int, default=0, help="of the requests")
    args = made.parse_args(argv)
    if args.quick:
        args.requests = min(args.requests, QUICK_REQUESTS)
    with launched(ARGUMENTS) as (url, root):
        rows = asyncio.run(soak(url, root, requests=args.requests, seed=args.seed))
    report("soak", args, rows, f"{args.requests} short requests on {MODEL}")
    grown = verdict(rows)
    print("\n".join(grown) or f"flat: no process changed by more than {ALLOWED_CHANGE:.0%}")
    sys.exit(bool(grown))


if __name__ == "__main__":
    main()
