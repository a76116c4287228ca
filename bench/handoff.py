"""What a handoff costs: the ladder of media, then the whole handoff through the real code.

Judged against targets, which are printed with whether they are met; a machine whose cores are
busy with other things misses them all.
"""

from __future__ import annotations

import timeit
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from bench.common import Row, parser, report
from bench.handoff_full import CONTEXTS, full_handoffs, re_prefills
from bench.handoff_ladder import ladder
from trserve.ipc.layout import TRACE_RECORD_WORDS, TRACE_RECORDS
from trserve.ipc.trace import TraceWriter

Target = tuple[str, float, float]
"""What, as measured, and the most that it may be."""

COUNTS: Final = {"ladder": 20_000, "full": 5_000, "segments": 20, "re-prefill": 200, "trace": 2000}
QUICK_COUNTS: Final = {"ladder": 4_000, "full": 500, "segments": 4, "re-prefill": 20, "trace": 500}


def ladder_targets(rows: Sequence[Row]) -> Iterator[Target]:
    """The targets of the first table."""
    p50 = {row["path"]: row["p50_us"] for row in rows}
    p99 = {row["path"]: row["p99_us"] for row in rows}
    usual = p50["zmq-pickle"]
    yield "polled, p50 in us", p50["shm-poll"], 2.0
    yield "doorbell, p50 in us", p50["shm-doorbell"], 8.0
    yield "doorbell, p99 in us", p99["shm-doorbell"], 60.0
    yield "polled, share of zmq-pickle", p50["shm-poll"] / usual, 1 / 10
    yield "doorbell, share of zmq-pickle", p50["shm-doorbell"] / usual, 1 / 2.5


def full_targets(rows: Sequence[Row]) -> Iterator[Target]:
    """The targets of the second table."""
    totals = {
        (row["batch"], row["context"]): row["p50_us"] for row in rows if row.get("stage") == "total"
    }
    for (batch, context), p50 in totals.items():
        most = 30.0 if batch == 1 else 10.0
        yield f"whole, batch {batch}, {context} tokens, p50 in us a request", p50 / batch, most
    short, long = CONTEXTS
    for batch in sorted({batch for batch, _ in totals}):
        apart = abs(totals[batch, long] - totals[batch, short])
        most = max(2.0, 0.1 * totals[batch, short])
        yield f"whole, batch {batch}, between the contexts, us", apart, most


def trace_events(count: int) -> Row:
    """Microseconds to note one event in the ring that is always on, in batches of 100."""
    words = memoryview(bytearray(8 * TRACE_RECORD_WORDS * TRACE_RECORDS)).cast("q")
    note = TraceWriter(words).note
    times = [timeit.timeit(lambda: note(2, 7, 3, 9), number=100) * 1e4 for _ in range(count)]
    p50, p99 = (float(value) for value in np.percentile(times, (50, 99)))
    return {"path": "trace-event", "p50_us": p50, "p99_us": p99, "n": 100 * count}


def print_targets(targets: Sequence[Target]) -> None:
    """One line a target."""
    for what, measured, most in targets:
        verdict = "met" if measured <= most else "MISSED"
        print(f"{verdict:>6}: {what}: {measured:.3g}, target at most {most:.3g}")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both tables and report."""
    args = parser("handoff", "Microseconds from one model to another.").parse_args(argv)
    counts = QUICK_COUNTS if args.quick else COUNTS
    media = ladder(counts["ladder"])
    whole = [
        *full_handoffs(counts["full"], counts["segments"]),
        *re_prefills(counts["re-prefill"]),
    ]
    event = trace_events(counts["trace"])
    rows = [*media, *whole, event]
    report("handoff", args, rows, "One-way between two processes; then by stage")
    noted = ("noting an event, p50 in us", event["p50_us"], 0.5)
    print_targets([*ladder_targets(media), *full_targets(whole), noted])


if __name__ == "__main__":
    main()
