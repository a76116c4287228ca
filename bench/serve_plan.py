"""What the flags of ``bench.serve`` make: a plan of runs, which is checked as a whole.

Nothing is sent before all flags are known to fit. Runs nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Final

from bench.serve_asks import Ask, Prompt, random_asks, read_dataset
from bench.serve_checks import Assertion, read_assertion, read_limits
from bench.serve_flags import DEFAULT_INPUT, DEFAULT_OUTPUT
from bench.serve_load import arrivals
from bench.serve_metrics import LIMITED, metric_names
from bench.serve_target import CHAT, COMPLETIONS, Target, read_key, read_url
from bench.serve_traces import Trace, read_trace

DEFAULT_PROMPTS: Final = 100
QUICK_PROMPTS: Final = 16
CLIENT_NUMBERS: Final = ("client_cpu_share", "client_lag_p50_ms", "client_lag_p99_ms")
_RANDOM, _TRACE = "random", "trace"
_YET_TO_START: Final = "http://127.0.0.1"


@dataclass(frozen=True)
class Run:
    """One row: a closed loop of ``users``, or an open one at ``rate`` (None: recorded times)."""

    users: int | None
    rate: float | None = None
    recorded: bool = False

    @property
    def open(self) -> bool:
        return self.rate is not None or self.recorded

    @property
    def title(self) -> str:
        if self.recorded:
            return "recorded arrivals"
        return f"{self.rate:g} requests/s" if self.rate is not None else f"{self.users} at once"


@dataclass(frozen=True)
class Plan:
    """What the flags say. ``prompts`` is how many requests a run has; None: until time is over."""

    runs: Sequence[Run]
    workload: str
    prompts: int | None
    duration_s: float | None
    limits: dict[str, float]
    assertions: Sequence[Assertion]
    args: argparse.Namespace
    source: Trace | Sequence[Ask] = ()

    @property
    def left_out(self) -> int:
        """Recorded requests that are too long."""
        return self.source.left_out if isinstance(self.source, Trace) else 0

    @property
    def first_prompt(self) -> Prompt | None:
        """The first prompt that a file holds; None where prompts are random ids."""
        if isinstance(self.source, Trace):
            return self.source.arrivals[0].prompt
        return self.source[0].prompt if self.source else None

    def asks(self, number: int) -> Iterator[Ask]:
        """The requests of the ``number``-th run; those of a data set come again at its end."""
        args = self.args
        made: Iterator[Ask]
        if isinstance(self.source, Trace):
            made = self.source.asks()
        elif self.source:
            made = itertools.cycle(self.source)
        else:
            spread, seed = args.length_spread, args.seed + 1000 * number
            made = random_asks(args.input_len, args.output_len, seed=seed, spread=spread)
        if args.ignore_eos is not None:
            made = (ask._replace(ignore_eos=args.ignore_eos) for ask in made)
        return itertools.islice(made, self.prompts)

    def timed(self, run: Run, number: int) -> Iterator[tuple[float, Ask]]:
        """The same with their times."""
        asks = self.asks(number)
        if run.recorded:
            return ((ask.at_s or 0.0, ask) for ask in asks)
        assert run.rate is not None
        shape = None if self.args.arrivals == "constant" else self.args.burstiness
        return zip(arrivals(run.rate, shape, self.args.seed + number), asks, strict=False)

    def warm_up(self) -> Iterator[Ask]:
        """Prompts of their own, so that no cache knows what is measured."""
        args = self.args
        length, output = (args.input_len or DEFAULT_INPUT), (args.output_len or DEFAULT_OUTPUT)
        made = random_asks(length, output, seed=args.seed + 999_331, spread=0.0)
        return itertools.islice(made, args.warm_up)


def plan_of(args: argparse.Namespace) -> Plan:
    """Check everything that can be checked before a request is sent; SystemExit says what not."""
    _check(args)
    assertions = [read_assertion(text, number_names()) for text in args.assertions]
    limits = read_limits(args.goodput, LIMITED)
    if not limits and any(each.name.startswith("goodput") for each in assertions):
        sys.exit("--assert: goodput has no limits; give --goodput")
    if args.plot is not None and find_spec("matplotlib") is None:
        sys.exit("--plot needs matplotlib: pip install 'trserve[plot]'")
    prompts = args.num_prompts
    if args.quick:
        prompts = min(prompts or QUICK_PROMPTS, QUICK_PROMPTS)
    made = Plan(_runs(args), _RANDOM, prompts, args.duration, limits, assertions, args)
    if args.trace:
        trace = read_trace(
            args.trace,
            args.trace_file,
            scale=args.scale,
            speed_up=args.speed_up,
            longest=args.longest,
            first=prompts,
            seed=args.seed,
        )
        count = len(trace.arrivals)
        return replace(made, workload=f"{_TRACE} {args.trace}", source=trace, prompts=count)
    if args.dataset:
        source = read_dataset(args.dataset, args.output_len, DEFAULT_OUTPUT)
        made = replace(made, workload=args.dataset.stem, source=source)
    args.input_len = args.input_len or DEFAULT_INPUT
    args.output_len = args.output_len or DEFAULT_OUTPUT
    return replace(made, prompts=prompts or (None if args.duration else DEFAULT_PROMPTS))


def _check(args: argparse.Namespace) -> None:
    if (args.url is None) == (args.launch is None):
        sys.exit("give --url of a running endpoint, or --launch to start trserve")
    if (args.trace is None) != (args.trace_file is None):
        sys.exit("--trace and --trace-file go together")
    if args.trace and args.dataset:
        sys.exit("--trace and --dataset: give one of them")
    if args.trace and args.request_rate:
        sys.exit("--request-rate: a trace has its own arrivals; --speed-up changes them")
    if args.arrivals == "constant" and args.burstiness != 1.0:
        sys.exit("--burstiness: constant arrivals have none")
    _check_idle(args)
    for flag in ("json", "csv", "markdown", "plot"):
        if (file := getattr(args, flag)) is not None and not file.parent.is_dir():
            sys.exit(f"--{flag} {file.name}: there is no such folder to write it to")
    for flag in ("burstiness", "timeout", "speed_up", "scale", "duration"):
        if getattr(args, flag) is not None and not getattr(args, flag) > 0:
            sys.exit(f"--{flag.replace('_', '-')}: must be above 0")
    for flag in ("num_prompts", "input_len", "output_len", "longest"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            sys.exit(f"--{flag.replace('_', '-')}: must be 1 or more")
    if not 0 <= args.length_spread < 1:
        sys.exit("--length-spread: must be from 0 to below 1")


def _check_idle(args: argparse.Namespace) -> None:
    """Refuse flags that would change nothing."""
    drawn, recorded = args.trace is None and args.dataset is None, args.trace is not None
    timed = args.request_rate is not None
    for flag, given, used, reason in (
        ("--input-len", args.input_len, drawn, "prompts have their own lengths"),
        ("--output-len", args.output_len, not recorded, "a trace has its own; see --scale"),
        ("--length-spread", args.length_spread, drawn, "prompts have their own lengths"),
        ("--speed-up", args.speed_up != 1.0, recorded, "it is for --trace"),
        ("--scale", args.scale != 1.0, recorded, "it is for --trace"),
        ("--longest", args.longest, recorded, "it is for --trace"),
        ("--burstiness", args.burstiness != 1.0, timed, "it is for --request-rate"),
        ("--arrivals", args.arrivals != "poisson", timed, "it is for --request-rate"),
    ):
        if given and not used:
            sys.exit(f"{flag}: {reason}")


def _runs(args: argparse.Namespace) -> list[Run]:
    """A run for each number of users, or for each rate, with at most so many at once."""
    users = [int(n) for n in _numbers("--concurrency", args.concurrency, whole=True)]
    rates = _numbers("--request-rate", args.request_rate, whole=False)
    if not rates and not args.trace:
        return [Run(n) for n in users or [1]]
    if len(users) > 1:
        sys.exit("--concurrency: with arrivals it is one number, the most at once")
    most = users[0] if users else None
    return [Run(most, recorded=True)] if args.trace else [Run(most, rate) for rate in rates]


def _numbers(flag: str, text: str | None, *, whole: bool) -> list[float]:
    try:
        found = [
            float(int(part) if whole else float(part)) for part in (text or "").split(",") if part
        ]
    except ValueError:
        sys.exit(f"{flag} {text}: write numbers, as 1,4,16")
    if any(not 0 < number < float("inf") for number in found):
        sys.exit(f"{flag} {text}: must be above 0")
    return found


def number_names() -> list[str]:
    """The names that assertions may use."""
    return [*metric_names(), *CLIENT_NUMBERS, "concurrency", "request_rate", "p"]


def target_of(args: argparse.Namespace, plan: Plan) -> Target:
    """The endpoint, of a server yet to be launched without its place; SystemExit as elsewhere.

    Without ``--endpoint`` it is chat where prompts are text or messages.
    """
    first = plan.first_prompt
    messages = isinstance(first, list) and isinstance(first[0], dict)
    endpoint = args.endpoint or (CHAT if messages or isinstance(first, str) else COMPLETIONS)
    if endpoint == COMPLETIONS and messages:
        sys.exit("--endpoint completions: these prompts are messages; they need chat")
    host, port, base, tls = read_url(args.url or _YET_TO_START)
    key, extra = read_key(args.key_env), _extra(args.extra_body)
    return Target(host, port, base, tls, args.model, endpoint, key, extra, args.count_tokens)


def _extra(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        sys.exit(f"--extra-body: no JSON: {error}")
    if not isinstance(found, dict):
        sys.exit("--extra-body: expected an object")
    return found
