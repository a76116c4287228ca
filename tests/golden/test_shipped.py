"""The trained routers that ship with the embedded pair, served by name alone, token for token.

Beside the plain loop of their rule, with the formulas in float64 on the tensors of the files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.golden.compare import assert_golden
from tests.golden.completions import PATH, body_of
from tests.golden.reference import Setting
from tests.golden.routed import RoutedReference
from tests.golden.rules import OneWay, Signal, View
from tests.golden.test_routers import answer_of
from tests.golden.word_problems import chat_prompts
from tests.router_lib import networks
from tests.serverproc import Server, concurrently
from trserve import demo

TOKENS = 100


@dataclass
class Shipped:
    """A router as its folder has it; ``told`` is its report."""

    name: str
    told: dict[str, Any]
    signal: Signal
    server: Server


def _r2r(tensors: networks.Tensors) -> Signal:
    table = load_file(demo.model_path("tiny") / "model.safetensors")["model.embed_tokens.weight"]
    kind = networks.R2R_CLASSES[0]

    def signal(view: View) -> float:
        logits = view.logits[: view.size]
        return networks.r2r_probability(kind, tensors, view.hidden, view.token, logits, table)

    return signal


def _confidence(tensors: networks.Tensors) -> Signal:
    return lambda view: networks.confidence_probability(tensors, view.hidden)


def _co_llm(tensors: networks.Tensors) -> Signal:
    return lambda view: networks.defer_probability(tensors["vector"], view.hidden)


SIGNALS: dict[str, Callable[[networks.Tensors], Signal]] = {
    "r2r": _r2r,
    "confidence": _confidence,
    "citer": _confidence,
    "co-llm": _co_llm,
}
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in SIGNALS if name != "r2r"]


@pytest.fixture(params=["r2r", *OTHERS])
def shipped(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shipped]:
    folder = demo.ROUTERS_DIR / request.param
    told = json.loads((folder / "report.json").read_text())
    tensors = load_file(Path(folder / told["checkpoint"]))
    if request.param == "r2r":
        monkeypatch.setattr(networks, "TOP", tensors["logits_projection.weight"].shape[1])
    args = ["--router", request.param, "--device", "cpu", "--threads", "1,1"]
    with Server(args) as server:
        yield Shipped(request.param, told, SIGNALS[request.param](tensors), server)


def at_share(told: dict[str, Any], share: float) -> float:
    """The threshold of the report that routes about ``share`` of the tokens; float32, as served."""
    point = min(told["curve"], key=lambda point: abs(point["llm_share"] - share))
    return float(torch.tensor(point["threshold"]))


def test_a_shipped_router_is_its_definition(shipped: Shipped, full: bool) -> None:
    reference = RoutedReference(demo.model_path("tiny"), demo.model_path("small"))
    tokenizer = reference.models[0].tokenizer
    prompts = chat_prompts(20 if full else 5, Random("shipped"), tokenizer)
    stored = float(torch.tensor(shipped.told["threshold"]))
    jobs = []
    for threshold in (None, at_share(shipped.told, 0.03), at_share(shipped.told, 0.2)):
        for index, prompt in enumerate(prompts):
            setting = Setting(max_tokens=TOKENS, temperature=float(index % 2), seed=index)
            above = shipped.name in ("r2r", "co-llm")
            bound = stored if threshold is None else threshold
            trace = reference.run(prompt, setting, OneWay(shipped.signal, bound, above=above))
            jobs.append((f"{shipped.name} {threshold}, prompt {index}", threshold, trace))

    def one(at: int) -> dict[str, Any]:
        _, threshold, trace = jobs[at]
        body = body_of(trace.prompt, trace.setting, shipped.server.models)
        own = {} if threshold is None else {shipped.told["parameter"]: threshold}
        body["trserve"]["router"] = own
        found: dict[str, Any] = shipped.server.post(PATH, body, timeout_s=120.0)
        return found

    answers = [answer_of(response) for response in concurrently(one, range(len(jobs)), 8)]
    traces = [trace for *_, trace in jobs]
    assert_golden(zip([label for label, *_ in jobs], traces, answers, strict=True))
    assert len(Counter(source for trace in traces for source in trace.sources)) == 2
