"""Accuracy against cost: the embedded pair on held-out problems, alone and routed.

Starts a server for each router and asks it over HTTP, greedily, as a client would. One row a
setting: the SLM alone, the LLM alone, R-Stitch and the trained routers that ship with the pair at
several thresholds, their default among them, and a query-level router at several shares of the
problems. A second table says what a share of tokens buys. With ``--json FILE`` the rows are also
written as CSV beside it.

Cost is active parameters x tokens drawn, the LLM alone being 1: tokens of the SLM that were
discarded count too; reading (prompts, and what the other model wrote) does not, for any setting.

``--problems FILE`` asks the problems of a file in GSM8K's format instead, of which ``--first N``
are taken, and ``--models A,B`` other models than the embedded pair; then without the query-level
router, which is trained on the pair's own problems.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from bench.common import Row, parser, print_table, progress, report, track
from bench.pareto_verdict import QUERY_LEVEL, verdict
from bench.problem_files import WordProblem, read_problems
from bench.query_level import scores
from tests.serverproc import Server, concurrently
from trserve.demo import ROUTERS_DIR, default_tau, model_path
from trserve.demo.grammar import Problem, extract_answer, held_out
from trserve.models.aliases import resolve_model

Problems = Sequence[Problem | WordProblem]

EMBEDDED: Final = "tiny,small"
PROBLEMS: Final = 300
SEED: Final = 4242
"""Not the seed on which the stored threshold was chosen."""
CONCURRENCY: Final = 8
MAX_TOKENS: Final = 160
QUICK_TAUS: Final = (0.02, 0.2)
TAUS: Final = (0.0003, 0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3)
TRAINED: Final = ("r2r", "confidence", "citer", "co-llm")
CURVE_SHARES: Final = (0.01, 0.02, 0.03, 0.035, 0.04, 0.05, 0.07, 0.1, 0.2, 0.3, 0.5, 0.7)
QUICK_SHARES: Final = (0.04, 0.1)
QUERY_SHARES: Final = (0.02, 0.04, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
"""Of the problems that the LLM answers."""


@dataclass(frozen=True)
class Setting:
    """One row to measure: ``extension`` is the request's ``trserve`` object."""

    router: str
    extension: Mapping[str, Any]
    parameter: float | None = None
    default: bool = False


@dataclass(frozen=True)
class Answer:
    """One problem's: tokens that both models drew (kept or not), and those that the LLM wrote."""

    right: bool
    tokens: int
    llm_tokens: int
    drawn: tuple[int, int]


@dataclass(frozen=True)
class Outcome:
    """What a setting did with all problems; ``seconds`` None where nobody was asked."""

    setting: Setting
    answers: Sequence[Answer]
    seconds: float | None

    @property
    def accuracy(self) -> float:
        """Share of right answers, 0 to 1."""
        return sum(answer.right for answer in self.answers) / len(self.answers)

    @property
    def tokens(self) -> int:
        """In all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def llm_share(self) -> float:
        """Of the tokens in all answers."""
        return sum(answer.llm_tokens for answer in self.answers) / self.tokens

    def parameter_tokens(self, parameters: tuple[int, int]) -> int:
        """Active parameters x tokens drawn, over both models."""
        pairs = (zip(parameters, answer.drawn, strict=True) for answer in self.answers)
        return sum(p * n for pair in pairs for p, n in pair)


def alone(models: Sequence[str]) -> list[Setting]:
    """SLM alone and LLM alone."""
    names = zip(("slm-alone", "llm-alone"), models, strict=True)
    return [Setting(name, {"only": model}) for name, model in names]


def stitched(quick: bool) -> list[Setting]:
    """R-Stitch, thresholds in increasing order."""
    stored = default_tau()
    taus = sorted({stored, *(QUICK_TAUS if quick else TAUS)})
    return [
        Setting("r-stitch", {"router": {"tau": tau}}, parameter=tau, default=tau == stored)
        for tau in taus
    ]


def trained(router: str, quick: bool) -> list[Setting]:
    """The shipped ``router``, at the thresholds that its training measured these shares at."""
    told = json.loads((ROUTERS_DIR / router / "report.json").read_text())
    wanted = QUICK_SHARES if quick else CURVE_SHARES
    points = [min(told["curve"], key=lambda p: abs(p["llm_share"] - share)) for share in wanted]
    thresholds = sorted({told["threshold"], *(point["threshold"] for point in points)})
    name = told["parameter"]
    return [
        Setting(router, {"router": {name: t}}, parameter=t, default=t == told["threshold"])
        for t in thresholds
    ]


def run(
    server: Server, setting: Setting, problems: Problems, max_tokens: int = MAX_TOKENS
) -> Outcome:
    """Asks all problems under one setting."""

    def ask(problem: Problem | WordProblem) -> Answer:
        body = {
            "model": "trserve",
            "messages": [{"role": "user", "content": problem.question}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "trserve": dict(setting.extension),
        }
        reply = server.post("/v1/chat/completions", body, timeout_s=120.0)
        return _answer(reply, problem, server.models)

    start = time.perf_counter()
    answers = concurrently(ask, problems, CONCURRENCY)
    return Outcome(setting, answers, time.perf_counter() - start)


def _answer(reply: Any, problem: Problem | WordProblem, models: Sequence[str]) -> Answer:
    text, usage = reply["choices"][0]["message"]["content"] or "", reply["usage"]["trserve"]
    slm, llm = (usage["tokens"].get(name, 0) for name in models)
    # A request begins at the SLM, so every odd handoff leaves it, with one token discarded.
    drawn = (slm + math.ceil(usage["handoffs"] / 2), llm)
    return Answer(is_right(problem, text), slm + llm, llm, drawn)


def is_right(problem: Problem | WordProblem, text: str) -> bool:
    """Whether ``text`` comes to the number that is asked for."""
    if isinstance(problem, WordProblem):
        return problem.is_right(text)
    return extract_answer(text) == problem.value


def by_query(slm: Outcome, llm: Outcome, likely_wrong: Sequence[float]) -> list[Outcome]:
    """The query-level router: the answers of both models, the LLM's for the hardest problems."""
    order = sorted(range(len(likely_wrong)), key=lambda index: -likely_wrong[index])
    found = []
    for share in QUERY_SHARES:
        hard = set(order[: round(share * len(order))])
        both = enumerate(zip(slm.answers, llm.answers, strict=True))
        answers = [pair[index in hard] for index, pair in both]
        found.append(Outcome(Setting(QUERY_LEVEL, {}), answers, None))
    return found


