"""How far a fleet goes: SLM workers per LLM worker, and what one front server takes.

The first table is computed: the Markov model's throughput of one SLM worker with ``N`` requests
whose LLM is as fast as it is for one group alone, with a network between them and both eager (as
models at other hosts are); and how many such workers an LLM worker serves until its steps, at their
widest, are busy for ``LOAD`` of the time. For routers that visit for one token: r2r, citer, co-llm,
confidence.

The second is measured: processor time of the front server for each event that it passes on, between
a group that only streams and clients that only read, in processes of their own. The third too: that
of a link agent and an edge port for each visit, with the embedded pair at two loopback addresses.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

from bench.closed_loop import Counts, Until
from bench.common import Row, parser, print_table, report
from bench.endpoint import Address, MetricsProbe
from bench.systems import Algorithm, Endpoint, Setup
from bench.two_hosts import two_hosts
from bench.workloads import Workload
from tests.procfs import command, cpu_seconds, descendants
from trserve.cluster.front_server import FrontServer
from trserve.emulated.profile import load_profile
from trserve.sched.algorithms import behaviour
from trserve.sched.search import evaluate
from trserve.sched.system import make_system

LOAD: Final = 0.8
WIDEST: Final = 64
TITLES: Final = {
    "planned": "SLM workers per LLM worker",
    "front": "the front server",
    "link": "both ends of a link",
}
_BUDGET_S: Final = 5.0
_END_S: Final = 150.0


def planned(profile_name: str, ps: Sequence[float], n: int, network_ms: float) -> list[Row]:
    """One row for each share ``p`` of the SLM's steps that are routed."""
    profile = load_profile(profile_name)
    curves = [model.step.curve for model in profile.models]
    widest_ms = _at(curves[1], WIDEST)
    rows: list[Row] = []
    for p in ps:
        matrices = behaviour("r2r", [p])
        delays = [[0.0, network_ms], [network_ms, 0.0]] if network_ms else None
        system = make_system(
            matrices.routing.tolist(), matrices.tokens.tolist(), curves, delay_ms=delays
        )
        solution = evaluate(system, n, (1, 1), budget_s=_BUDGET_S)
        tokens_per_s = solution.tokens_per_s
        visits_per_s = p * tokens_per_s
        capacity = LOAD * WIDEST / widest_ms * 1e3
        rows.append(
            {
                "part": "planned",
                "profile": profile_name,
                "p": p,
                "concurrency": n,
                "network_ms": network_ms,
                "method": solution.method,
                "tokens_per_s": tokens_per_s,
                "visits_per_s": visits_per_s,
                "slm_workers_per_llm_worker": capacity / visits_per_s,
                "fleet_tokens_per_s_per_llm_worker": capacity / p,
            }
        )
    return rows


def _at(curve: object, width: int) -> float:
    if isinstance(curve, dict):
        return float(curve[max(point for point in curve if int(point) <= width)])
    assert isinstance(curve, int | float)
    return float(curve)


def measured(streams: int, chunks: int) -> Row:
    """Processor time of a front server with so many streams of so many events."""
    ends = [sys.executable, "-m", "bench.fleet_ends"]
    pipe = subprocess.PIPE
    group = subprocess.Popen([*ends, "group", str(chunks)], stdin=pipe, stdout=pipe, text=True)
    try:
        assert group.stdout is not None
        url = group.stdout.readline().strip()
        return asyncio.run(_measure(url, ends, streams, chunks))
    finally:
        group.communicate("\n", timeout=_END_S)


async def _measure(url: str, ends: list[str], streams: int, chunks: int) -> Row:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    front = FrontServer(listener, 1, None)
    front.groups.move(0, url, "")
    over = asyncio.Event()

    async def until() -> int:
        await over.wait()
        return 0

    served = asyncio.create_task(front.serve(until, _END_S))
    while not front.groups.all[0].ready:
        await asyncio.sleep(0.01)
    own = f"http://127.0.0.1:{listener.getsockname()[1]}"
    began, wall = time.process_time(), time.perf_counter()
    clients = await asyncio.create_subprocess_exec(
        *ends, "clients", own, str(streams), stdout=subprocess.PIPE
    )
    said, _ = await asyncio.wait_for(clients.communicate(), _END_S)
    spent, took = time.process_time() - began, time.perf_counter() - wall
    over.set()
    await served
    events = int(said)
    assert events == streams * chunks, f"{events} of {streams * chunks} events came"
    return {
        "part": "front",
        "streams": streams,
        "events": events,
        "events_per_s": events / took,
        "cpu_us_per_event": spent / events * 1e6,
        "cpu_share": spent / took,
    }


def link_cost(quick: bool) -> Row:
    """Processor time of both ends of a link for each visit, at 4 requests and p = 0.35."""
    setup = Setup(("tiny", "small"), "cpu", Algorithm("r2r", (0.35,)))
    until = Until(tokens=2000 if quick else 20_000, least_s=3.0, most_s=60.0)
    with two_hosts(setup) as address:
        before = _ends()
        window = asyncio.run(Endpoint(address).measure(4, Workload("fleet", 20, 200), until))
        spent = {name: seconds - before[name] for name, seconds in _ends().items()}
        counts = asyncio.run(_counts(address))
    visits = counts.handoffs / 2
    row: Row = {
        "part": "link",
        "visits": visits,
        "visits_per_s": window.handoffs / 2 / window.seconds,
    }
    return row | {f"{name}_us_per_visit": s / visits * 1e6 for name, s in spent.items()}


def _ends() -> dict[str, float]:
    """Processor seconds of the agent and the port that were started from here."""
    commands = {pid: command(pid) for pid in descendants(os.getpid())}
    return {
        name: sum(cpu_seconds(pid) for pid, line in commands.items() if f"edge.{name}_main" in line)
        for name in ("agent", "port")
    }


async def _counts(address: Address) -> Counts:
    probe = await MetricsProbe.open(address)
    try:
        return await probe.read()
    finally:
        probe.close()


def main() -> int:
    """Compute, measure, report."""
    arguments = parser("fleet", __doc__ or "")
    arguments.add_argument("--profile", default="a100-0.6b-32b")
    arguments.add_argument("--p", default="0.02,0.05,0.1,0.2,0.35")
    arguments.add_argument("--concurrency", type=int, default=16)
    arguments.add_argument("--network-ms", default="0,0.1,1,10", help="one way")
    args = arguments.parse_args()
    ps = [float(part) for part in args.p.split(",")]
    rows: list[Row] = []
    for network_ms in (float(part) for part in args.network_ms.split(",")):
        rows += planned(args.profile, ps, args.concurrency, network_ms)
    for streams in (1, 16) if args.quick else (1, 16, 64):
        rows.append(measured(streams, 100 if args.quick else 400))
    rows.append(link_cost(args.quick))
    titles = {
        "planned": "SLM workers per LLM worker",
        "front": "the front server",
        "link": "a link",
    }
    for part, title in titles.items():
        print_table(title, [row for row in rows if row["part"] == part])
    report("fleet", args, rows, "fleet", shown=lambda _: {})
    return 0


if __name__ == "__main__":
    sys.exit(main())
