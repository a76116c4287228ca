"""The flags that the throughput benchmarks share, and what they make of them. Runs nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.closed_loop import Until
from bench.systems import Algorithm, Setup
from bench.workloads import WORKLOADS, Workload

DEFAULT_TAU: Final = 0.05
EMULATED: Final = "emulated"
DEFAULT_PROFILE: Final = "a100-0.6b-32b"
EMBEDDED: Final = ("tiny", "small")
DEFAULTS: Final[dict[str, tuple[float, ...]]] = {
    "r2r": (0.35,),
    "citer": (0.35,),
    "co-llm": (0.35,),
    "confidence": (0.35,),
    "r-stitch": (0.1, 0.8),
    "me": (0.5, 0.5),
}
"""Probabilities where none are given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of what is served, of the load and of how long it is watched."""
    parser.add_argument("--models", default=",".join(EMBEDDED), metavar="SLM,LLM")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", EMULATED))
    parser.add_argument("--profile", metavar="NAME|FILE", help="of emulated devices")
    parser.add_argument("--algorithm", default="r-stitch", choices=sorted(DEFAULTS))
    parser.add_argument(
        "--routing", metavar="P[,Q]", help="probabilities (me: weights) by which tokens are routed"
    )
    parser.add_argument(
        "--tau",
        type=float,
        help=f"r-stitch on real models: decide by entropy (default there: {DEFAULT_TAU:g})",
    )
    parser.add_argument("--workload", default=None, choices=sorted(WORKLOADS))
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all lengths")
    parser.add_argument("--concurrency", default="1,4,8,16", metavar="N,N")
    parser.add_argument("--tokens", type=int, default=5000, help="at least so many a cell")
    parser.add_argument("--error", type=float, help="standard error to reach, as a share")
    parser.add_argument("--least-s", type=float, default=10.0, help="shortest window")
    parser.add_argument("--most-s", type=float, default=120.0, help="longest window")


def setup_of(args: argparse.Namespace, algorithm: str | None = None) -> Setup:
    """What is compared; ``algorithm`` in place of the flag's."""
    models = names(args.models)
    emulated = args.device == EMULATED
    if emulated and models == EMBEDDED:
        models = tuple(DEFAULT_PROFILE.split("-")[1:])
    profile = (args.profile or DEFAULT_PROFILE) if emulated else None
    name = algorithm or args.algorithm
    chosen = algorithm_of(name, args.routing, args.tau, emulated=emulated)
    vocabulary = tokenizer_size(models) if chosen.tau is not None else 0
    return Setup(models, args.device, chosen, profile, vocabulary)


def algorithm_of(name: str, routing: str | None, tau: float | None, *, emulated: bool) -> Algorithm:
    """The algorithm with its values; exits where they do not fit."""
    if name == "r-stitch" and routing is None and (tau is not None or not emulated):
        if emulated:
            raise SystemExit("--tau: emulated devices have no entropy; give --routing p,q")
        return Algorithm(name, tau=DEFAULT_TAU if tau is None else tau)
    if routing is None:
        return Algorithm(name, DEFAULTS[name])
    try:
        values = tuple(float(value) for value in routing.split(","))
    except ValueError:
        raise SystemExit(f"--routing {routing}: write numbers, as 0.35 or 0.1,0.8") from None
    if name != "me" and len(values) != len(DEFAULTS[name]):
        raise SystemExit(f"--routing {routing}: {name} takes {len(DEFAULTS[name])} of them")
    return Algorithm(name, values)


def until_of(args: argparse.Namespace) -> Until:
    """How long each cell is watched."""
    if args.quick:
        return Until(tokens=500, least_s=3.0, most_s=8.0)
    return Until(
        tokens=args.tokens, relative_error=args.error, least_s=args.least_s, most_s=args.most_s
    )


def workload_of(args: argparse.Namespace) -> Workload:
    """The flag's; by default the pair's own problems, on emulated devices short reasoning."""
    default = "low-effort" if args.device == EMULATED else "problems"
    chosen = WORKLOADS[args.workload or default]
    return chosen if args.scale == 1.0 else chosen.scaled(args.scale)


def names(text: str) -> tuple[str, ...]:
    """``A,B`` as a tuple."""
    return tuple(part.strip() for part in text.split(","))


def concurrencies(args: argparse.Namespace) -> list[int]:
    """The numbers of users, in increasing order."""
    found = sorted({int(part) for part in args.concurrency.split(",")})
    if found[0] < 1:
        raise SystemExit("--concurrency: must be 1 or more")
    return found


def tokenizer_size(models: Sequence[str]) -> int:
    """Ids of the models' common tokenizer; exits where it cannot be found."""
    from trserve.demo import model_path
    from trserve.gateway.tokenizer import Tokenizer

    first = models[0]
    if first == "tiny":
        return Tokenizer.load(model_path("tiny")).size
    if Path(first).is_dir():
        return Tokenizer.load(Path(first)).size
    raise SystemExit(f"no tokenizer of {first} here; give a path to the model, or --routing")
