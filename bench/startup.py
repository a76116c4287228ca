"""How long a person waits: for ``trserve --help`` and from the command to the ready line.

Everything is warm (the files are in the page cache) and in fresh processes.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from bench.common import Row, parser, report, track
from tests.serverproc import Server

HELP_RUNS = 7
READY_RUNS = 5
QUICK_READY_RUNS = 3


def help_s() -> float:
    """Seconds of one ``trserve --help``, interpreter start included."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "trserve", "--help"], capture_output=True, check=True)
    return time.perf_counter() - start


def ready_s() -> float:
    """Seconds from starting ``trserve launch`` on the embedded pair to its ready line."""
    start = time.perf_counter()
    with Server(["--device", "cpu"]):
        return time.perf_counter() - start


def measure(name: str, once: Callable[[], float], runs: int) -> Row:
    """One row: the median of ``runs`` after a run that warms up, with the extremes."""
    once()
    seconds = sorted(once() for _ in track(range(runs), name))
    return {
        "measure": name,
        "p50_s": statistics.median(seconds),
        "min_s": seconds[0],
        "max_s": seconds[-1],
        "n": runs,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measures both and reports."""
    args = parser("startup", "Time to the help text and to the ready line.").parse_args(argv)
    rows = [
        measure("help", help_s, HELP_RUNS),
        measure("ready", ready_s, QUICK_READY_RUNS if args.quick else READY_RUNS),
    ]
    report("startup", args, rows, "Start-up")


if __name__ == "__main__":
    main()
