"""A trserve server as something to measure: its subprocess, its streaming users, its counters.

Prompts are token ids; every user keeps one connection. What a client reads is counted by the
server itself (``/metrics`` counts what the gateway has accepted, live answers included), so that
no client parses a chunk. Knows nothing of windows, systems or tables.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from bench.closed_loop import Counts, Record
from bench.http_client import Connection, encode
from bench.workloads import Question, Workload
from tests.procfs import descendants
from tests.serverproc import Server, StartFailedError

ANSWER_TIMEOUT_S: Final = 900.0
SCRAPE_TIMEOUT_S: Final = 30.0
READY_TIMEOUT_S: Final = 120.0
ADMIN_TIMEOUT_S: Final = 10.0
COMPLETIONS: Final = "/v1/completions"
ROUTING: Final = "/v1/trserve/routing"
_SAMPLE: Final = re.compile(
    rb"^(trserve_\w+_total|trserve_batch_threshold|trserve_step_latency_seconds)"
    rb"(?:\{([^}]*)\})? (\S+)$",
    re.MULTILINE,
)


class NotAvailableError(Exception):
    """This server cannot be had in that setting; the text says why, in the server's words."""


@dataclass(frozen=True)
class Address:
    """Where a server listens, its models (the entry model first) and its launcher's process."""

    host: str
    port: int
    models: tuple[str, ...]
    pid: int

    async def connect(self) -> Connection:
        return await Connection.open(self.host, self.port)


@contextmanager
def launched(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    ready_timeout_s: float = READY_TIMEOUT_S,
    said: list[str] | None = None,
) -> Iterator[Address]:
    """A server on a free port, drained afterwards; ``environment`` is added to this process's.

    ``said`` gets the lines of its standard error, whatever its end.
    Raises NotAvailableError where it refuses its settings (exit codes 2 and 3).
    """
    server = Server(arguments, environment, ready_timeout_s=ready_timeout_s)
    try:
        with server:
            found = urlsplit(server.url)
            assert found.hostname is not None and found.port is not None
            yield Address(found.hostname, found.port, tuple(server.models), server.pid)
            server.stop()
    except StartFailedError as error:
        if error.code in (2, 3):
            raise NotAvailableError(last_line(error.stderr)) from error
        raise
    finally:
        if said is not None:
            said += server.stderr.splitlines()


async def set_router(address: Address, key: str, values: Mapping[str, float]) -> None:
    """Set the router's ``values`` as an administrator does; returns once all workers have them."""
    connection = await address.connect()
    body = orjson.dumps({"router": dict(values)})
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    try:
        await connection.exchange(encode("POST", ROUTING, body, headers), ADMIN_TIMEOUT_S)
    finally:
        connection.close()


def cpu_seconds(address: Address) -> float:
    """Processor time that the server's living processes have taken so far."""
    ticks = 0
    for pid in (address.pid, *descendants(address.pid)):
        # The name, in parentheses, may hold anything; user and system time are the 14th and 15th.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def last_line(text: str) -> str:
    """The last line of an error message that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


@dataclass(frozen=True)
class Asked:
    """What every request of a run asks for beside its prompt."""

    workload: Workload
    seed: int = 0
    trserve: Mapping[str, Any] = field(default_factory=dict)

    def body(self, question: Question) -> bytes:
        """The body of a request, as a stream that ends with its usage."""
        asked: dict[str, Any] = {
            "prompt": list(question.prompt),
            "max_tokens": question.max_tokens,
            "temperature": 0,
            "seed": self.seed + question.number,
            "ignore_eos": self.workload.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.trserve:
            asked["trserve"] = dict(self.trserve)
        return orjson.dumps(asked)


class StreamUser:
    """A user of the endpoint; ``number`` of ``users`` sets which prompts and where it begins."""

    def __init__(self, address: Address, asked: Asked, number: int, users: int) -> None:
        self._address = address
        self._asked = asked
        self._number = number
        self._users = users

    async def run(self, record: Record) -> None:
        """Ask without end; the connection is closed when this is cancelled."""
        connection = await self._address.connect()
        try:
            for turn in range(1_000_000):
                await self._ask(connection, record, turn)
        finally:
            connection.close()

    async def _ask(self, connection: Connection, record: Record, turn: int) -> None:
        question = self._asked.workload.question(turn, self._number, self._users)
        body = self._asked.body(question)
        began = time.perf_counter()
        tail = await connection.stream(
            encode("POST", COMPLETIONS, body),
            ANSWER_TIMEOUT_S,
            lambda came: record.first_token(began, came),
        )
        if b"data: [DONE]" not in tail:
            raise RuntimeError(f"a stream ended without [DONE]: {tail[-300:]!r}")
        record.ended(began, time.perf_counter())


class MetricsProbe:
    """Reads ``/metrics``; make it with :meth:`open`."""

    def __init__(self, connection: Connection, models: Sequence[str]) -> None:
        self._connection = connection
        self._models = models

    @classmethod
    async def open(cls, address: Address) -> MetricsProbe:
        return cls(await address.connect(), address.models)

    async def read(self) -> Counts:
        """The totals, at the middle of the time that the scrape took."""
        if self._connection.closed:  # a server closes one that sends nothing during a warm-up
            self._connection = await self._connection.again()
        asked = time.perf_counter()
        text = await self._connection.exchange(encode("GET", "/metrics"), SCRAPE_TIMEOUT_S)
        return counts_of(text, self._models, (asked + time.perf_counter()) / 2)

    def close(self) -> None:
        self._connection.close()


def counts_of(text: bytes, models: Sequence[str], at_s: float) -> Counts:
    """What a page of metrics says; ``extra`` has all totals, as ``name{labels}``."""
    found: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(text):
        key = f"{name.decode()}{{{labels.decode()}}}" if labels else name.decode()
        found[key] = float(value)

    def of_models(name: str) -> list[float]:
        keys = [f'{name}{{model="{model}"}}' for model in models]
        return [found[key] for key in keys] if all(key in found for key in keys) else []

    return Counts(
        at_s,
        tuple(map(int, of_models("trserve_generation_tokens_total"))),
        int(found["trserve_handoffs_total"]),
        {key: value for key, value in found.items() if key.partition("{")[0].endswith("_total")},
        tuple(map(int, of_models("trserve_batch_threshold"))),
        tuple(1e3 * seconds for seconds in of_models("trserve_step_latency_seconds")),
    )
