"""Throughput of routed decoding: algorithm x workload x users x system, beside what is predicted.

Systems: each model alone, standard serving (``std_serving``), and trserve with the schedulers
step-sync (a step starts when all models have finished theirs), model-sync (one model runs at a
time), eager (B = 1), delayed-fixed (the solver's best B at the asked probabilities) and
delayed-auto. A closed loop holds the number of users constant; tokens are counted by time. What a
server refuses is reported as not available, with its words.

``predicted_tokens_per_s`` is T(B) of the Markov model at the realised probabilities and the
profile's latencies. ``--reproduce`` runs the checks of the scheduling model on emulated devices
(``throughput_reproduce``). ``--sweep`` measures several thresholds of one N beside the predicted
curve (``throughput_sweep``), ``--timeline`` draws the steps of the models under each system
(``throughput_timeline``). Otherwise published figures stand beside (``throughput_tables``);
compare ratios, not absolute numbers.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: more only spin in the solver

import importlib.util
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import uvloop

from bench import throughput_sweep, throughput_timeline, two_hosts
from bench.common import Row, parser, report, track
from bench.endpoint import NotAvailableError
from bench.prediction import best, latencies, missing_row, row_of, system_at, warmed
from bench.std_official import OFFICIAL, R2R
from bench.systems import SCHEDULED, SYSTEMS, Setup, Vector, running
from bench.throughput_options import (
    add_arguments,
    concurrencies,
    names,
    setup_of,
    until_of,
    workload_of,
)
from bench.throughput_tables import (
    plot,
    print_hosts,
    print_missing,
    print_published,
    print_ratios,
    short,
)
from bench.workloads import WORKLOADS, Workload

FIXED: Final = ("delayed-fixed",)


def cells(args: Namespace) -> list[tuple[Setup, Workload]]:
    """The combinations of algorithm and workload that the flags ask for."""
    algorithms = [args.algorithm] if args.algorithms is None else names(args.algorithms)
    workloads = [workload_of(args)]
    if args.workloads is not None:
        workloads = [WORKLOADS[name].scaled(args.scale) for name in names(args.workloads)]
    return [(setup_of(args, each), workload) for each in algorithms for workload in workloads]


def measure_cell(
    setup: Setup, workload: Workload, systems: Sequence[str], args: Namespace
) -> list[Row]:
    """A row for each system and number of users."""
    rows: list[Row] = []
    for system in track(systems, workload.name):
        try:
            rows += _system(system, setup, workload, args)
        except NotAvailableError as error:
            rows.append(missing_row(system, setup, workload, str(error)))
        print(f"{system}: done", file=sys.stderr)
    return rows


def _system(system: str, setup: Setup, workload: Workload, args: Namespace) -> list[Row]:
    until = until_of(args)
    if system == "delayed-auto":
        until = replace(until, warm_up_s=throughput_timeline.WARM_UP_S)
    if system != "delayed-fixed":
        with running(system, setup) as up:
            windows = [
                uvloop.run(up.measure(count, workload, warmed(until, setup, workload, count)))
                for count in concurrencies(args)
            ]
        return [row_of(system, setup, workload, window) for window in windows]
    rows = []
    for count in concurrencies(args):
        vector = fixed_vector(setup, count, args.batch_threshold)
        with running(system, setup, vector) as up:
            watched = warmed(until, setup, workload, count)
            window = uvloop.run(up.measure(count, workload, watched))
        rows.append(row_of(system, setup, workload, window, vector))
    return rows


def fixed_vector(setup: Setup, count: int, asked: str | None) -> Vector:
    """The flag's thresholds, else the solver's best.

    Raises NotAvailableError where neither is there: on devices without a profile.
    """
    if asked is not None:
        return tuple(int(value) for value in names(asked))
    curves = latencies(setup, setup.algorithm.values)
    if curves is None:
        raise NotAvailableError("no profile to choose thresholds by; give --batch-threshold 1,3")
    return best(system_at(setup.algorithm.name, setup.algorithm.values, curves), count).vector


def one_number(args: Namespace) -> None:
    """A sweep or a timeline, of one algorithm, workload and number of users."""
    (setup, workload), *more = cells(args)
    count, *others = concurrencies(args)
    if more or others:
        sys.exit("--sweep and --timeline take one --concurrency, one algorithm and one workload")
    title = f"{','.join(setup.models)} on {setup.device}, {setup.algorithm.shown}, N={count}"
    if args.sweep is not None:
        rows = throughput_sweep.sweep(setup, workload, count, args.sweep, until_of(args))
        plotted, table = throughput_sweep.plot, throughput_sweep.shown
    else:
        chosen = [
            (each, fixed_vector(setup, count, args.batch_threshold) if each in FIXED else None)
            for each in names(args.systems)
            if each in SCHEDULED
        ]
        rows = throughput_timeline.timelines(setup, workload, chosen, count, args.timeline_s)
        plotted, table = throughput_timeline.plot, throughput_timeline.shown
    report("throughput", args, rows, title, plotted, table)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    made = parser("throughput", "Routed decoding: systems, users, workloads.")
    add_arguments(made)
    made.add_argument("--systems", default=",".join(SYSTEMS), metavar="A,B")
    made.add_argument("--algorithms", metavar="A,B", help="several in place of --algorithm")
    made.add_argument("--workloads", metavar="A,B", help="several in place of --workload")
    made.add_argument("--batch-threshold", metavar="1,3", help="of delayed-fixed")
    made.add_argument(
        "--sweep",
        nargs="*",
        metavar="1,3",
        help=f"these thresholds (default: all) of one N (default: {throughput_sweep.DEFAULT_N})",
    )
    made.add_argument("--timeline", action="store_true", help="the models' steps, of one N")
    made.add_argument("--timeline-s", type=float, default=1.0, metavar="S", help="how much of them")
    made.add_argument(
        "--hosts",
        type=int,
        choices=(1, 2),
        default=1,
        help="2: eager on one host beside eager with the last model at another one, over tcp",
    )
    made.add_argument("--reproduce", action="store_true", help="the scheduling model's checks")
    made.add_argument(
        "--parts", default="1,2,3,4,5,6", metavar="1,2", help="of --reproduce: which of its checks"
    )
    args = made.parse_args(argv)
    if args.hosts == 2:
        args.systems = f"eager,{two_hosts.SYSTEM}"
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        made.error("--plot needs matplotlib: pip install 'trserve[plot]'")
    if args.concurrency == made.get_default("concurrency"):
        if args.sweep is not None or args.timeline:
            args.concurrency = str(throughput_sweep.DEFAULT_N)
        elif args.quick:
            args.concurrency = "1,4"
    if args.reproduce:
        from bench.throughput_reproduce import reproduce

        rows, ok = reproduce(names(args.parts), quick=args.quick)
        report("throughput", args, rows, "the scheduling model's checks", plot, short)
        sys.exit(not ok)
    unknown = set(names(args.systems)) - {*SYSTEMS, *OFFICIAL, R2R, two_hosts.SYSTEM}
    if unknown:
        made.error(f"--systems: no system {', '.join(sorted(unknown))}; there are {SYSTEMS}")
    if args.sweep is not None or args.timeline:
        one_number(args)
        return
    rows = []
    for setup, workload in cells(args):
        rows += measure_cell(setup, workload, names(args.systems), args)
    first, _ = cells(args)[0]
    title = f"{','.join(first.models)} on {first.device}, {first.algorithm.shown}"
    report("throughput", args, rows, title, plot, short)
    print_missing(rows)
    print_ratios(rows)
    if args.hosts == 2:
        print_hosts(rows)
    print_published(sorted({setup.algorithm.name for setup, _ in cells(args)}))


if __name__ == "__main__":
    main()
