"""What a handoff costs: the ladder of media, then the whole handoff through the real code.

Judged against targets, which are printed with whether they are met; a machine whose cores are
busy with other things misses them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from bench.common import Row, parser, report
from bench.handoff_ladder import ladder

HANDOFFS: Final = 20_000
QUICK_HANDOFFS: Final = 4_000


def ladder_targets(rows: Sequence[Row]) -> Iterator[tuple[str, float, float]]:
    """(what, measured, at most) of every target of the first table."""
    p50 = {row["path"]: row["p50_us"] for row in rows}
    p99 = {row["path"]: row["p99_us"] for row in rows}
    usual = p50["zmq-pickle"]
    yield "polled, p50 in us", p50["shm-poll"], 2.0
    yield "doorbell, p50 in us", p50["shm-doorbell"], 8.0
    yield "doorbell, p99 in us", p99["shm-doorbell"], 60.0
    yield "polled, share of zmq-pickle", p50["shm-poll"] / usual, 1 / 10
    yield "doorbell, share of zmq-pickle", p50["shm-doorbell"] / usual, 1 / 2.5


def print_targets(targets: Iterator[tuple[str, float, float]]) -> None:
    """One line a target."""
    for what, measured, most in targets:
        verdict = "met" if measured <= most else "MISSED"
        print(f"{verdict:>6}: {what}: {measured:.3g}, target at most {most:.3g}")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both tables and report."""
    args = parser("handoff", "Microseconds from one model to another.").parse_args(argv)
    rows = ladder(QUICK_HANDOFFS if args.quick else HANDOFFS)
    report("handoff", args, rows, "One-way, between two processes")
    print_targets(ladder_targets(rows))


if __name__ == "__main__":
    main()
