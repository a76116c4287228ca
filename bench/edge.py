"""The edge study: an SLM at the edge, an LLM 170 ms away, over the paper's thresholds.

Two methods answer the same questions with the same scores: ``trserve``, two servers joined by the
tcp link, and ``paper-method`` (``edge_paper``: no KV cache, text over HTTP, one call a routed
token). Between them and the cloud stands ``netproxy``. Both SLMs have the shape of SmolLM2-135M and
weights drawn at random; the LLM is an emulated device that sleeps its service time and makes tokens
up; the scores are drawn so that as many tokens are routed as the paper's were (``edge_scores``). So
the first table has no accuracies; the second one has, by the embedded pair and its trained
confidence router (``edge_accuracy``).

Cost is active parameters x tokens drawn, the LLM alone being 1 and taken to have 32.5 billion.
How long it will take is said first.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import uvloop

from bench.common import Row, parser, print_table, report, track
from bench.edge_measured import Answer, means
from bench.edge_paper import FullPrefill, PaperMethod
from bench.edge_scores import ANSWER_TOKENS, THRESHOLDS, score, share_below
from bench.edge_tables import (
    ASSUMED_LLM,
    BASELINE,
    JUDGED,
    OTHER,
    PAPER,
    TRSERVE,
    Setting,
    plot,
    row,
    shown,
    verdicts,
    with_ratios,
)
from bench.edge_trserve import LLM, Pair, linked, write_profile
from bench.endpoint import Address, launched
from bench.http_client import Connection
from bench.netproxy import NetProxy
from bench.netproxy_weather import Weather
from bench.router_cost import SMOLLM2
from bench.workloads import problem_prompts
from trserve.demo import model_path
from trserve.gateway.tokenizer import Tokenizer
from trserve.models.spec import read_spec

ROUTER: Final = "bench.edge_scores:EmulatedConfidence"
QUESTIONS: Final = 10
FULL_QUESTIONS: Final = 100
SERVICES: Final = (0.9, 0.0)
VISITS: Final = ((0.8, 4),)
"""(threshold, visit_tokens) beside one token a visit at every threshold."""

QUICK: Final = (0.7, 0.8)
ONNX: Final = "onnx"
LONGEST_ROW: Final = 1024
_DECODE_S: Final = 0.02
"""What a step of ours is taken for before it is measured."""

Prompt = Sequence[int]


class Study:
    """What all settings share: the questions, the shape on disk, the way, the threads."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.prompts = problem_prompts()[: args.questions]
        self.weather = args.weather
        self.threads = args.threads
        self.folder = folder
        self.shape = folder / "smollm2-135m-shape"
        self.shape.mkdir()
        (self.shape / "config.json").write_text(json.dumps(SMOLLM2))
        self.tokenizer = Tokenizer.load(model_path("tiny"))
        torch.set_num_threads(args.threads)

    def profile(self, service_s: float) -> list[str]:
        """The flags of an LLM that sleeps so long."""
        return ["--device", "emulated", "--profile", str(write_profile(self.folder, service_s))]

    def slm(self, dtype: str) -> FullPrefill:
        """The paper's method's."""
        return FullPrefill.drawn(SMOLLM2, self.tokenizer.size, getattr(torch, dtype))


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """Every row to measure, the paper's method first."""
    found = []
    for service in args.service:
        for threshold in args.thresholds:
            if PAPER in args.methods:
                dtypes = list(args.paper_dtype)
                if not service and not args.quick and threshold in {at for at, _ in JUDGED}:
                    dtypes = list(dict.fromkeys([*dtypes, OTHER]))
                found += [Setting(PAPER, dtype, service, threshold) for dtype in dtypes]
            if TRSERVE in args.methods:
                visits = [1, *(visit for at, visit in VISITS if at == threshold)]
                found += [
                    Setting(TRSERVE, dtype, service, threshold, visit)
                    for dtype in args.dtype
                    for visit in visits
                ]
    return found


def estimated_s(settings: Sequence[Setting], questions: int, args: Any, step_s: float) -> float:
    """How long ``settings`` take; ``step_s`` is one full prefill of the paper's method."""
    way = 2e-3 * args.weather.delay_ms
    total = 0.0
    for each in settings:
        share = share_below(each.threshold)
        tokens, visits = ANSWER_TOKENS * share, ANSWER_TOKENS * share
        if each.visit > 1:
            visits = ANSWER_TOKENS / (each.visit + (1 - share) / share)
            tokens = visits * each.visit
        step = step_s if each.method == PAPER else _DECODE_S
        total += questions * (ANSWER_TOKENS * step + tokens * each.service_s + visits * way)
    return total


