"""Every router of the library over HTTP, token for token, beside a plain loop of its definition.

Random models, whose heads have more rows than the tokenizer and whose ends differ; greedy and
sampled; thresholds, visits and hysteresis by request. The learned ones run small random checkpoints
in the layouts of the official files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.golden.compare import Answer, assert_golden, compare
from tests.golden.completions import PATH, body_of
from tests.golden.pairs import LARGE_SEED
from tests.golden.random_pair import OUTPUT, build_random_pair, random_prompts, write_random_model
from tests.golden.reference import Setting, Trace
from tests.golden.routed import RoutedReference
from tests.golden.rules import (
    BothWays,
    Chance,
    Leader,
    Mixture,
    OneWay,
    Rule,
    Signal,
    View,
    entropy,
    margin,
    top_prob,
)
from tests.router_lib import networks
from tests.serverproc import Server, concurrently

HIDDEN = 64
R2R_CLASS = networks.R2R_CLASSES[0]
MIXTURE = {2: (0.6, 0.4), 3: (0.5, 0.3, 0.2)}


@dataclass(frozen=True)
class Case:
    """What a request says of the router, and the rule that follows from it."""

    own: dict[str, float]
    rule: Callable[[], Rule]
    entry: int | None = None


@dataclass
class Routed:
    """A router with its command line; ``cases`` are what its requests may say."""

    name: str
    args: list[str]
    cases: list[Case]
    models: int = 2
    reference: RoutedReference = field(init=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three, of which the last two are of one size."""
    folder = tmp_path_factory.mktemp("routers")
    pair = build_random_pair(folder, seed=3)
    write_random_model(folder / "third", 1, random_prompts(16, Random("third")), seed=4)
    return [pair.slm, pair.llm, folder / "third"]


@pytest.fixture(scope="module")
def pair(models: list[Path]) -> RoutedReference:
    return RoutedReference(*models[:2])


@pytest.fixture(scope="module")
def three(models: list[Path]) -> RoutedReference:
    return RoutedReference(*models)


def one_way(
    reference: RoutedReference, parameter: str, signal: Signal, *, above: bool
) -> list[Case]:
    """Cases at three thresholds that divide the steps; float32, as a request's are held."""
    signals = reference.signals(random_prompts(4, Random("signals")), OUTPUT, signal)
    levels = torch.tensor([0.3, 0.5, 0.8], dtype=torch.float64)
    low, middle, high = torch.quantile(signals, levels).float().tolist()
    band = float(torch.tensor((high - low) / 2))

    def case(threshold: float, visit: int = 1, hysteresis: float = 0.0, **more: Any) -> Case:
        own = {parameter: threshold, "visit_tokens": float(visit), "hysteresis": hysteresis}
        options: dict[str, Any] = {"visit": visit, "hysteresis": hysteresis, "above": above}
        return Case(own, lambda: OneWay(signal, threshold, **options), **more)

    return [
        case(low),
        case(middle, entry=1),
        case(high),
        case(middle, visit=3),
        case(middle, hysteresis=band),
    ]


def learned(
    reference: RoutedReference, folder: Path, name: str, parameter: str
) -> tuple[Path, list[Case]]:
    file = folder / f"{name}.pt"
    content, signal = CHECKPOINTS[name](reference)
    torch.save(content, file)
    return file, one_way(reference, parameter, signal, above=name in ("r2r", "co-llm"))


def _r2r(reference: RoutedReference) -> tuple[Any, Signal]:
    tensors = networks.r2r_tensors(R2R_CLASS, HIDDEN)
    with safe_open(reference.models[0].path / "model.safetensors", framework="pt") as opened:
        table = opened.get_tensor("model.embed_tokens.weight")

    def signal(view: View) -> float:
        logits = view.logits[: view.size]
        hidden = view.hidden
        return networks.r2r_probability(R2R_CLASS, tensors, hidden, view.token, logits, table)

    return networks.r2r_file(R2R_CLASS, tensors), signal


