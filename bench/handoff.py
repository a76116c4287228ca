"""What a handoff costs: the ladder of media, then the whole handoff through the real code.

Judged against targets, which are printed with whether they are met; a machine whose cores are
busy with other things misses them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from bench.common import Row, parser, report
from bench.handoff_full import CONTEXTS, full_handoffs, re_prefills
from bench.handoff_ladder import ladder

Target = tuple[str, float, float]
"""What, as measured, and the most that it may be."""

HANDOFFS: Final = {"ladder": 20_000, "full": 5_000, "segments": 20, "re-prefill": 200}
QUICK_HANDOFFS: Final = {"ladder": 4_000, "full": 500, "segments": 4, "re-prefill": 20}


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


def print_targets(targets: Sequence[Target]) -> None:
    """One line a target."""
    for what, measured, most in targets:
        verdict = "met" if measured <= most else "MISSED"
        print(f"{verdict:>6}: {what}: {measured:.3g}, target at most {most:.3g}")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both tables and report."""
    args = parser("handoff", "Microseconds from one model to another.").parse_args(argv)
    counts = QUICK_HANDOFFS if args.quick else HANDOFFS
    media = ladder(counts["ladder"])
    whole = [
        *full_handoffs(counts["full"], counts["segments"]),
        *re_prefills(counts["re-prefill"]),
    ]
    report("handoff", args, [*media, *whole], "One-way between two processes; then by stage")
    print_targets([*ladder_targets(media), *full_targets(whole)])


if __name__ == "__main__":
    main()
