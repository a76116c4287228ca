"""Whether a client can be believed: how busy it is, how late it reads, how late it sends.

A client that is too slow makes any server look slow: what it takes for itself is measured beside
the answers, and what may explain them is said. Knows no requests.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final, NamedTuple

import numpy as np

from bench.common import Row

TICK_S: Final = 0.01
BUSY_SHARE: Final = 0.7
"""Of one core; above it, events wait for the client often."""
LAG_SHARE: Final = 0.2
"""Of a latency; a client that reads so late changes it."""
NOTICED_MS: Final = 2.0
"""Less than this is the timer's own."""
RATE_SHARE: Final = 0.95


class Client(NamedTuple):
    """Processor time as a share of one core; by how much timers were late, in milliseconds."""

    cpu_share: float
    lag_p50_ms: float
    lag_p99_ms: float


class Watch:
    """Measures the loop that it runs in, from its making to :meth:`finish`."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._cpu_s, self._began_s = time.process_time(), time.perf_counter()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self._lags.append(time.perf_counter() - due)

    def finish(self) -> Client:
        """What it was like."""
        self._task.cancel()
        took_s = time.perf_counter() - self._began_s
        p50, p99 = np.percentile(self._lags or [0.0], (50, 99)).clip(0) * 1e3
        return Client((time.process_time() - self._cpu_s) / took_s, float(p50), float(p99))


def warnings(row: Row, capped: bool) -> list[str]:
    """What of ``row`` the client may have made, a sentence each; ``capped``: it held arrivals back.

    Reads ``client_*``, TTFT and ITL, ``p99_late_ms``, ``scheduled_per_s`` and ``sent_per_s``.
    """
    found = [_busy(row), _late_reader(row), _late_sender(row, capped), _slow_sender(row)]
    return [each for each in found if each]


def _busy(row: Row) -> str | None:
    share = row["client_cpu_share"]
    if share < BUSY_SHARE:
        return None
    return (
        f"the client is the bottleneck: it takes {share:.0%} of a core, and has one; "
        "ask for less, or run several clients"
    )


def _late_reader(row: Row) -> str | None:
    """The loop's lag is in every latency: each of its points is set against theirs."""
    p50, p99 = row["client_lag_p50_ms"], row["client_lag_p99_ms"]
    pairs = {"p50_itl_ms": p50, "p99_itl_ms": p99, "p50_ttft_ms": p50, "p99_ttft_ms": p99}
    touched = [
        f"{lag / row[name]:.0%} of {name}"
        for name, lag in pairs.items()
        if row[name] and lag >= max(NOTICED_MS, LAG_SHARE * row[name])
    ]
    if not touched:
        return None
    return (
        f"the client may be the bottleneck: it looks at what came {p50:.1f} ms late (p50; p99: "
        f"{p99:.1f}), {' and '.join(touched)}; give it a core of its own, or another machine"
    )


def _late_sender(row: Row, capped: bool) -> str | None:
    late: Any = row["p99_late_ms"]
    if late is None or late < max(NOTICED_MS, LAG_SHARE * (row["p99_ttft_ms"] or 0.0)):
        return None
    why = "they wait for --concurrency" if capped else "the client is too slow"
    return f"arrivals fall behind their schedule by {late:.0f} ms (p99): {why}"


def _slow_sender(row: Row) -> str | None:
    due, sent = row["scheduled_per_s"], row["sent_per_s"]
    if not due or not sent or sent >= RATE_SHARE * due:
        return None
    return f"{sent:.3g} requests/s were sent, {due:.3g} were due"
