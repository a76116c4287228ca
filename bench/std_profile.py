"""Where the time of one call to the small model's server goes, beside the published profile.

A server of the small model alone answers calls of one token for one row that grows to its last
tokens, one call at a time. Inside the worker ``std_stopwatch`` times the parts of a step; the rest
of what the client waits (HTTP, the gateway's work on the request, queues and wake-ups between
processes, the answer) is the whole minus these. Knows no routing.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

import uvloop

from bench.common import Row
from bench.endpoint import Address, launched
from bench.std_dispatch import ModelClient
from bench.std_dispatch import Row as TokenRow
from bench.std_stopwatch import ENVIRONMENT, LEFT_OUT
from bench.systems import Setup
from bench.workloads import Workload

CALLS: Final = 200
EMBEDDED_ROW: Final = 1024
LONG_ROW: Final = 2048
_PUBLISHED_MS: Final = {
    "cache update": 12.12,
    "prefix match": 7.78,
    "lock": 6.49,
    "unlock": 5.13,
    "other": 4.08,
    "model": 1.56,
}
"""TokenRouter's profile of an SGLang server at the end of 2,048 tokens."""

REST: Final = "rest of the call"


def profile(setup: Setup) -> list[Row]:
    """A row for each part: milliseconds a call here and as published, and their shares."""
    length = LONG_ROW if setup.device == "emulated" else EMBEDDED_ROW
    with tempfile.TemporaryDirectory(prefix="trs-bench-") as folder:
        path = Path(folder) / "parts.json"
        arguments = [
            *setup.arguments(setup.models[:1]),
            "--router",
            "bench.std_stopwatch:Stopwatch",
        ]
        with launched(arguments, {ENVIRONMENT: str(path)}) as address:
            call_ms = uvloop.run(_calls(address, length))
        parts = json.loads(path.read_text())
    parts[REST] = call_ms - sum(parts.values())
    published_ms = sum(_PUBLISHED_MS.values())
    return [
        {
            "part": part,
            "ms": parts[part],
            "share": parts[part] / call_ms,
            "published_ms": _PUBLISHED_MS.get(part),
            "published_share": _PUBLISHED_MS.get(part, 0.0) / published_ms,
        }
        for part in (*_PUBLISHED_MS, REST)
    ]


async def _calls(address: Address, length: int) -> float:
    """Milliseconds of a call, the mean over the last CALLS tokens of a row of ``length``."""
    connection = await address.connect()
    row = TokenRow(Workload("profile", length - CALLS - LEFT_OUT - 1, 1).question(0, 0, 1).prompt)
    client = ModelClient(connection, 0, 0, ignore_eos=True)
    took: list[float] = []
    for _ in range(CALLS + LEFT_OUT):
        began = time.perf_counter()
        row.append((await client.token(row)).token)
        took.append(time.perf_counter() - began)
    connection.close()
    return 1e3 * statistics.mean(took[LEFT_OUT:])
