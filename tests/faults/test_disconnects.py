"""Clients that go away at any point: before, in the middle of or after their answer, politely or
not. Whatever they held is free a second later."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from random import Random
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.faults.streams import COMPLETIONS, check_nothing_held, request
from tests.machine_speed import slowness
from tests.serverproc import Server, concurrently, wait_until

FREE_WITHIN_S = 1.0
AT_ONCE = 64


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(["--device", "cpu", "--max-requests", "80"]) as running:
        yield running


def whole(number: int) -> dict[str, Any]:
    """A request whose answer comes in one piece."""
    return {key: value for key, value in request(number).items() if key != "stream_options"}


def go_away(server: Server, number: int) -> None:
    """Send some of a request or all of it, read some of the answer or none, and close."""
    random, url = Random(number), urlsplit(server.url)
    fields = {**request(number), "stream": True} if random.random() < 0.7 else whole(number)
    body = json.dumps(fields).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n\r\n"
    message = head.encode() + body
    with socket.create_connection((url.hostname, url.port), timeout=30) as client:
        if random.random() < 0.1:
            client.sendall(message[: random.randrange(len(message))])
            return
        client.sendall(message)
        client.settimeout(random.choice([0.0, 0.01, 0.1, 0.5]) or 0.001)
        wanted = random.choice([0, 1, 500, 5_000, 50_000])
        try:
            while wanted > 0 and (part := client.recv(wanted)):
                wanted -= len(part)
        except TimeoutError:
            pass
        if random.random() < 0.5:  # a reset instead of an orderly end
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def held(server: Server) -> dict[str, Any]:
    report = server.request("GET", "/health").json()
    models = report["models"]
    return {
        "requests": sum(report["requests"].values()),
        "resident": sum(model["running"] + model["pending"] for model in models),
        "blocks": sum(
            model["total_blocks"] - model["free_blocks"] - model["cached_blocks"]
            for model in models
        ),
    }


def test_clients_that_go_away_leave_nothing(server, full):
    expected = server.post(COMPLETIONS, whole(1))["choices"][0]["token_ids"]
    count = 1000 if full else 150
    concurrently(lambda number: go_away(server, number), range(count), AT_ONCE)
    gone = time.monotonic()
    left = wait_until(lambda: held(server), lambda now: not any(now.values()), 10.0)
    seconds = time.monotonic() - gone
    print(f"{count} clients: nothing is held {seconds:.2f} s after the last went away")
    assert not any(left.values()), left
    assert seconds < FREE_WITHIN_S * slowness()
    check_nothing_held(server)
    assert server.post(COMPLETIONS, whole(1))["choices"][0]["token_ids"] == expected
