"""``trserve calibrate``: splits the prompts, searches on one part, verifies on the other, says it.

Knows files and what is printed; see ``search`` and ``runs``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from trserve.calibration.runs import Runs, Sampling, ends
from trserve.calibration.search import Found, Scale, find_threshold, text
from trserve.calibration.shares import Share
from trserve.config import ModelConfig
from trserve.engine import Engine
from trserve.errors import ConfigError
from trserve.training.prompts import read_prompts

PROBLEMS: Final = 1200
"""One answer in some hundreds runs on to its limit; of 300 it alone moves the share by a point."""
PROBLEM_SEED: Final = 16180
"""Neither the seed of the stored threshold nor those of the benchmarks."""
SCOUTS: Final = 48
"""Prompts on which both ends of the threshold are tried, and scores are taken."""
TOLERANCE: Final = 0.001
GOAL: Final = 0.01
"""The difference on held-out prompts from which on the result is not called good."""
_SPLIT_SEED: Final = 2


@dataclass(frozen=True)
class Request:
    """What is to be calibrated."""

    target: float
    sampling: Sampling
    prompts: Path | None
    models: Sequence[str]
    router: str
    router_config: Mapping[str, str]
    settings: Mapping[str, Any]


@dataclass
class Result:
    """What was found; ``runs`` are the thresholds tried on the calibration prompts."""

    router: str
    parameter: str
    target: float
    threshold: float
    calibration: Share
    held_out: Share
    runs: list[Found] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "router": self.router,
            "parameter": self.parameter,
            "target_share": self.target,
            "threshold": self.threshold,
            "calibration": _described(self.calibration),
            "held_out": _described(self.held_out),
            "runs": [{"threshold": run.threshold, "share": run.share} for run in self.runs],
        }


def calibrate(request: Request, *, as_json: bool) -> None:
    """Calibrate and print. Raises StartupError where it cannot be done."""
    searched, held_out = split(_prompts(request))
    engine = Engine(
        models=tuple(request.models),
        router=request.router,
        router_config=dict(request.router_config),
        **request.settings,
    )
    with engine:
        result = find(Runs(engine, request.router, request.sampling), request, searched, held_out)
    print(json.dumps(result.as_json(), indent=2) if as_json else _report(result, request))


def split(prompts: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Two halves of distinct prompts, mixed: files are often sorted. ConfigError for one prompt."""
    distinct = list({json.dumps(prompt): prompt for prompt in prompts}.values())
    if len(distinct) < 4:
        raise ConfigError(
            f"--prompts: {len(distinct)} different prompts; half of them are held out, and the "
            "share of a few answers says little: give a hundred or more"
        )
    Random(_SPLIT_SEED).shuffle(distinct)
    middle = len(distinct) // 2
    return distinct[:middle], distinct[middle:]


def find(runs: Runs, request: Request, searched: Sequence[Any], held_out: Sequence[Any]) -> Result:
    """The threshold by ``searched``, and its share on ``held_out``.

    Raises:
        ConfigError: no threshold has a share as wanted.
    """
    target, name = request.target, runs.parameter.name
    scouts = searched[:SCOUTS]
    _say(f"{len(searched)} prompts to search on, {len(held_out)} to verify on")
    limits, scores = ends(runs, scouts)
    _say(
        f"{name} {limits.least:g}: {limits.least_share:.2%}, {limits.most:g}: "
        f"{limits.most_share:.2%}; {len(scores)} scores"
    )
    if not limits.least_share <= target <= limits.most_share:
        raise ConfigError(
            f"calibrate --target-share {target:g}: with {name} from {limits.least:g} to "
            f"{limits.most:g} the share goes from {limits.least_share:.4g} to "
            f"{limits.most_share:.4g}"
        )
    shares: dict[float, Share] = {}

    def measure(threshold: float) -> float:
        share = shares[threshold] = runs.share(searched, threshold)
        _say(f"{name} {text(threshold)}: {share.value:.2%} +- {share.standard_error:.2%}")
        return share.value

    scale = Scale.of(limits.least, limits.most, scores)
    found = find_threshold(measure, scale, target, TOLERANCE)
    tried = [Found(threshold, share.value) for threshold, share in shares.items()]
    return Result(
        router=request.router,
        parameter=name,
        target=target,
        threshold=found.threshold,
        calibration=shares[found.threshold],
        held_out=runs.share(held_out, found.threshold),
        runs=tried,
    )


def _prompts(request: Request) -> list[Any]:
    if request.prompts is not None:
        return [prompt.content for prompt in read_prompts(request.prompts)]
    if tuple(request.models) != ("tiny", "small"):
        raise ConfigError(
            "calibrate: give --prompts FILE; only the embedded pair (--models tiny,small) has "
            "prompts of its own"
        )
    from trserve.demo.grammar import held_out

    problems = held_out(PROBLEMS, PROBLEM_SEED)
    return [[{"role": "user", "content": problem.question}] for problem in problems]


def _described(share: Share) -> dict[str, Any]:
    error = share.standard_error
    return {
        "share": share.value,
        "standard_error": None if math.isnan(error) else error,
        "prompts": len(share.tokens),
        "tokens": sum(share.tokens),
    }


def _report(result: Result, request: Request) -> str:
    lines = [f"{result.parameter}={text(result.threshold)} for a share of {result.target:.2%}"]
    for what, share in (("searched on", result.calibration), ("held out", result.held_out)):
        lines.append(
            f"  {what + ':':12} {share.value:.2%} +- {share.standard_error:.2%} of "
            f"{sum(share.tokens)} tokens, {len(share.tokens)} prompts"
            f"{_limited(share, request.sampling.max_tokens)}"
        )
    off = abs(result.held_out.value - result.target)
    if off > GOAL:
        lines.append(
            f"  NOTE {off:.2%} off on held-out prompts: more prompts, or a router whose "
            "parameter has finer steps, come closer"
        )
    settings = {**request.router_config, result.parameter: text(result.threshold)}
    config = ",".join(f"{name}={value}" for name, value in settings.items())
    models = ",".join(request.models)
    lines.append(
        f"trserve launch --models {models} --router {result.router} --router-config {config}"
        f"{_precision(request.settings)}"
    )
    return "\n".join(lines)


def _precision(settings: Mapping[str, Any]) -> str:
    """The flags of a precision that was asked for: in another one, the share is another."""
    usual = ModelConfig()
    given = {
        "--dtype": (settings.get("dtype", usual.dtype), usual.dtype),
        "--quantization": (settings.get("quantization", usual.quantization), usual.quantization),
    }
    return "".join(f" {flag} {value}" for flag, (value, other) in given.items() if value != other)


def _limited(share: Share, most: int) -> str:
    """How many answers ran on to their limit: few of them can be much of the share."""
    count = sum(tokens == most for tokens in share.tokens)
    return f" ({count} ran on to {most} tokens)" if count else ""


def _say(text: str) -> None:
    print(f"calibrate: {text}", file=sys.stderr, flush=True)
