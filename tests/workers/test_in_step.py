"""Steps that decide by themselves: what the device said is done, and the host decides the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.workers.fakes import (
    EOS,
    VOCAB,
    HashRunner,
    hash_route,
    hash_token,
    reference,
    stay,
    world,
)
from trserve.router_lib.base import BaseRouter, StepResult
from trserve.router_lib.parameters import Parameter
from trserve.workers.in_step import StepAsk
from trserve.workers.runner import ForwardOutput
from trserve.workers.sampler import Sampler
from trserve.workers.step import StepInputs

PROMPT = [11, 12, 13, 14, 15]
DECIDE = hash_route(1, 30)


class DecidingRunner(HashRunner):
    """Decides as the reference does; its logits then say nothing to anybody who asks them."""

    routes: ClassVar[bool] = True
    asked: ClassVar[list[str]] = []

    def prepare(self, router: BaseRouter) -> None:
        raise AssertionError("the cycle does not prepare it")

    def decide(self, step: StepInputs, ask: StepAsk) -> ForwardOutput:
        sampling = ask.sampling
        assert not (sampling.banned or sampling.adjustments or sampling.forbidden)
        output = super().forward(step)
        output.tokens = Sampler(self.model).sample(output.logits, sampling)
        output.logits = torch.full_like(output.logits, torch.nan)
        type(self).asked.append("tokens" if ask.bounds is None else "both")
        if ask.bounds is not None:
            output.destinations = [
                DECIDE(self.model, [*self._held(step, row, int(step.kv_len[row])), token])
                for row, token in enumerate(output.tokens.tolist())
            ]
            output.scores = np.zeros(len(output.tokens), np.float32)
        return output

    def forward(self, inputs: StepInputs, also: Any = None) -> ForwardOutput:
        type(self).asked.append("neither")
        return super().forward(inputs, also)


class Router(BaseRouter):
    """Counts how often it is asked after a step."""

    capturable = True
    routed: ClassVar[int] = 0

    def bounds(self, params: Any, requests: Sequence[Any]) -> torch.Tensor:
        return torch.zeros(len(requests))

    def route(self, result: StepResult) -> list[int]:
        type(self).routed += 1
        return [DECIDE(self.model, request.token_ids.tolist()) for request in result.requests]


@pytest.fixture(autouse=True)
def fresh() -> None:
    DecidingRunner.asked, Router.routed = [], 0


def run(*wanted: dict[str, Any]) -> None:
    """Each of ``wanted`` ends as the plain loop says."""
    with world(router=Router, runner=DecidingRunner) as w:
        prompts = [[*PROMPT, number] for number in range(len(wanted))]
        slots = [w.submit(p, limit=40, **each) for p, each in zip(prompts, wanted, strict=True)]
        w.run(*slots)
        for prompt, slot, each in zip(prompts, slots, wanted, strict=True):
            decide = (lambda model, row: 0) if each.get("pinned") else DECIDE
            expected = reference(prompt, limit=40, models=2, decide=decide)
            assert w.outcome(slot) == expected


def test_what_the_step_decided_is_done_and_nobody_else_is_asked():
    run({}, {"temperature": 0.0, "top_k": 1}, {"pinned": True})
    assert Router.routed == 0
    assert {"both"} <= set(DecidingRunner.asked)


def test_bounds_of_the_wrong_shape_leave_it_to_the_host(monkeypatch):
    monkeypatch.setattr(Router, "bounds", lambda self, params, requests: torch.zeros(1, 3))
    run({}, {})
    assert Router.routed > 0
    assert "both" not in DecidingRunner.asked


def test_bounds_that_write_into_the_parameters_find_them_unchanged(monkeypatch):
    """In steps whose rows are kept: nobody leaves, and there are many."""
    seen = []

    def bounds(self, params, requests):
        seen.append(params["bar"].tolist())
        return params["bar"].sub_(1.0)

    monkeypatch.setattr(Router, "bounds", bounds)
    monkeypatch.setattr(Router, "parameters", (Parameter("bar", "a bound", default=2.0),))
    monkeypatch.setattr(f"{__name__}.DECIDE", stay)
    with world(router=Router, runner=DecidingRunner, config={"bar": 2.0}) as w:
        w.run(w.submit(PROMPT, limit=30, ignore_eos=True))
    assert seen == [[2.0]] * 25


def test_steps_that_stay_the_same_decide_as_well():
    """Nobody leaves for long enough that the rows are kept from step to step."""
    run({"pinned": True})
    assert DecidingRunner.asked[-1] == "tokens"


def test_what_needs_the_host_is_decided_there():
    """A bias changes no choice here; but it is an adjustment, which no step knows."""
    run({"logit_bias": {(EOS + 1) % VOCAB: -0.5}})
    assert Router.routed > 0
    assert "neither" in DecidingRunner.asked


def test_a_trace_has_the_scores_before_the_decision():
    run({"trace": True})
    assert Router.routed > 0
    assert "both" not in DecidingRunner.asked


def test_rows_in_the_middle_of_their_prompts_are_passed_over():
    with world(router=Router, runner=DecidingRunner, max_tokens=6) as w:
        long = [hash_token(0, [n]) for n in range(20)]
        slots = [w.submit(PROMPT, limit=30), w.submit(long, limit=30)]
        w.run(*slots)
        for prompt, slot in zip((PROMPT, long), slots, strict=True):
            assert w.outcome(slot) == reference(prompt, limit=30, models=2, decide=DECIDE)
    assert Router.routed == 0
