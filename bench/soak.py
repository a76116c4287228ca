"""Whether a server grows: its memory and descriptors over many short requests.

A server of the ``zero-layer`` model (whose steps cost next to nothing) answers ``--requests``
requests over kept-alive connections. Warm-up is the first three tenths of them, at least 2,000:
until then slots are touched for the first time, the prefix cache fills and the heap finds the most
that it ever holds (the gateway's last 3 MiB come within 30,000 requests; 270,000 after them add
less than one). After it, no process's resident memory may change by more than 5 %. One row a
process; ``private`` is what it has written and shares with nobody. ``fds`` are open descriptors:
while no client is connected after the warm-up, at most, and when all clients have left.

With ``--minutes`` the embedded pair answers chats and texts of many lengths for so long instead,
which arrive at random moments at ``--load`` of what it can do, measured before; one client in seven
leaves in the middle. Then no status may be 5xx, and as many requests must be answered as arrive: on
a machine that others use the load may be more than what was measured. The solver's memory rises
with each model that it solves, by as much as that needs: of it the least of both halves count, and
may differ by a quarter.
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
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any, Final
from urllib.parse import urlsplit

from bench.common import Row, parser, print_table, progress, report
from bench.soak_load import Load, make_request
from bench.soak_paced import PacedLoad, make_visit

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
PAIR_ARGUMENTS: Final = ("--device", "cpu", "--no-log-requests")
REQUESTS: Final = 100_000
QUICK_REQUESTS: Final = 10_000
WARM_UP_SHARE: Final = 0.3
LEAST_WARM_UP: Final = 2_000
ALLOWED_CHANGE: Final = 0.05
SOLVERS_CHANGE: Final = 0.25
LATE_SHARE: Final = 0.01
SAMPLE_EVERY_S: Final = 0.5
LOAD: Final = 0.8
CAPACITY_WIDTH: Final = 32
CAPACITY_S: Final = 15.0
IDLE_TIMEOUT_S: Final = 10.0
START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 30.0
STATUS: Final = "status_"
SOLVER: Final = "solver"
_TITLES: Final = {
    "trserve.workers.main": "worker",
    "trserve.gateway.main": "gateway",
    "trserve.solver.main": SOLVER,
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
            "floor_growth": floor_growth(self.rss),
            "fds_before": self.fds_before,
            "fds_max": max(self.fds),
            "fds_after": self.fds[-1],
        }


def change(values: Sequence[float]) -> float:
    """By how much ``values`` differ at most, as a share of the first."""
    return (max(values) - min(values)) / values[0]


def floor_growth(values: Sequence[float]) -> float:
    """By how much the second half's least exceeds the first's, as a share of that."""
    half = (len(values) + 1) // 2
    return min(values[half:], default=values[0]) / min(values[:half]) - 1.0


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
    load = Load(address.hostname, address.port, make, range(warm_up, requests))
    rows = await _watched(url, root, load.run(), SAMPLE_EVERY_S)
    per_s = requests / (time.perf_counter() - started)
    total = {"process": "all", "requests": requests, "warm_up": warm_up, "requests_per_s": per_s}
    return [*rows, total]


async def paced_soak(
    url: str,
    root: int,
    *,
    minutes: float,
    share: float = LOAD,
    seed: int = 0,
    settle_s: float = CAPACITY_S,
) -> list[Row]:
    """:func:`soak` for so many minutes at ``share`` of what the server can do.

    Before, as many requests as ever may be are open at once for ``settle_s``, its capacity is
    measured for as long, and a tenth of the time, at least twice as long, is warm-up: by then every
    slot was used, and the prefix cache is full.
    """
    address = urlsplit(url)
    assert address.hostname and address.port
    place, make = (address.hostname, address.port), partial(make_visit, seed=seed)
    crowd = PacedLoad(place, make, per_s=None)
    await crowd.run(settle_s)
    flood = PacedLoad(place, make, per_s=None, width=CAPACITY_WIDTH, first=crowd.number)
    began = time.monotonic()
    await flood.run(settle_s)
    capacity = (flood.number - crowd.number) / (time.monotonic() - began)
    warm_up = PacedLoad(place, make, per_s=share * capacity, first=flood.number)
    await warm_up.run(max(2 * settle_s, 6 * minutes))
    await _wait_idle(url)
    load = PacedLoad(place, make, per_s=share * capacity, first=warm_up.number)
    began = time.monotonic()
    rows = await _watched(url, root, load.run(60 * minutes), SAMPLE_EVERY_S * max(1, minutes / 10))
    took_s = time.monotonic() - began
    took = sorted(load.seconds)
    total = {
        "process": "all",
        "requests": load.number - warm_up.number,
        "requests_per_s": (load.number - warm_up.number) / took_s,
        "capacity_per_s": capacity,
        "took_s": took_s,
        "left": load.left,
        "late": load.late,
        "latency_p50_s": took[len(took) // 2],
        "latency_p99_s": took[len(took) * 99 // 100],
        **{f"{STATUS}{status}": count for status, count in sorted(load.statuses.items())},
    }
    return [*rows, total]


async def _watched(
    url: str, root: int, work: Coroutine[Any, Any, None], every_s: float
) -> list[Row]:
    """One row a process of the server's, of the time of ``work``; raises as :func:`soak`."""
    pids = processes(root)
    samples = {name: Samples(open_descriptors(pid)) for name, pid in pids.items()}

    def look() -> None:
        for name, pid in pids.items():
            try:
                samples[name].add(pid)
            except (FileNotFoundError, ProcessLookupError):
                if name != SOLVER:
                    raise
                # It is replaced, and requests do without; the next look finds its successor.
                pids[name] = processes(root).get(name, pid)

    running = asyncio.create_task(work)
    with progress("under load; looks at its processes") as bar:
        while not running.done():
            look()
            bar.advance()
            await asyncio.wait([running], timeout=every_s)
    await running
    await _wait_idle(url)
    look()
    return [each.row(name) for name, each in samples.items()]


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
        # See the module.
        solves = row["process"] == SOLVER
        by = row.get("floor_growth" if solves else "rss_change", 0.0)
        if by > (SOLVERS_CHANGE if solves else ALLOWED_CHANGE):
            grown.append(f"{row['process']}: resident memory changed by {by:.1%}")
        if row.get("fds_after", 0) > row.get("fds_before", 0):
            more = row["fds_after"] - row["fds_before"]
            grown.append(f"{row['process']}: {more} more open descriptors than before")
        failed = [f"{n} of {key}" for key, n in row.items() if key.startswith(f"{STATUS}5")]
        if failed:
            grown.append(f"errors: {', '.join(failed)}")
        if row.get("late", 0) > LATE_SHARE * row.get("requests", 0):
            grown.append(f"{row['late']} arrivals found too many requests open: it fell behind")
    return grown


