"""Standard serving, the baseline: one server a model, one token a call, an external dispatcher.

``python -m bench.std_serving`` measures it from the client, beside each model alone; ``--baseline
official`` measures the original projects' ways (``std_official`` says what of them is faithful).
``--prove`` shows first that its servers are no slower than they should be: the throughput of whole
answers from a server of one model beside that of trserve's server of two whose other model is
idle. ``--serve`` answers clients. ``--profile-steps`` says where the time of a call goes.

On real models with r-stitch the dispatcher decides by entropy, from 20 logprobs a token
(``std_policy`` says how that differs from the exact one); anywhere else by seeded draws with the
same probabilities as trserve's.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final, NamedTuple

import uvloop

from bench.closed_loop import Until
from bench.common import Row, parser, report, track
from bench.endpoint import MetricsProbe, NotAvailableError, cpu_seconds, launched
from bench.prediction import missing_row, row_of, warmed
from bench.std_official import ways_of
from bench.systems import SINGLE, STANDARD, Endpoint, Setup, running
from bench.throughput_options import (
    add_arguments,
    concurrencies,
    setup_of,
    until_of,
    workload_of,
)
from bench.throughput_tables import plot, print_missing, short
from bench.workloads import Workload

PROVE_ROUNDS: Final = 11
QUICK_ROUNDS: Final = 5
PROVE_WINDOW: Final = Until(least_s=2.0, most_s=2.5, warm_up_s=0.5, batch_s=0.25)
ALLOWED: Final = 0.10
"""By how much a server of one model may differ from trserve with its other model idle."""


def run(
    systems: Sequence[str], setup: Setup, workload: Workload, counts: Sequence[int], until: Until
) -> list[Row]:
    """A row for each system and number of users."""
    rows = []
    for system in track(systems, "systems"):
        try:
            with running(system, setup) as up:
                for count in counts:
                    watched = warmed(until, setup, workload, count)
                    window = uvloop.run(up.measure(count, workload, watched))
                    rows.append(row_of(system, setup, workload, window))
        except NotAvailableError as error:
            rows.append(missing_row(system, setup, workload, str(error)))
    return rows


def prove(setup: Setup, workload: Workload, counts: Sequence[int], *, quick: bool) -> list[Row]:
    """For each model: its own server beside the server of all models with only it writing.

    Short windows alternate, so that both see the same machine, in the order A B B A; the median
    of the ratios of neighbours counts. Processor time for a token stands beside: other processes
    of the machine change it less.
    """
    rounds = QUICK_ROUNDS if quick else PROVE_ROUNDS
    rows = []
    for model in track(setup.models, "models"):
        with ExitStack() as stack:
            alone = launched([*setup.arguments([model]), "--router", "none"])
            both = launched([*setup.arguments(setup.models), "--router", "none"])
            single = Endpoint(stack.enter_context(alone))
            shared = Endpoint(stack.enter_context(both), only=model)
            for count in counts:
                pairs = [_pair(single, shared, count, workload, turn) for turn in range(rounds)]
                rows.append(_proof(model, workload, count, pairs))
    return rows


class Sample(NamedTuple):
    """One short window: tokens/s, and the server's processor time for a token."""

    tokens_per_s: float
    cpu_us: float


def _pair(
    single: Endpoint, shared: Endpoint, count: int, workload: Workload, turn: int
) -> tuple[Sample, Sample]:
    """Both, one after the other; every other turn the second comes first."""
    order = (shared, single) if turn % 2 else (single, shared)
    found = {up: uvloop.run(_sample(up, count, workload)) for up in order}
    return found[single], found[shared]


async def _sample(up: Endpoint, count: int, workload: Workload) -> Sample:
    probe = await MetricsProbe.open(up.address)
    before, began = await probe.read(), cpu_seconds(up.address)
    window = await up.measure(count, workload, PROVE_WINDOW)
    took, after = cpu_seconds(up.address) - began, await probe.read()
    probe.close()
    tokens = sum(after.tokens) - sum(before.tokens)
    return Sample(window.tokens_per_s, 1e6 * took / tokens)


def _proof(
    model: str, workload: Workload, count: int, pairs: Sequence[tuple[Sample, Sample]]
) -> Row:
    single, shared = zip(*pairs, strict=True)
    ratios = sorted(one.tokens_per_s / other.tokens_per_s for one, other in pairs)
    ratio = statistics.median(ratios)
    return {
        "model": model,
        "workload": workload.name,
        "concurrency": count,
        "std_tokens_per_s": statistics.median(each.tokens_per_s for each in single),
        "trserve_tokens_per_s": statistics.median(each.tokens_per_s for each in shared),
        "ratio": ratio,
        "ratio_lowest": ratios[0],
        "ratio_highest": ratios[-1],
        "std_cpu_us": statistics.median(each.cpu_us for each in single),
        "trserve_cpu_us": statistics.median(each.cpu_us for each in shared),
        "within_10_percent": abs(ratio - 1) <= ALLOWED,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, prove, profile or serve, and report."""
    made = parser("std_serving", "The baseline: one token a call, routed by a dispatcher.")
    add_arguments(made)
    made.add_argument("--baseline", default="standard", choices=("standard", "official"))
    made.add_argument("--prove", action="store_true", help="show that its servers are fast")
    made.add_argument("--profile-steps", action="store_true", help="where a call's time goes")
    made.add_argument("--serve", type=int, metavar="PORT", help="be the baseline, as a server")
    args = made.parse_args(argv)
    if args.quick and args.concurrency == made.get_default("concurrency"):
        args.concurrency = "1,4"
    setup, workload = setup_of(args), workload_of(args)
    title = f"{','.join(setup.models)} on {setup.device}, {setup.algorithm.shown}, {workload.name}"
    if args.serve is not None:
        from bench.std_server import serve

        serve(setup, args.serve)
    elif args.profile_steps:
        from bench.std_profile import profile

        report("std_serving", args, profile(setup), f"one call of the SLM's server; {title}")
    elif args.prove:
        rows = prove(setup, workload, concurrencies(args), quick=args.quick)
        report("std_serving", args, rows, f"whole answers, no routing; {title}")
    else:
        rows = _measured(args, setup, workload)
        report("std_serving", args, rows, title, plot, short)
        print_missing(rows)


def _measured(args: Namespace, setup: Setup, workload: Workload) -> list[Row]:
    official = args.baseline == "official"
    baselines = ways_of(setup.algorithm.name) if official else (STANDARD,)
    return run([*SINGLE, *baselines], setup, workload, concurrencies(args), until_of(args))


if __name__ == "__main__":
    main()