def measured(study: Study, settings: Sequence[Setting]) -> Iterator[tuple[Setting, list[Answer]]]:
    """The answers under each setting; servers are started once for each service time."""
    for service in dict.fromkeys(each.service_s for each in settings):
        due = [each for each in settings if each.service_s == service]
        papers = [each for each in due if each.method == PAPER]
        for dtype in dict.fromkeys(each.dtype for each in papers):
            wanted = [each for each in papers if each.dtype == dtype]
            with paper_cloud(study, service) as cloud:
                yield from uvloop.run(by_paper(study, study.slm(dtype), cloud, wanted))
        ours = [each for each in due if each.method == TRSERVE]
        for dtype in dict.fromkeys(each.dtype for each in ours):
            yield from by_trserve(study, [each for each in ours if each.dtype == dtype])


@contextmanager
def paper_cloud(study: Study, service_s: float) -> Iterator[NetProxy]:
    """The LLM behind HTTP, and the proxy before it."""
    with ExitStack() as stack:
        flags = ["--models", LLM, "--router", "none", *study.profile(service_s)]
        cloud: Address = stack.enter_context(launched(flags))
        yield stack.enter_context(NetProxy((cloud.host, cloud.port), study.weather))


async def by_paper(
    study: Study, slm: FullPrefill, cloud: NetProxy, settings: Sequence[Setting]
) -> list[tuple[Setting, list[Answer]]]:
    """All of ``settings``, one question after the other."""
    slm.next(study.prompts[0])
    found = []
    for setting in track(settings, PAPER):
        method = PaperMethod(
            slm,
            study.tokenizer,
            await Connection.open(cloud.host, cloud.port),
            LLM,
            lambda seen: score(seen.seed, seen.position),
            service_s=setting.service_s,
        )
        answers = [
            await method.answer(prompt, number, setting.threshold, ANSWER_TOKENS, frozenset())
            for number, prompt in enumerate(study.prompts)
        ]
        method.cloud.close()
        found.append((setting, answers))
    return found


def by_trserve(study: Study, settings: Sequence[Setting]) -> Iterator[tuple[Setting, list[Answer]]]:
    """All of ``settings``, one question after the other; servers that have warmed up."""
    service, dtype = settings[0].service_s, settings[0].dtype
    device = ["--device", "onnx"] if dtype == ONNX else ["--device", "cpu", "--dtype", dtype]
    home = ["--load-format", "dummy", *device, "--max-model-len", str(LONGEST_ROW)]
    home += ["--threads", f"{study.threads},1", "--on-peer-loss", "wait"]
    pair = Pair(str(study.shape), LLM, home, study.profile(service), ["--router", ROUTER])
    with linked(pair, study.weather) as up:
        for threshold in (0.0, 1.0):
            up.ask(asked(study.prompts[0], 0, Setting(TRSERVE, dtype, service, threshold), 3))
        for setting in track(settings, TRSERVE):
            answers = []
            for number, prompt in enumerate(study.prompts):
                answer = up.ask_alone(asked(prompt, number, setting))
                answer.service_s = answer.routed * service
                answer.network_s = answer.visits * 2e-3 * study.weather.delay_ms
                answer.compute_s = answer.total_s - answer.service_s - answer.network_s
                answers.append(answer)
            yield setting, answers


