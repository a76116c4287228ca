"""A server does not grow: memory, descriptors, slots and blocks over many short requests."""

from __future__ import annotations

import asyncio

import pytest

from bench.soak import ARGUMENTS, Samples, change, soak, verdict, what_is_left
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
