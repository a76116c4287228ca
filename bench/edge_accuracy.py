"""The edge study's second table: accuracy, by real models on held-out problems.

The embedded pair and its trained confidence router, over the same link and by the paper's method,
at thresholds at which the router's training measured certain shares. Eight questions at a time, so
there are no times here. What text on the wire costs is seen twice: with the space that the original
puts before the LLM's text, which makes another token of every one inside a word, and without.
Knows no emulated device.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
import uvloop

from bench.common import Row, track
from bench.edge_measured import Answer
from bench.edge_paper import FullPrefill, PaperMethod, Seen
from bench.edge_tables import PAPER, TRSERVE
from bench.edge_trserve import Linked, Pair, linked
from bench.endpoint import launched
from bench.http_client import Connection
from bench.netproxy import NetProxy
from bench.netproxy_weather import Weather
from bench.pareto import count_parameters
from tests.serverproc import concurrently
from trserve.demo import model_path, router_checkpoint
from trserve.demo.grammar import Problem, extract_answer, held_out
from trserve.gateway.tokenizer import Tokenizer
from trserve.router_lib.base import StepResult
from trserve.router_lib.checkpoints import find_file, read_checkpoint
from trserve.router_lib.confidence import FILES, ConfidenceNetwork

PROBLEMS: Final = 100
QUICK_PROBLEMS: Final = 16
SEED: Final = 4243
MAX_TOKENS: Final = 160
AT_ONCE: Final = 8
SHARES: Final = (0.01, 0.04, 0.07, 0.1, 0.2)
QUICK_SHARES: Final = (0.04, 0.1)
NO_SPACE: Final = f"{PAPER}, no space"
_ALONE: Final = ("slm-alone", "llm-alone")


def title() -> str:
    """Of the table."""
    return "Accuracy on held-out problems, the embedded pair and its confidence router"


def thresholds(quick: bool) -> list[float]:
    """Those of the shipped router at which training measured the wanted shares."""
    folder = router_checkpoint("confidence")
    assert folder is not None
    curve = json.loads((folder / "report.json").read_text())["curve"]
    wanted = QUICK_SHARES if quick else SHARES
    return [min(curve, key=lambda p: abs(p["llm_share"] - s))["threshold"] for s in wanted]


def checkpoint() -> Path:
    """The shipped network's file."""
    folder = router_checkpoint("confidence")
    assert folder is not None
    return find_file(folder, FILES)


def accuracies(weather: Weather, *, quick: bool) -> list[Row]:
    """Every method at every threshold, and both models alone."""
    problems = held_out(QUICK_PROBLEMS if quick else PROBLEMS, seed=SEED)
    tokenizer = Tokenizer.load(model_path("tiny"))
    prompts = [_prompt(tokenizer, problem) for problem in problems]
    rows = list(_by_trserve(weather, problems, prompts, thresholds(quick)))
    with paper_cloud(weather) as cloud:
        network = confidence()
        slm = FullPrefill.stored(model_path("tiny"), tokenizer.size)
        for spaced in (True, False):
            for threshold in track(thresholds(quick), PAPER):
                answers = uvloop.run(
                    _by_paper(slm, tokenizer, cloud, network, prompts, threshold, spaced=spaced)
                )
                name = PAPER if spaced else NO_SPACE
                rows.append(row(name, threshold, problems, answers))
    return rows


def _prompt(tokenizer: Tokenizer, problem: Problem) -> list[int]:
    said = [{"role": "user", "content": problem.question}]
    text = tokenizer.render_chat(said, add_generation_prompt=True, kwargs={})
    return tokenizer.encode(text, add_special_tokens=False)


def row(
    method: str, threshold: float | None, problems: Sequence[Problem], answers: Sequence[Answer]
) -> Row:
    """One row; what eight questions at a time leave unknown is None."""
    pairs = list(zip(problems, answers, strict=True))
    right = sum(extract_answer(each.text) == problem.value for problem, each in pairs) / len(pairs)
    slm, llm = (count_parameters(model_path(name)) for name in ("tiny", "small"))
    drawn, routed = (sum(getattr(a, n) for a in answers) for n in ("drawn", "routed"))
    return {
        "method": method,
        "threshold": threshold,
        "ttft_ms": None,
        "tbt_ms": None,
        "routed_tokens": routed / len(answers),
        "total_s": None,
        "accuracy": right,
        "standard_error": math.sqrt(right * (1 - right) / len(pairs)),
        "bytes_per_handoff": None,
        "cost": (slm * drawn + llm * routed) / (llm * sum(a.tokens for a in answers)),
        "problems": len(pairs),
    }


# -- trserve ---------------------------------------------------------------------------------


def _by_trserve(
    weather: Weather,
    problems: Sequence[Problem],
    prompts: Sequence[Sequence[int]],
    wanted: Sequence[float],
) -> Iterator[Row]:
    shared = ["--router", "confidence", "--router-config", f"checkpoint={checkpoint()}"]
    cpu = ["--device", "cpu", "--dtype", "float32"]
    pair = Pair("tiny", "small", cpu, cpu, shared)
    with linked(pair, weather, ["--on-peer-loss", "wait"]) as up:
        for name, model in zip(_ALONE, ("tiny", "small"), strict=True):
            yield row(name, None, problems, _answers(up, prompts, {"only": model}))
        for threshold in track(wanted, TRSERVE):
            own = {"router": {"threshold": threshold}}
            yield row(TRSERVE, threshold, problems, _answers(up, prompts, own))


def _answers(up: Linked, prompts: Sequence[Sequence[int]], own: Row) -> list[Answer]:
    def ask(prompt: Sequence[int]) -> Answer:
        return up.ask(
            {
                "model": "trserve",
                "prompt": list(prompt),
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
                "trserve": own,
            }
        )

    answers = concurrently(ask, prompts, AT_ONCE)
    if own.get("only") == "small":
        answers = [replace(each, drawn=0) for each in answers]
    return answers


# -- the paper's method ------------------------------------------------------------------------


@contextmanager
def paper_cloud(weather: Weather) -> Iterator[NetProxy]:
    """The LLM behind HTTP, and the proxy before it."""
    with ExitStack() as stack:
        flags = ["--models", "small", "--router", "none", "--device", "cpu", "--dtype", "float32"]
        cloud = stack.enter_context(launched(flags))
        yield stack.enter_context(NetProxy((cloud.host, cloud.port), weather))


def confidence() -> Callable[[Seen], float]:
    """The shipped network, asked for one state at a time."""
    network = ConfidenceNetwork(read_checkpoint(checkpoint()))
    nothing = torch.zeros(1)

    def of(seen: Seen) -> float:
        assert seen.state is not None
        step = StepResult(nothing, seen.state, nothing, {}, [], nothing)
        with torch.inference_mode():
            return float(network(step)[0])

    return of


async def _by_paper(
    slm: FullPrefill,
    tokenizer: Tokenizer,
    cloud: NetProxy,
    network: Callable[[Seen], float],
    prompts: Sequence[Sequence[int]],
    threshold: float,
    *,
    spaced: bool,
) -> list[Answer]:
    found: list[Answer] = [Answer() for _ in prompts]
    ends = frozenset(tokenizer.eos_token_ids)
    todo = iter(enumerate(prompts))

    async def user() -> None:
        connection = await Connection.open(cloud.host, cloud.port)
        method = PaperMethod(
            slm, tokenizer, connection, "small", network, reads_states=True, spaced=spaced
        )
        for number, prompt in todo:
            found[number] = await method.answer(prompt, number, threshold, MAX_TOKENS, ends)
        method.cloud.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(user())
    return found
