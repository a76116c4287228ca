"""The flags of ``bench.serve``, and what they make: a plan of runs that is checked as a whole.

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
from pathlib import Path
from typing import Any, Final

from bench.common import parser
from bench.serve_asks import Ask, Prompt, random_asks, read_dataset
from bench.serve_checks import Assertion, read_assertion, read_limits
from bench.serve_load import arrivals
from bench.serve_metrics import LIMITED, metric_names
from bench.serve_target import CHAT, COMPLETIONS, Target, read_key, read_url
from bench.serve_traces import KINDS, Trace, read_trace

DEFAULT_PROMPTS: Final = 100
QUICK_PROMPTS: Final = 16
DEFAULT_INPUT: Final = 128
DEFAULT_OUTPUT: Final = 64
CLIENT_NUMBERS: Final = ("client_cpu_share", "client_lag_p50_ms", "client_lag_p99_ms")
_RANDOM, _TRACE = "random", "trace"

DESCRIPTION: Final = """\
Load on any OpenAI-compatible endpoint, measured from the client.

TTFT: from sending a request to its first event with text. ITL: the time between two such events,
of all answers together; itl_token shares it among the tokens of an event. E2E: from sending to the
last event of the answer. TPOT: (E2E - TTFT) / (n - 1) for an answer of n tokens, as the server
counts them. Goodput: answers a second that keep to every limit. A failed answer, one whose stream
holds an error or ends without [DONE] included, is in no latency; if any failed, the exit code is
1, unless an assertion is about failed or failed_share."""


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


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags."""
    made = parser("serve", DESCRIPTION)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    _add_target(made.add_argument_group("what is measured"))
    _add_load(made.add_argument_group("load"))
    _add_workload(made.add_argument_group("what is asked"))
    _add_output(made.add_argument_group("what is made of it"))
    return made.parse_args(argv)


def _add_target(group: Any) -> None:
    group.add_argument("--url", help="of a running endpoint, as http://127.0.0.1:8000")
    group.add_argument(
        "--launch", metavar="ARGS", help='start `trserve launch ARGS`, as --launch="--models 1b,8b"'
    )
    group.add_argument("--model", help="its name [default: the first of /v1/models]")
    group.add_argument(
        "--endpoint", choices=(CHAT, COMPLETIONS), help="[default: what fits the prompts]"
    )
    group.add_argument(
        "--key-env", default="OPENAI_API_KEY", metavar="NAME", help="variable that holds the key"
    )
    group.add_argument("--extra-body", metavar="JSON", help="members for every request's body")
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for an answer")
    group.add_argument("--label", help="the row's system [default: trserve, or endpoint]")
    group.add_argument(
        "--count-tokens",
        action="store_true",
        help="ask for the usage in every event, so that itl_token is exact",
    )


def _add_load(group: Any) -> None:
    group.add_argument(
        "--concurrency",
        metavar="N,N",
        help="closed loop: so many users, a row each [default: 1]; with arrivals: at most so many",
    )
    group.add_argument(
        "--request-rate", metavar="R,R", help="open loop: requests a second, a row for each"
    )
    group.add_argument("--arrivals", choices=("poisson", "constant"), default="poisson")
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="shape of the Gamma distribution of gaps: below 1 they come in bursts [default: 1]",
    )
    group.add_argument("--num-prompts", type=int, metavar="N", help="requests of a row")
    group.add_argument("--duration", type=float, metavar="S", help="no new requests after that")
    group.add_argument("--warm-up", type=int, default=0, metavar="N", help="uncounted requests")
    group.add_argument("--seed", type=int, default=0, help="of prompts and arrivals")


def _add_workload(group: Any) -> None:
    group.add_argument("--input-len", type=int, metavar="TOKENS", help=f"[{DEFAULT_INPUT}]")
    group.add_argument("--output-len", type=int, metavar="TOKENS", help=f"[{DEFAULT_OUTPUT}]")
    group.add_argument(
        "--length-spread", type=float, default=0.0, metavar="SHARE", help="0.5: half to 1.5 times"
    )
    group.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="ShareGPT JSON (an answer's length is its letters / 4), or JSON lines with prompt, "
        "messages or question, and output_len",
    )
    group.add_argument("--trace", choices=KINDS, help="replay recorded traffic")
    group.add_argument("--trace-file", type=Path, metavar="FILE")
    group.add_argument("--speed-up", type=float, default=1.0, help="factor on recorded arrivals")
    group.add_argument("--scale", type=float, default=1.0, help="factor on recorded lengths")
    group.add_argument(
        "--longest", type=int, metavar="TOKENS", help="leave longer recorded requests out"
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="answers of exactly their length [default: where that is known]",
    )


def _add_output(group: Any) -> None:
    group.add_argument("--csv", type=Path, metavar="FILE", help="write the rows there")
    group.add_argument("--markdown", type=Path, metavar="FILE", help="write a table there")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help=f"of {', '.join(LIMITED)}"
    )
    group.add_argument(
        "--assert",
        dest="assertions",
        action="append",
        default=[],
        metavar="EXPR",
        help='as "p99_itl_ms<50", of every row; may be repeated; exit code 1 if one does not hold',
    )


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


def target_of(args: argparse.Namespace, plan: Plan, url: str) -> Target:
    """The endpoint; without ``--endpoint`` chat where prompts are text or messages."""
    first = plan.first_prompt
    messages = isinstance(first, list) and isinstance(first[0], dict)
    endpoint = args.endpoint or (CHAT if messages or isinstance(first, str) else COMPLETIONS)
    if endpoint == COMPLETIONS and messages:
        sys.exit("--endpoint completions: these prompts are messages; they need chat")
    host, port, base, tls = read_url(url)
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