def main(argv: Sequence[str] | None = None) -> None:
    """Run the soak and report; exit status 1 if something grew."""
    made = parser("soak", "Memory and descriptors of a server over many short requests.")
    made.add_argument("--requests", type=int, default=REQUESTS)
    made.add_argument("--minutes", type=float, help="the embedded pair, for so long")
    made.add_argument("--load", type=float, default=LOAD, help="with --minutes, of its capacity")
    made.add_argument("--seed", type=int, default=0, help="of the requests")
    args = made.parse_args(argv)
    if args.quick:
        args.requests = min(args.requests, QUICK_REQUESTS)
    with launched(PAIR_ARGUMENTS if args.minutes else ARGUMENTS) as (url, root):
        if args.minutes:
            work = paced_soak(url, root, minutes=args.minutes, share=args.load, seed=args.seed)
            title = f"{args.minutes:g} minutes of the embedded pair at {args.load:.0%} of capacity"
        else:
            work = soak(url, root, requests=args.requests, seed=args.seed)
            title = f"{args.requests} short requests on {MODEL}"
        rows = asyncio.run(work)
    report(
        "soak",
        args,
        rows,
        title,
        shown=lambda row: row if "rss_end_mib" in row else {"process": "all"},
    )
    print_table("requests", [rows[-1]])
    grown = verdict(rows)
    print("\n".join(grown) or f"flat: no process changed by more than {ALLOWED_CHANGE:.0%}")
    sys.exit(bool(grown))


if __name__ == "__main__":
    main()
