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
from bench.placement import placements
from trserve.ipc.layout import TRACE_RECORD_WORDS, TRACE_RECORDS
from trserve.ipc.trace import TraceWriter

Target = tuple[str, float, float]
"""What, as measured, and the most that it may be."""

COUNTS: Final = {"ladder": 20_000, "full": 5_000, "segments": 20, "re-prefill": 200, "trace": 2000}
QUICK_COUNTS: Final = {"ladder": 4_000, "full": 500, "segments": 4, "re-prefill": 20, "trace": 500}

_FLOOR: Final = """
On two cores the peer's core is idle, and has halted when the doorbell rings: waking it limits every
path that sleeps, and on a virtual machine it is the hypervisor that wakes. The bare wake by an
eventfd (eventfd-wake, nothing else done), and what the doorbell's path adds to it, p50:"""


def ladder_targets(rows: Sequence[Row]) -> Iterator[Target]:
    """The targets of the first table."""
    p50 = {(row["path"], row["placement"]): row["p50_us"] for row in rows}
    p99 = {(row["path"], row["placement"]): row["p99_us"] for row in rows}
    apart = placements()[-1]
    polled = p50["shm-poll", apart]
    yield "polled, p50 in us", polled, 2.0
    yield "polled, share of zmq-pickle", polled / p50["zmq-pickle", apart], 1 / 10
    for where in placements():
        doorbell = p50["shm-doorbell", where]
        yield f"doorbell, {where}, p50 in us", doorbell, 8.0
        yield f"doorbell, {where}, p99 in us", p99["shm-doorbell", where], 60.0
        yield (
            f"doorbell, {where}, share of zmq-pickle",
            doorbell / p50["zmq-pickle", where],
            1 / 2.5,
        )


def full_targets(rows: Sequence[Row]) -> Iterator[Target]:
    """The targets of the second table."""
    totals = {
        (row["placement"], row["batch"], row["context"]): row["p50_us"]
        for row in rows
        if row.get("stage") == "total"
    }
    for (where, batch, context), p50 in totals.items():
        most = 30.0 if batch == 1 else 10.0
        what = f"whole, {where}, batch {batch}"
        yield f"{what}, {context} tokens, p50 in us a request", p50 / batch, most
        short = totals[where, batch, CONTEXTS[0]]
        if context != CONTEXTS[0]:
            yield f"{what}, between the contexts, us", abs(p50 - short), max(2.0, 0.1 * short)


def trace_events(count: int) -> Row:
    """Microseconds to note one event in the ring that is always on, in batches of 100."""
    words = memoryview(bytearray(8 * TRACE_RECORD_WORDS * TRACE_RECORDS)).cast("q")
    note = TraceWriter(words).note
    times = [timeit.timeit(lambda: note(2, 7, 3, 9), number=100) * 1e4 for _ in range(count)]
    p50, p99 = (float(value) for value in np.percentile(times, (50, 99)))
    return {"path": "trace-event", "p50_us": p50, "p99_us": p99, "n": 100 * count}


def print_floor(rows: Sequence[Row]) -> None:
    """What of the doorbell's figures is the machine's, and not ours."""
    p50 = {(row["path"], row["placement"]): row["p50_us"] for row in rows}
    print(_FLOOR)
    for where in placements():
        wake, doorbell = p50["eventfd-wake", where], p50["shm-doorbell", where]
        print(f"  {where}: {wake:.1f} us, and {doorbell - wake:.1f} us more")


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
    print_floor(media)
    print_targets([*ladder_targets(media), *full_targets(whole), noted])


if __name__ == "__main__":
    main()