def row(outcome: Outcome, slm: Outcome, llm: Outcome, parameters: tuple[int, int]) -> Row:
    """``gap_recovered`` is the share of the accuracy between the models that routing wins back,
    None where the LLM alone is no better."""
    gap = llm.accuracy - slm.accuracy
    accuracy = outcome.accuracy
    cost = outcome.parameter_tokens(parameters) / llm.parameter_tokens(parameters)
    return {
        "router": outcome.setting.router,
        "parameter": outcome.setting.parameter,
        "llm_share": outcome.llm_share,
        "accuracy": accuracy,
        "standard_error": math.sqrt(accuracy * (1 - accuracy) / len(outcome.answers)),
        "tokens_per_s": outcome.tokens / outcome.seconds if outcome.seconds else None,
        "cost": cost,
        "gap_recovered": (accuracy - slm.accuracy) / gap if gap > 0 else None,
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
    """Accuracy over the share of LLM tokens."""
    for name in dict.fromkeys(row["router"] for row in rows):
        own = sorted((r["llm_share"], r["accuracy"]) for r in rows if r["router"] == name)
        axes.plot(*zip(*own, strict=True), "o-" if len(own) > 1 else "s", label=name)
    axes.set(xlabel="share of tokens that the LLM writes", ylabel="accuracy", ylim=(0, 1.02))
    axes.legend()


def measure(problems: Problems, args: argparse.Namespace) -> list[Outcome]:
    """All settings: both models alone first, R-Stitch, the trained routers, the query-level one."""
    outcomes: list[Outcome] = []
    own = args.file is None and args.models == EMBEDDED
    likely_wrong: list[float] | None = None
    if own:
        with progress("a query-level router is trained"):
            likely_wrong = scores(cast(Sequence[Problem], problems), args.max_tokens)
    for router in ("r-stitch", *args.routers):
        flags = ["--device", "cpu", "--router", router, "--models", args.models]
        with Server(flags) as server:
            run(server, Setting("warm-up", {}), problems[:CONCURRENCY], args.max_tokens)
            settings = trained(router, args.quick) if router in TRAINED else stitched(args.quick)
            if not outcomes:
                settings = alone(server.models) + settings
            outcomes += [
                run(server, each, problems, args.max_tokens) for each in track(settings, router)
            ]
    return outcomes + (by_query(outcomes[0], outcomes[1], likely_wrong) if likely_wrong else [])


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """One line a row, under the names of its columns."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser("pareto", "Accuracy against cost on held-out problems.")
    made.add_argument("--problems", default=str(PROBLEMS), metavar="N or FILE")
    made.add_argument("--first", type=int, metavar="N", help="of a FILE, so many problems")
    made.add_argument("--seed", type=int, default=SEED, help="of the held-out problems")
    made.add_argument("--models", default=EMBEDDED, metavar="A,B", help="as trserve launch has it")
    made.add_argument("--max-tokens", type=int, default=MAX_TOKENS, metavar="N")
    shipped = [name for name in TRAINED if (ROUTERS_DIR / name / "report.json").is_file()]
    made.add_argument("--routers", nargs="*", choices=TRAINED)
    args = made.parse_args(argv)
    args.file = None if args.problems.isdecimal() else Path(args.problems)
    if args.file is not None and not args.file.is_file():
        made.error(f"--problems {args.problems}: neither a number nor a file")
    if args.routers is None:
        args.routers = shipped if args.models == EMBEDDED else []
    return args


def _problems(args: argparse.Namespace) -> Problems:
    if args.file is not None:
        return read_problems(args.file, args.first)
    return held_out(int(args.problems), seed=args.seed)


def _parameters(models: str) -> tuple[int, int]:
    if models == EMBEDDED:
        return count_parameters(model_path("tiny")), count_parameters(model_path("small"))
    first, second = (resolve_model(name).spec.num_parameters for name in models.split(","))
    return first, second


def main(argv: Sequence[str] | None = None) -> None:
    """Measures all settings and reports."""
    args = _arguments(argv)
    problems, parameters = _problems(args), _parameters(args.models)
    outcomes = measure(problems, args)
    rows = [row(outcome, outcomes[0], outcomes[1], parameters) for outcome in outcomes]
    source = args.file.name if args.file else "held-out problems"
    title = f"{len(problems)} of {source}, concurrency {CONCURRENCY}"
    report("pareto", args, rows, title, plot)
    if any(outcome.setting.router == QUERY_LEVEL for outcome in outcomes):
        print_table("What a share of tokens buys", verdict(rows, len(problems)))
    if args.json is not None:
        write_csv(args.json.with_suffix(".csv"), rows)


if __name__ == "__main__":
    main()
