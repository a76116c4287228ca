"""Accuracy against cost: the embedded pair on held-out problems, alone and routed.

Starts a server and asks it over HTTP, greedily, as a client would. One row a setting: the SLM
alone, the LLM alone, and R-Stitch at several thresholds, the stored default among them.

Cost is active parameters x tokens drawn, the LLM alone being 1: tokens of the SLM that were
discarded count too; reading (prompts, and what the other model wrote) does not, for any setting.
"""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.common import Row, parser, report
from tests.serverproc import Server, concurrently
from trserve.demo import default_tau, model_path
from trserve.demo.grammar import Problem, extract_answer, held_out

PROBLEMS: Final = 300
SEED: Final = 4242
"""Not the seed on which the stored threshold was chosen."""
CONCURRENCY: Final = 8
MAX_TOKENS: Final = 160
QUICK_TAUS: Final = (0.02, 0.2)
TAUS: Final = (0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3)


@dataclass(frozen=True)
class Setting:
    """One row to measure: ``extension`` is the request's ``trserve`` object."""

    router: str
    extension: Mapping[str, Any]
    parameter: float | None = None
    default: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a setting did with all problems; ``drawn`` counts tokens per model, kept or not."""

    setting: Setting
    correct: int
    problems: int
    tokens: int
    llm_tokens: int
    drawn: tuple[int, int]
    seconds: float

    @property
    def accuracy(self) -> float:
        """Share of right answers, 0 to 1."""
        return self.correct / self.problems

    def parameter_tokens(self, parameters: tuple[int, int]) -> int:
        """Active parameters x tokens drawn, over both models."""
        return sum(p * n for p, n in zip(parameters, self.drawn, strict=True))


def settings(models: Sequence[str], quick: bool) -> list[Setting]:
    """SLM alone and LLM alone first, then the thresholds in increasing order."""
    stored = default_tau()
    taus = sorted({stored, *(QUICK_TAUS if quick else TAUS)})
    alone = [Setting("slm-alone", {"only": models[0]}), Setting("llm-alone", {"only": models[1]})]
    routed = [
        Setting("r-stitch", {"router": {"tau": tau}}, parameter=tau, default=tau == stored)
        for tau in taus
    ]
    return alone + routed


def run(server: Server, setting: Setting, problems: Sequence[Problem]) -> Outcome:
    """Asks all problems under one setting."""

    def ask(problem: Problem) -> Any:
        body = {
            "model": "trserve",
            "messages": [{"role": "user", "content": problem.question}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "trserve": dict(setting.extension),
        }
        return server.post("/v1/chat/completions", body, timeout_s=120.0)

    start = time.perf_counter()
    replies = concurrently(ask, problems, CONCURRENCY)
    seconds = time.perf_counter() - start
    texts = [reply["choices"][0]["message"]["content"] or "" for reply in replies]
    right = [extract_answer(t) == p.value for t, p in zip(texts, problems, strict=True)]
    usages = [reply["usage"]["trserve"] for reply in replies]
    slm, llm = (sum(u["tokens"].get(name, 0) for u in usages) for name in server.models)
    # A request begins at the SLM, so every odd handoff leaves it, with one token discarded.
    discarded = sum(math.ceil(usage["handoffs"] / 2) for usage in usages)
    drawn = (slm + discarded, llm)
    return Outcome(setting, sum(right), len(problems), slm + llm, llm, drawn, seconds)


def row(outcome: Outcome, slm: Outcome, llm: Outcome, parameters: tuple[int, int]) -> Row:
    """``gap_recovered`` is the share of the accuracy between the models that routing wins back."""
    gap = llm.accuracy - slm.accuracy
    accuracy = outcome.accuracy
    cost = outcome.parameter_tokens(parameters) / llm.parameter_tokens(parameters)
    return {
        "router": outcome.setting.router,
        "parameter": outcome.setting.parameter,
        "llm_share": outcome.llm_tokens / outcome.tokens,
        "accuracy": accuracy,
        "standard_error": math.sqrt(accuracy * (1 - accuracy) / outcome.problems),
        "tokens_per_s": outcome.tokens / outcome.seconds,
        "cost": cost,
        "gap_recovered": (accuracy - slm.accuracy) / gap if gap else None,
        "stored_default": outcome.setting.default,
    }


def count_parameters(checkpoint: Path) -> int:
    """Elements of all tensors, from the headers of the safetensors files; tied ones count once.

    The format: eight bytes of little-endian length, then that many bytes of JSON.
    """
    total = 0
    for file in checkpoint.glob("*.safetensors"):
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        total += sum(math.prod(tensor["shape"]) for tensor in header.values())
    return total


def plot(axes: Any, rows: Sequence[Row]) -> None:
    """Accuracy over cost."""
    routed = [r for r in rows if r["router"] == "r-stitch"]
    axes.plot([r["cost"] for r in routed], [r["accuracy"] for r in routed], "o-", label="r-stitch")
    for r in routed:
        axes.annotate(f"{r['parameter']:g}", (r["cost"], r["accuracy"]))
    for r in (r for r in rows if r["router"] != "r-stitch"):
        axes.plot(r["cost"], r["accuracy"], "s", label=r["router"])
    axes.set(xlabel="cost (LLM alone = 1)", ylabel="accuracy", ylim=(0, 1.02))
    axes.legend()


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all settings and reports."""
    args = parser("pareto", "Accuracy against cost on held-out problems.").parse_args(argv)
    problems = held_out(PROBLEMS, seed=SEED)
    parameters = (count_parameters(model_path("tiny")), count_parameters(model_path("small")))
    with Server(["--device", "cpu"]) as server:
        run(server, Setting("warm-up", {}), problems[:CONCURRENCY])
        outcomes = [run(server, s, problems) for s in settings(server.models, args.quick)]
    rows = [row(outcome, outcomes[0], outcomes[1], parameters) for outcome in outcomes]
    title = f"{PROBLEMS} held-out problems, concurrency {CONCURRENCY}"
    report("pareto", args, rows, title, plot)


if __name__ == "__main__":
    main()