def asked(prompt: Prompt, seed: int, setting: Setting, tokens: int = ANSWER_TOKENS) -> Row:
    """The body of a request."""
    router = {"threshold": setting.threshold, "visit_tokens": setting.visit}
    return {
        "model": "trserve",
        "prompt": list(prompt),
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "seed": seed,
        "trserve": {"router": router},
    }


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser("edge", "An SLM at the edge and an LLM 170 ms away, over thresholds.")
    made.add_argument("--full", action="store_true", help=f"{FULL_QUESTIONS} questions")
    made.add_argument("--questions", type=int, metavar="N", help=f"[default: {QUESTIONS}]")
    made.add_argument("--thresholds", type=_numbers, metavar="A,B", help="[default: the paper's]")
    made.add_argument("--service", type=_numbers, metavar="S", help="seconds a token of the LLM's")
    made.add_argument("--methods", nargs="+", choices=(PAPER, TRSERVE), default=[PAPER, TRSERVE])
    dtypes = (BASELINE, OTHER)
    made.add_argument(
        "--dtype",
        nargs="+",
        choices=(*dtypes, ONNX),
        default=[OTHER],
        help=f"of trserve's SLM; {ONNX} is float32 in ONNX Runtime, as in `trserve edge`",
    )
    made.add_argument(
        "--paper-dtype",
        nargs="+",
        choices=dtypes,
        default=[BASELINE],
        help=f"of the paper's method; {BASELINE} is what ONNX Runtime computes in on a CPU",
    )
    made.add_argument("--threads", type=int, default=1, help="of either SLM")
    made.add_argument("--delay-ms", type=float, default=85.0, help="one way")
    made.add_argument("--jitter-ms", type=float, default=0.0)
    made.add_argument("--stall-chance", type=float, default=0.0)
    made.add_argument("--no-accuracy", action="store_true", help="leave the second table out")
    made.add_argument(
        "--merge",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="measure nothing; one table of what was measured in parts, as --json kept it",
    )
    args = made.parse_args(argv)
    args.weather = Weather(args.delay_ms, args.jitter_ms, args.stall_chance)
    if problem := args.weather.problem():
        made.error(problem)
    usual = FULL_QUESTIONS if args.full else 2 if args.quick else QUESTIONS
    args.questions = args.questions or usual
    args.thresholds = args.thresholds or (QUICK if args.quick else THRESHOLDS)
    args.service = args.service or ((0.0,) if args.quick else SERVICES)
    return args


def announce(study: Study, args: argparse.Namespace, settings: Sequence[Setting]) -> None:
    """How long it will take, from a few steps of the paper's method."""
    step_s = 0.0
    if PAPER in args.methods:
        slm, row = study.slm(args.paper_dtype[0]), list(range(100))
        slm.next(row)
        began = time.perf_counter()
        slm.next(row)
        step_s = time.perf_counter() - began
    minutes = estimated_s(settings, args.questions, args, step_s) / 60
    text = f"{args.questions} questions, {len(settings)} settings: about {minutes:.0f} minutes"
    print(f"{text}, the second table aside", file=sys.stderr, flush=True)


def merge(args: argparse.Namespace) -> None:
    """Rows of several runs as of one; each keeps its ratios, and says of which ``run`` it is."""
    parts = [json.loads(file.read_bytes()) for file in args.merge]
    rows = [
        row | {"run": " ".join(part["command"][2:])} for part in parts for row in part["results"]
    ]
    rows.sort(key=_place)
    report("edge", args, rows, f"{len(parts)} runs", plot, shown)
    print_table("Judged", verdicts([row for row in rows if "service_s" in row]))


def _place(row: Row) -> tuple[Any, ...]:
    """Timed rows by service time, method and threshold; those with accuracies after them."""
    if "service_s" not in row:
        return (1,)
    return (
        0,
        row["service_s"],
        row["method"],
        row["threshold"],
        row["slm_dtype"],
        row["visit_tokens"],
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, judge, report."""
    args = _arguments(argv)
    if args.merge:
        merge(args)
        return
    settings = settings_of(args)
    with tempfile.TemporaryDirectory(prefix="trs-edge-") as folder:
        study = Study(args, Path(folder))
        announce(study, args, settings)
        slm = read_spec(study.shape).num_parameters
        rows = [
            row(setting, means(answers), (slm, ASSUMED_LLM))
            for setting, answers in measured(study, settings)
        ]
    rows = with_ratios(rows)
    accuracy: list[Row] = []
    if not args.no_accuracy:
        from bench import edge_accuracy

        accuracy = edge_accuracy.accuracies(args.weather, quick=args.quick)
    title = f"{args.questions} questions, {ANSWER_TOKENS} made-up tokens each"
    way = f"{2 * args.delay_ms:g} ms round trip"
    report("edge", args, [*rows, *accuracy], f"{title}, {way}, LLM emulated", plot, shown)
    if accuracy:
        print_table(edge_accuracy.title(), accuracy)
    print_table("Judged", verdicts(rows))


if __name__ == "__main__":
    main()
