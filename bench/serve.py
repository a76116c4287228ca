"""``python -m bench.serve``: load on any OpenAI-compatible endpoint, measured from the client.

``--url`` says where it is, ``--launch ARGS`` starts trserve. One row for each number of users or
each rate; what a latency is stands in the help. Knows no process, file or event of an answer.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

import uvloop

from bench.common import Bar, Row, progress, report
from bench.endpoint import NotAvailableError, launched
from bench.gateway_client import raise_file_limit
from bench.http_client import HttpError
from bench.serve_flags import arguments
from bench.serve_load import Load, closed_loop, open_loop
from bench.serve_metrics import Sample, row_of, sample_of
from bench.serve_output import plot, short, write_csv, write_markdown
from bench.serve_plan import Plan, Run, plan_of, target_of
from bench.serve_stream import Answer
from bench.serve_target import Target
from bench.serve_watch import Watch, warnings

WARM_USERS: Final = 8
INTERRUPTED: Final = 130
_SHARES: Final = ("r2r", "citer", "co-llm", "confidence", "random")
"""Routers whose p is the large model's share: each visit to it is one token."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report; the exit code is 1 where answers failed or an assertion does not hold."""
    args = arguments(argv)
    plan = plan_of(args)
    raise_file_limit()
    target = target_of(args, plan)
    try:
        with _started(target, args.launch) as up:
            rows, samples = uvloop.run(_measure(plan, up))
    except KeyboardInterrupt:
        print("interrupted: nothing is reported", file=sys.stderr)
        sys.exit(INTERRUPTED)
    title = f"{plan.workload}, {target.endpoint}; times in ms"
    report("serve", args, rows, title, partial(plot, samples=samples), short)
    if args.csv is not None:
        write_csv(args.csv, rows)
    if args.markdown is not None:
        write_markdown(args.markdown, rows)
    sys.exit(judge(plan, rows))


@contextmanager
def _started(target: Target, launch: str | None) -> Iterator[Target]:
    """The target; with ``launch`` it is started, and is where it then listens."""
    if launch is None:
        yield target
        return
    try:
        arguments = shlex.split(launch)
    except ValueError as error:
        sys.exit(f"--launch {launch}: {error}")
    try:
        with launched(arguments) as address:
            yield replace(target, host=address.host, port=address.port)
    except NotAvailableError as error:
        sys.exit(f"--launch: {error}")


def judge(plan: Plan, rows: Sequence[Row]) -> int:
    """Say on standard error what is wrong with ``rows``; the exit code."""
    for row in rows:
        for warning in row["warnings"]:
            print(f"warning: {row['run']}: {warning}", file=sys.stderr)
        for error, count in row["errors"].items():
            print(f"failed: {row['run']}: {count} x {error}", file=sys.stderr)
    broken = [
        f"assertion failed: {row['run']}: {failure}"
        for row in rows
        for each in plan.assertions
        if (failure := each.failure(row))
    ]
    for line in broken:
        print(line, file=sys.stderr)
    judged = any(each.name in ("failed", "failed_share") for each in plan.assertions)
    failed = not judged and any(row["failed"] or not row["completed"] for row in rows)
    return 1 if broken or failed else 0


async def _measure(plan: Plan, target: Target) -> tuple[list[Row], list[Sample]]:
    """A row for each run, and the latencies of the last one."""
    try:
        if target.model is None:
            target = replace(target, model=await target.first_model())
    except (OSError, TimeoutError, HttpError) as error:
        sys.exit(f"{target.host}:{target.port} does not answer: {error}")
    await _warm_up(plan, target)
    rows: list[Row] = []
    samples: list[Sample] = []
    for number, run in enumerate(plan.runs):
        row, samples = await _run(plan, target, run, number)
        rows.append(row)
    return rows, samples


async def _warm_up(plan: Plan, target: Target) -> None:
    wanted = plan.args.warm_up
    if not wanted:
        return
    with progress("warm-up", wanted) as bar:
        load = Load(target, plan.args.timeout, lambda answer: bar.advance())
        await closed_loop(load, plan.warm_up(), min(WARM_USERS, wanted))
        load.close()
    failed = [answer.error for answer in load.answers if answer.error]
    if len(failed) == len(load.answers):
        sys.exit(f"no warm-up request was answered: {failed[0]}")


async def _run(plan: Plan, target: Target, run: Run, number: int) -> tuple[Row, list[Sample]]:
    """One row."""
    with progress(run.title, plan.prompts) as bar:
        load = Load(target, plan.args.timeout, _Told(bar, run.title))
        until_s = time.perf_counter() + plan.duration_s if plan.duration_s else float("inf")
        watch = Watch()
        if run.open:
            await open_loop(load, plan.timed(run, number), run.users, until_s)
        else:
            assert run.users is not None
            await closed_loop(load, plan.asks(number), run.users, until_s)
        client = watch.finish()
        load.close()
    row: Row = {
        "system": plan.args.label or _system(load.answers),
        "workload": plan.workload,
        "run": run.title,
        "endpoint": target.endpoint,
        "model": target.model,
        "loop": "open" if run.open else "closed",
        "concurrency": run.users,
        "request_rate": run.rate,
        **row_of(load.answers, plan.limits),
        **{f"client_{name}": value for name, value in client._asdict().items()},
        **({"left_out": plan.left_out} if plan.left_out else {}),
    }
    row["p"] = row["llm_share"] if row["algorithm"] in _SHARES else None
    row["batch_threshold"] = await _thresholds(target, row)
    # From outside nobody knows the models' latencies.
    row["predicted_tokens_per_s"] = None
    row["warnings"] = warnings(row, capped=run.users is not None)
    if load.hopeless:
        row["warnings"].append(f"none of {len(load.answers)} requests was answered: given up")
    return row, [sample_of(answer) for answer in load.answers if answer.error is None]


class _Told:
    """Moves the bar with every answer that ends."""

    def __init__(self, bar: Bar, title: str) -> None:
        self._bar, self._title = bar, title
        self._failed = 0

    def __call__(self, answer: Answer) -> None:
        self._failed += answer.error is not None
        failed = f", {self._failed} failed" if self._failed else ""
        self._bar.advance(1, f"{self._title}{failed}")


def _system(answers: Sequence[Answer]) -> str:
    return "trserve" if any(answer.router for answer in answers) else "endpoint"


async def _thresholds(target: Target, row: Row) -> list[int] | None:
    """trserve's batch thresholds now; None from other servers and where none is in force."""
    if not row["models"]:
        return None
    counts = await target.counts(list(row["models"]))
    found = list(counts.thresholds) if counts is not None else []
    return found if found and min(found) >= 1 else None


if __name__ == "__main__":
    main()
