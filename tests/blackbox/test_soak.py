"""A server does not grow: memory, descriptors, slots and blocks over many short requests."""

from __future__ import annotations

import asyncio
from functools import partial
from urllib.parse import urlsplit

import pytest

from bench.soak import (
    ARGUMENTS,
    PAIR_ARGUMENTS,
    Samples,
    change,
    floor_growth,
    paced_soak,
    soak,
    verdict,
    what_is_left,
)
from bench.soak_paced import PacedLoad, make_visit
from tests.serverproc import Server

FEW_SLOTS = ("--max-requests", "40")
"""With the usual 256 a short run would still be touching slots for the first time."""


def run(requests: int, *arguments: str) -> list[dict]:
    with Server([*ARGUMENTS, *arguments]) as server:
        rows = asyncio.run(soak(server.url, server.pid, requests=requests))
        assert not server.process.poll()
    assert [row["process"] for row in rows] == ["launcher", "worker 0", "gateway", "all"]
    return rows


def test_a_short_run_is_flat():
    rows = run(4_000, *FEW_SLOTS)
    assert rows[-1]["warm_up"] == 2_000
    assert verdict(rows) == []


@pytest.mark.slow
def test_a_long_run_is_flat():
    assert verdict(run(100_000)) == []


@pytest.mark.slow
def test_a_paced_run_adds_up():
    """Whether it is flat takes longer to say."""
    with Server(PAIR_ARGUMENTS) as server:
        rows = asyncio.run(paced_soak(server.url, server.pid, minutes=0.2, share=0.3, settle_s=3))
    assert [row["process"] for row in rows][-3:] == ["gateway", "solver", "all"]
    total = rows[-1]
    assert {key for key in total if key.startswith("status_")} == {"status_200"}
    assert total["left"] > 0
    assert total["capacity_per_s"] > total["requests_per_s"] > 0


def test_requests_arrive_at_their_pace_and_some_leave(server):
    address = urlsplit(server.url)
    load = PacedLoad((address.hostname, address.port), partial(make_visit, seed=1), per_s=40)
    asyncio.run(load.run(1.5))
    assert 30 < load.number < 100
    assert set(load.statuses) == {200}
    assert 0 < load.left < load.number / 2
    assert load.number - load.left <= load.statuses[200] <= load.number
    assert len(load.seconds) + load.left == load.number


def test_a_paced_run_is_the_same_each_time():
    visits = [make_visit(number, seed=3) for number in range(200)]
    assert visits == [make_visit(number, seed=3) for number in range(200)]
    assert visits != [make_visit(number, seed=4) for number in range(200)]
    assert 0.05 < sum(visit.leaves_after is not None for visit in visits) / 200 < 0.3


def test_errors_lateness_and_floors_are_found():
    total = {"process": "all", "requests": 1000, "late": 10, "status_200": 900, "status_429": 3}
    assert verdict([total]) == []
    assert verdict([total | {"status_503": 2}]) == ["errors: 2 of status_503"]
    assert len(verdict([total | {"late": 11}])) == 1
    assert floor_growth([500.0, 100.0, 500.0, 520.0, 104.0]) == pytest.approx(0.04)
    assert floor_growth([100.0]) == 0.0
    solver = {"process": "solver", "rss_change": 4.0, "floor_growth": 0.2}
    assert verdict([solver]) == []
    assert len(verdict([solver | {"floor_growth": 0.26}])) == 1
    assert len(verdict([solver | {"process": "gateway"}])) == 1


def test_growth_is_found():
    samples = Samples(fds_before=20, rss=[100.0, 104.0, 105.1], private=[9.0], fds=[20, 52, 21])
    assert change(samples.rss) == pytest.approx(0.051)
    assert verdict([samples.row("gateway"), {"process": "all"}]) == [
        "gateway: resident memory changed by 5.1%",
        "gateway: 1 more open descriptors than before",
    ]
    samples = Samples(fds_before=20, rss=[100.0, 104.9], private=[9.0, 9.0], fds=[20, 52, 20])
    assert verdict([samples.row("gateway")]) == []


def test_what_is_left_of_requests_is_found():
    model = {"name": "m", "total_blocks": 9, "free_blocks": 4, "cached_blocks": 5}
    model |= {"running": 0, "pending": 0, "kv_repairs": 0}
    idle = {"live": 0, "waiting": 0, "closing": 0}
    assert what_is_left({"requests": idle, "models": [model]}) == {}
    lost = model | {"cached_blocks": 4, "pending": 2}
    assert what_is_left({"requests": idle | {"closing": 1}, "models": [model, lost]}) == {
        "closing": 1,
        "m blocks": 1,
        "m pending": 2,
    }