def _citer(reference: RoutedReference) -> tuple[Any, Signal]:
    tensors = networks.confidence_tensors(HIDDEN)
    return tensors, lambda view: networks.confidence_probability(tensors, view.hidden)


def _edge(reference: RoutedReference) -> tuple[Any, Signal]:
    tensors = networks.confidence_tensors(HIDDEN, seed=1)
    return tensors, lambda view: networks.confidence_probability(tensors, view.tap)


def _co_llm(reference: RoutedReference) -> tuple[Any, Signal]:
    vector = networks.defer_vector(HIDDEN)
    return vector, lambda view: networks.defer_probability(vector, view.hidden)


EDGE = "confidence tap=pre-mlp"
CHECKPOINTS = {
    "r2r": _r2r,
    "citer": _citer,
    "confidence": _citer,
    EDGE: _edge,
    "co-llm": _co_llm,
}
LEARNED = {
    "r2r": "threshold",
    "citer": "tau",
    "confidence": "threshold",
    EDGE: "threshold",
    "co-llm": "eta",
}
SIGNALS = {"entropy": (entropy, True), "top-prob": (top_prob, False), "margin": (margin, False)}


def step_ends(reference: RoutedReference) -> frozenset[int]:
    """The ids of the bytes that end a step."""
    tokenizer = reference.models[0].tokenizer
    return frozenset(i for i in range(256) if tokenizer.decode([i]) in tuple(".!?\n"))


def routed(name: str, pair: RoutedReference, three: RoutedReference, folder: Path) -> Routed:
    args = ["--router", name.partition(" ")[0]]
    if name in SIGNALS:
        signal, above = SIGNALS[name]
        return Routed(name, args, one_way(pair, "threshold", signal, above=above))
    if name in LEARNED:
        file, cases = learned(pair, folder, name, LEARNED[name])
        given = ",".join((f"checkpoint={file}", *name.split()[1:]))
        return Routed(name, [*args, "--router-config", given], cases)
    if name == "r-stitch":
        taus = [(0.3, 0.0), (0.35, 0.1), (0.4, 0.3)]
        own = [{"tau": tau, "hysteresis": h} for tau, h in taus]
        exact = torch.tensor(taus).tolist()
        rules = [lambda tau=tau, h=h: BothWays(tau, h) for tau, h in exact]
        return Routed(name, args, [Case(o, rule) for o, rule in zip(own, rules, strict=True)])
    if name == "random":
        given = [(0.3, 0.4), (0.7, 0.2), (0.2, 1.0)]
        cases = [Case({"p": p, "q": q}, lambda p=p, q=q: Chance(p, q)) for p, q in given]
        return Routed(name, args, cases)
    if name == "step-leader":
        ends = step_ends(pair)
        cases = [Case({"tokens": n}, lambda n=n: Leader(n, ends)) for n in (0, 2, 7)]
        return Routed(name, args, cases)
    count = int(name.split()[1])
    weights = "/".join(map(str, MIXTURE[count]))
    config = ["--router-config", f"weights={weights}"]
    return Routed(
        name, [*args, *config], [Case({}, lambda: Mixture(MIXTURE[count]))] * 3, models=count
    )


USUAL = ("entropy", "r2r", "co-llm", "random", "step-leader", "me 3")
"""At least one of each kind; a server takes longer to start than to answer. The others differ from
these in a signal alone, which ``tests/router_lib`` compares in worlds without servers."""

SLOW = ("top-prob", "margin", "citer", "confidence", EDGE, "r-stitch", "me 2")
NAMES = (*USUAL, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))


@pytest.fixture(scope="module", params=NAMES)
def served(
    request: Any,
    models: list[Path],
    pair: RoutedReference,
    three: RoutedReference,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Routed, Server]]:
    found = routed(request.param, pair, three, tmp_path_factory.mktemp("checkpoint"))
    found.reference = three if found.models == 3 else pair
    paths = ",".join(map(str, models[: found.models]))
    args = ["--models", paths, "--dtype", "float32", "--device", "cpu", "--threads"]
    with Server([*args, ",".join("1" * found.models), *found.args]) as server:
        yield found, server


