"""The flags of ``trserve plan``. Knows nothing of what they mean; imports nothing but click."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from trserve.exits import one_line_errors

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_OUTPUT = click.Path(dir_okay=False, path_type=Path)

_HELP = """Compute the best batch thresholds and the throughput they yield.

A worker that waits until B requests are runnable computes fewer, wider steps. This solves the
Markov model of that trade for every concurrency N, and prints the best B (one number a model), the
tokens per second, those of eager execution (B = 1 everywhere), and the gain.

\b
    trserve plan --latency 6.0,27.9 --routing 0.35 --concurrency 1,2,4,8,16
    trserve plan --latency 6.0,27.9 --algorithm r-stitch --routing 0.1,0.8
    trserve plan --latency 6,10,28 --algorithm me --routing 0.5,0.3,0.2
    trserve plan --system system.json --trace requests.jsonl

A system file is JSON: {"P": [[...]], "C": [[...]], "D": optional [[ms]], "latency_ms": [number or
{"1": ms, "8": ms}], "delta_ms": 0.1}. P: where a step sends its request; C: the tokens it commits.

A trace has one JSON object a line, a request each: {"visits": [[model, steps], ...]} in order, or
[model, steps, tokens], and optionally "arrival_ms" (in all lines or in none).
"""


def _flag(name: str, help: str, **more: Any) -> click.Option:
    return click.Option([name], help=help, **more)


def _parameters() -> list[click.Parameter]:
    return [
        _flag(
            "--latency",
            "Milliseconds of a step of each model; 1:6.0/8:7.5 for a curve over the batch width.",
            metavar="MS,MS",
        ),
        _flag(
            "--algorithm",
            "How requests travel.  [default: r2r]",
            type=click.Choice(["r2r", "citer", "co-llm", "confidence", "r-stitch", "me"]),
        ),
        _flag(
            "--routing",
            "Its probabilities: p; for r-stitch p,q; for me one weight a model.",
            metavar="P,...",
        ),
        _flag("--system", "P, C, D and latencies as JSON, instead of the above.", type=_FILE),
        _flag(
            "--concurrency",
            "Numbers of requests in flight.",
            default="1,2,4,8,16",
            show_default=True,
            metavar="N,...",
        ),
        _flag("--batch-threshold", "Evaluate these thresholds only.", metavar="B,B"),
        _flag("--delta-ms", "The quantum of time.  [default: 0.1]", type=float),
        _flag(
            "--time-budget-s",
            "Processor seconds per concurrency; past them an approximation is used, and named.",
            type=click.FloatRange(min=0, min_open=True),
            default=5.0,
            show_default=True,
        ),
        _flag("--trace", "Recorded requests: where the model is wrong, how much.", type=_FILE),
        _flag(
            "--target-quality",
            "Choose the router's threshold too: the fastest of at least this quality.",
            type=float,
            metavar="Q",
        ),
        _flag("--quality-table", "What python -m bench.pareto --json wrote, for that.", type=_FILE),
        _flag("--json", "Print JSON.", is_flag=True),
        _flag("--plot", "Draw throughput over N, and over B, there.", type=_OUTPUT),
    ]


def _plan(**values: Any) -> None:
    # Before numpy is imported: vectors this short are slower on several threads than on one.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    from trserve.planning.command import plan

    with one_line_errors():
        plan(**values)


def plan_command() -> click.Command:
    """The command, for the command line to register."""
    return click.Command(
        "plan",
        params=_parameters(),
        callback=_plan,
        help=_HELP,
        short_help="Compute the best batch thresholds and their throughput.",
    )
