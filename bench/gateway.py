"""``python -m bench.gateway``: what the gateway costs, beside a model that takes no time.

Its processor time is the gateway process's own (user and system, ``/proc/PID/stat``), so what the
worker and this client take is not in it; wall times are those of a machine that all three share.
The model is emulated: a step takes no time, its tokens are made up, the rest of the server is real.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, product
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import uvloop

from bench.common import Row, parser, report, track
from bench.endpoint import Address, launched
from bench.gateway_client import Client, connect_all, raise_file_limit
from bench.http_client import encode
from tests.procfs import command, descendants
from trserve import demo
from trserve.gateway.tokenizer import Tokenizer

STREAMS: Final = (1, 64, 1000)
CONNECTIONS: Final = 2000
SLOTS: Final = 1024
ROW_TOKENS: Final = 16_384
ENDLESS: Final = 16_000
"""Tokens of a stream, so that a new request now and then costs nothing beside them."""

NO_TIME_MS: Final = 0.001
PACED_MS: Final = {1: 2.0, 64: 10.0}
"""Steps so long that the gateway keeps up, by the number of streams; else 0.1 ms a stream."""


def _profile(step_ms: float) -> dict[str, Any]:
    chosen = "chosen: what is left is the server's own"
    model = {
        "name": "instant",
        "step": {"ms": step_ms, "source": chosen},
        "prefill": {"tokens_per_s": 1e9, "source": chosen},
    }
    profile = {"format": 1, "name": "instant", "max_model_len": ROW_TOKENS, "models": [model]}
    return {**profile, "description": "A model whose steps take no time, or one that is chosen."}


_QUESTION: Final = "What is 17 + 25? Explain each step in one short sentence, then give the result."
_TIMEOUT_S: Final = 120.0


class Gateway:
    """The gateway process of a server."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.pid = next(
            pid for pid in descendants(address.pid) if "trserve.gateway.main" in command(pid)
        )

    def cpu_s(self) -> float:
        """Processor time that it has taken so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def served(step_ms: float = NO_TIME_MS) -> Iterator[Gateway]:
    """A server with room for :data:`SLOTS` requests, and more of them in its queue."""
    with tempfile.NamedTemporaryFile("wb", suffix=".json") as profile:
        profile.write(orjson.dumps(_profile(step_ms)))
        profile.flush()
        settings: dict[str, Any] = {
            "--device": "emulated",
            "--profile": profile.name,
            "--max-requests": SLOTS,
            "--max-num-seqs": SLOTS,
            "--max-num-batched-tokens": 4 * SLOTS,
            "--kv-tokens": SLOTS * ROW_TOKENS,
            "--max-queue": 2 * CONNECTIONS,
            "--drain-timeout": 1,
        }
        arguments = [str(part) for pair in settings.items() for part in pair]
        with launched([*arguments, "--no-log-requests"]) as address:
            yield Gateway(address)


def _stream(tokens: int) -> bytes:
    body = {"prompt": [5, 6, 7], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return encode("POST", "/v1/completions", orjson.dumps({**body, "stream": True}))


async def first_bytes(gateway: Gateway, streams: int, least: int) -> tuple[list[float], int]:
    """Times to the first byte, in seconds, of ``streams`` at a time, and how many failed."""
    clients = await connect_all(gateway.address.host, gateway.address.port, streams)
    times: list[float] = []
    errors = 0
    while len(times) + errors < least:
        asked = [client.ask(_stream(8)) for client in clients]
        done = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), _TIMEOUT_S)
        for client, outcome in zip(clients, done, strict=True):
            if outcome is not None or client.status != 200:
                errors += 1
            else:
                times.append(client.first_s)
    for client in clients:
        client.close()
    return times, errors


async def tokens_written(gateway: Gateway) -> int:
    """By ``/metrics``, live streams included."""
    reader, writer = await asyncio.open_connection(gateway.address.host, gateway.address.port)
    writer.write(encode("GET", "/metrics"))
    text = (await reader.readuntil(b"trserve_overshoot_tokens_total")).decode()
    writer.close()
    name = f'trserve_generation_tokens_total{{model="{gateway.address.models[0]}"}} '
    return int(float(text.split(name)[1].split("\n")[0]))


async def per_token(gateway: Gateway, streams: int, seconds: float) -> Row:
    """Processor time a token while ``streams`` are open; one that ends is asked for again."""

    async def user(client: Client) -> None:
        while True:
            await client.ask(_stream(ENDLESS))

    clients = await connect_all(gateway.address.host, gateway.address.port, streams)
    async with asyncio.TaskGroup() as group:
        users = [group.create_task(user(client)) for client in clients]
        while not all(client.events > 1 for client in clients):
            await asyncio.sleep(0.05)
        tokens, cpu_s, events, began = await _counts(gateway, clients)
        await asyncio.sleep(seconds)
        cpu_s = gateway.cpu_s() - cpu_s
        events = sum(client.events for client in clients) - events
        took_s = time.perf_counter() - began
        tokens = await tokens_written(gateway) - tokens
        for each in users:
            each.cancel()
    for client in clients:
        client.close()
    return {
        "cpu_us_per_token": 1e6 * cpu_s / tokens,
        "cpu_us_per_event": 1e6 * cpu_s / events,
        "tokens_per_s": tokens / took_s,
        "tokens_per_event": tokens / events,
        "cpu_share": cpu_s / took_s,
    }


async def _counts(gateway: Gateway, clients: Sequence[Client]) -> tuple[int, float, int, float]:
    """Tokens, processor time, events and the time, all now."""
    tokens = await tokens_written(gateway)
    events = sum(client.events for client in clients)
    return tokens, gateway.cpu_s(), events, time.perf_counter()


def _percentiles(times: Sequence[float]) -> Row:
    p50, p99 = np.percentile(np.array(times) * 1e3, (50, 99))
    return {"ttfb_p50_ms": float(p50), "ttfb_p99_ms": float(p99)}


async def measure_streams(streams: int, seconds: float, *, paced: bool) -> Row:
    """One row.

    A model that takes no time outruns the gateway, which then gives several tokens in an event:
    ``paced``, it takes so long that each token has its own.
    """
    step_ms = PACED_MS.get(streams, streams / 10) if paced else NO_TIME_MS
    with served(step_ms) as gateway:
        times, errors = await first_bytes(gateway, streams, 200)
        row: Row = {"kind": "paced" if paced else "stream", "streams": streams}
        row |= await per_token(gateway, streams, seconds)
        return {**row, **_percentiles(times), "errors": errors}


async def measure_connections(count: int) -> Row:
    """``count`` connections at once, each with a request; those beyond the slots wait."""
    with served() as gateway:
        times, errors = await first_bytes(gateway, count, count)
        row: Row = {"kind": "connections", "streams": count}
        return {**row, **_percentiles(times), "errors": errors}


async def measure_whole(seconds: float, concurrency: int = 8) -> Row:
    """Chat requests without a stream, of one token each: what a request costs by itself."""
    body = {"messages": [{"role": "user", "content": _QUESTION}], "max_tokens": 1}
    raw = orjson.dumps({**body, "temperature": 0})
    request = encode("POST", "/v1/chat/completions", raw)
    with served() as gateway:
        clients = await connect_all(gateway.address.host, gateway.address.port, concurrency)
        for client in clients:  # templates are compiled, pools are filled
            await client.ask(request)
        cpu_s, began = gateway.cpu_s(), time.perf_counter()
        ends = began + seconds

        async def user(client: Client) -> list[float]:
            times: list[float] = []
            while time.perf_counter() < ends:
                await asyncio.wait_for(client.ask(request), _TIMEOUT_S)
                if client.status == 200:
                    times.append(client.first_s)
            return times

        times = list(chain.from_iterable(await asyncio.gather(*map(user, clients))))
        cpu_s, took_s = gateway.cpu_s() - cpu_s, time.perf_counter() - began
        for client in clients:
            client.close()
    encode_us = tokenizer_us()
    whole_us = 1e6 * cpu_s / len(times)
    return {
        "kind": "whole",
        "streams": concurrency,
        "requests_per_s": len(times) / took_s,
        "cpu_us_per_request": whole_us,
        "tokenizer_us": encode_us,
        "cpu_us_beyond_tokenizer": whole_us - encode_us,
        **_percentiles(times),
        "errors": 0,
    }


def tokenizer_us() -> float:
    """What encoding that request's prompt takes, in this process: the best of many."""
    tokenizer = Tokenizer.load(demo.model_path("tiny"))
    text = tokenizer.render_chat([{"role": "user", "content": _QUESTION}])
    best = float("inf")
    for _ in range(20):
        began = time.process_time()
        for _ in range(200):
            tokenizer.encode(text, add_special_tokens=False)
        best = min(best, (time.process_time() - began) / 200)
    return 1e6 * best


async def _measure(args: argparse.Namespace) -> list[Row]:
    seconds = 2.0 if args.quick else args.seconds
    rows = [
        await measure_streams(streams, seconds, paced=paced)
        for streams, paced in track([*product(args.streams, (False, True))], "streams")
        if args.only in (None, "streams")
    ]
    if args.only in (None, "connections"):
        rows.append(await measure_connections(CONNECTIONS))
    if args.only in (None, "whole"):
        rows.append(await measure_whole(seconds))
    return rows


def _counts_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    made = parser("gateway", __doc__ or "")
    made.add_argument("--streams", type=_counts_of, default=STREAMS, metavar="N,N")
    made.add_argument("--only", choices=("streams", "connections", "whole"))
    made.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    args = made.parse_args()
    raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(_measure(args))
    report("gateway", args, rows, "CPU of the gateway beside a model that takes no time")


if __name__ == "__main__":
    main()