def asked(count: int) -> list[tuple[int, list[int], Setting]]:
    """Prompts, half of them sampled; every request has a seed of its own."""
    prompts = random_prompts(count, Random("routers"))
    return [
        (
            index,
            prompt,
            Setting(
                max_tokens=OUTPUT, temperature=float(index % 2), seed=LARGE_SEED >> index % 5 * 8
            ),
        )
        for index, prompt in enumerate(prompts)
    ]


def test_a_router_is_its_definition(served: tuple[Routed, Server], full: bool) -> None:
    router, server = served
    jobs = []
    for case in router.cases:
        for index, prompt, setting in asked(40 if full else 4 if len(router.cases) > 3 else 7):
            if case.entry is not None:
                setting = Setting(**{**vars_of(setting), "entry": case.entry})
            rule = case.rule()
            trace = router.reference.run(prompt, setting, rule, named=case.entry is not None)
            jobs.append((f"{router.name} {case.own}, prompt {index}", prompt, case, trace))

    def one(at: int) -> dict[str, Any]:
        _, prompt, case, trace = jobs[at]
        body = body_of(prompt, trace.setting, server.models)
        body["trserve"]["router"] = case.own
        found: dict[str, Any] = server.post(PATH, body, timeout_s=120.0)
        return found

    responses = concurrently(one, range(len(jobs)), 8)
    answers = [answer_of(response) for response in responses]
    traces = [trace for _, _, _, trace in jobs]
    assert_golden(zip([label for label, *_ in jobs], traces, answers, strict=True))
    for response, trace, answer in zip(responses, traces, answers, strict=True):
        check_accounts(response, trace, answer, server.models)
    check_variety(router, traces)


def vars_of(setting: Setting) -> dict[str, Any]:
    return {name: getattr(setting, name) for name in setting.__dataclass_fields__}


def answer_of(response: dict[str, Any]) -> Answer:
    (choice,) = response["choices"]
    return Answer(choice["token_ids"], choice["trserve"]["source"], choice["finish_reason"])


def check_accounts(
    response: dict[str, Any], trace: Trace, answer: Answer, names: list[str]
) -> None:
    """Counts by model, the share of the others than the first, and the handoffs."""
    own = response["usage"]["trserve"]
    written = Counter(names[source] for source in answer.sources)
    assert {name: n for name, n in own["tokens"].items() if n} == dict(written)
    share = sum(source != 0 for source in answer.sources) / len(answer.sources)
    assert abs(own["share"] - share) < 1e-3
    if compare(trace, answer).stop is None:
        assert own["handoffs"] == trace.handoffs
        check_scores(response, trace, answer)


def check_scores(response: dict[str, Any], trace: Trace, answer: Answer) -> None:
    """What the trace says of the kept tokens is what the rule decided on, where it is a signal."""
    scores = response["choices"][0]["trserve"].get("score")
    kept = [step for step in trace.steps if step.kept]
    for step, score in zip(kept, scores or [], strict=scores is not None):
        if score is not None and step.entropy == step.entropy:
            assert score == pytest.approx(step.entropy, abs=1e-4)


def check_variety(router: Routed, traces: list[Trace]) -> None:
    """Guards the guard: every model writes, and texts end in both ways."""
    sources = Counter(source for trace in traces for source in trace.sources)
    assert set(sources) == set(range(router.models))
    assert min(sources.values()) > 0.05 * sources.total()
    assert {trace.finish_reason for trace in traces} == {"stop", "length"}


def test_official_layouts_are_what_the_test_writes() -> None:
    """The number of parameters that the paper states for its router at a hidden size of 1,536."""
    shapes = {
        name: tensor.numel()
        for name, tensor in networks.r2r_tensors(R2R_CLASS, 1536, [1024] * 6, seed=1).items()
    }
    # The small networks read 20 logits instead of 100.
    assert sum(shapes.values()) + 80 * 1536 == pytest.approx(56.30e6, rel=1e-3)
