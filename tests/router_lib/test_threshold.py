"""One-way routers by a threshold: entropy, top-prob, margin; visits and hysteresis; exact sides."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.router_lib.worlds import Decide, compare, sharpness
from tests.workers.fakes import VOCAB
from trserve.router_lib.base import RouterContext, StepResult
from trserve.router_lib.registry import BUILTIN
from trserve.router_lib.threshold import ThresholdRouter
from trserve.router_lib.uncertainty import Entropy, Margin, TopProb


def peak(token: int) -> float:
    return math.exp(sharpness(token)) / (math.exp(sharpness(token)) + VOCAB - 1)


def entropy(token: int) -> float:
    p = peak(token)
    rest = (1 - p) / (VOCAB - 1)
    return -(p * math.log(p) + (VOCAB - 1) * rest * math.log(rest)) / math.log(VOCAB)


def margin(token: int) -> float:
    return peak(token) - (1 - peak(token)) / (VOCAB - 1)


CASES: dict[str, tuple[type[ThresholdRouter], Callable[[int], float], bool]] = {
    "entropy": (Entropy, entropy, True),
    "top-prob": (TopProb, peak, False),
    "margin": (Margin, margin, False),
}


def between(signal: Callable[[int], float], below: int) -> float:
    """A threshold with ``below`` of the eleven values under it, half way to the next."""
    values = sorted(signal(token) for token in range(11))
    return (values[below - 1] + values[below]) / 2


def rule(
    signal: Callable[[int], float],
    above: bool,
    threshold: float,
    visit_tokens: int = 1,
    hysteresis: float = 0.0,
) -> Callable[[int, int], Decide]:
    def for_request(seed: int, prompt_len: int) -> Decide:
        came, went_back = prompt_len, None

        def decide(model: int, row: Any) -> int:
            nonlocal came, went_back
            if model == 1:
                if len(row) - came < visit_tokens:
                    return 0
                went_back = len(row)
                return 1
            bound = threshold
            if len(row) - 1 == went_back:
                bound += -hysteresis if above else hysteresis
            value = signal(row[-1])
            if value > bound if above else value < bound:
                came = len(row) - 1
                return 1
            return 0

        return decide

    return for_request


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("visit_tokens", [1, 3])
@pytest.mark.parametrize("entry", [0, 1])
def test_uncertain_tokens_are_the_other_models(name: str, visit_tokens: int, entry: int) -> None:
    router, signal, above = CASES[name]
    threshold = between(signal, 5)
    config = {"threshold": threshold, "hysteresis": 0.0, "visit_tokens": float(visit_tokens)}
    decide = rule(signal, above, threshold, visit_tokens)
    outcomes = compare(router, config, decide, entry=entry)
    assert {source for outcome in outcomes for source in outcome.sources} == {0, 1}
    assert outcomes == compare(router, config, decide, entry=entry, max_rows=1)
    # What a request says wins over what the server was given.
    other = {"threshold": 0.0, "hysteresis": 0.5, "visit_tokens": 9.0}
    assert outcomes == compare(router, other, decide, entry=entry, own=config)


@pytest.mark.parametrize("name", CASES)
def test_right_after_a_visit_a_token_must_be_better_by_the_hysteresis(name: str) -> None:
    router, signal, above = CASES[name]
    below = 8 if above else 3
    threshold = between(signal, below)
    hysteresis = abs(threshold - between(signal, 5))
    plain = {"threshold": threshold, "hysteresis": 0.0, "visit_tokens": 1.0}
    without = compare(router, plain, rule(signal, above, threshold))
    stayed = compare(
        router,
        plain | {"hysteresis": hysteresis},
        rule(signal, above, threshold, hysteresis=hysteresis),
    )
    share = [sum(sum(each.sources) for each in run) for run in (without, stayed)]
    assert share[0] < share[1], "the other model keeps the floor for longer"


def step(router: ThresholdRouter, signal: float, **params: float) -> StepResult:
    request = SimpleNamespace(extras=b"", committed_len=3, prompt_len=2)
    return StepResult(
        logits=torch.tensor([[signal]]),
        hidden=torch.zeros(1, 1),
        token_ids=torch.zeros(1, dtype=torch.long),
        params={name: torch.tensor([value]) for name, value in params.items()},
        requests=[request],  # type: ignore[list-item]
        is_prefill=torch.zeros(1, dtype=torch.bool),
    )


@pytest.mark.parametrize(
    ("above", "inclusive", "routed"),
    [
        (True, False, [0, 0, 1]),
        (True, True, [0, 1, 1]),
        (False, False, [1, 0, 0]),
        (False, True, [1, 1, 0]),
    ],
)
def test_the_side_of_the_threshold(above: bool, inclusive: bool, routed: list[int]) -> None:
    class Router(ThresholdRouter):
        parameters = BUILTIN["entropy"].parameters

        def signal(self, result: StepResult) -> torch.Tensor:
            return result.logits[:, 0]

    Router.above, Router.inclusive = above, inclusive
    router = Router(RouterContext(model=0, models=("a", "b"), tokenizer_size=1, config={}))
    params = {"threshold": 0.5, "hysteresis": 0.0, "visit_tokens": 1.0}
    results = [step(router, signal, **params) for signal in (0.25, 0.5, 0.75)]
    assert [int(router.route(result)[0]) for result in results] == routed
    assert [float(router.score(result)) for result in results] == [0.25, 0.5, 0.75]


def test_a_signal_that_is_no_number_routes_nothing() -> None:
    """The row's logits are not finite then, and the sampler ends the request."""
    router = TopProb(RouterContext(model=0, models=("a", "b"), tokenizer_size=1, config={}))
    result = step(router, math.nan, threshold=0.5, hysteresis=0.0, visit_tokens=1.0)
    assert list(router.route(result)) == [0]


def test_the_other_model_decides_on_nothing() -> None:
    router = TopProb(RouterContext(model=1, models=("a", "b"), tokenizer_size=1, config={}))
    result = step(router, 0.2, threshold=0.5, hysteresis=0.0, visit_tokens=1.0)
    assert router.score(result) is None
    assert list(router.route(result)) == [1]


@pytest.mark.parametrize(("model", "kept"), [(0, False), (1, True)])
def test_a_hop_says_at_which_length_it_arrives(model: int, kept: bool) -> None:
    router = TopProb(RouterContext(model=model, models=("a", "b"), tokenizer_size=1, config={}))
    request: Any = SimpleNamespace(rid=1, committed_len=300, token_ids=np.zeros(301, np.int32))
    peer_req = router.send(request, 0)
    assert peer_req.keep_token is kept
    assert peer_req.extras == (300 + kept).to_bytes(4, "little")
