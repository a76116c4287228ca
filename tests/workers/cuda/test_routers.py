"""Routers that decide within a step decide what they decide after it; the others are asked then."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.models.reference import make_model, save
from tests.router_lib import networks
from tests.workers.cuda.harness import Beside, graphs_runner, router_of
from trserve.router_lib.base import BaseRouter, RouterContext, StepResult
from trserve.router_lib.promises import is_capturable
from trserve.router_lib.registry import BUILTIN, load_router_class
from trserve.router_lib.target_share import ShareControl
from trserve.router_lib.uncertainty import Entropy
from trserve.workers.routing import Routing

HIDDEN = 48
CAPTURABLE = {"r-stitch", "r2r", "citer", "co-llm", "confidence", "entropy", "top-prob", "margin"}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(make_model("qwen3"), tmp_path_factory.mktemp("model"))


def learned(name: str, path: Path, folder: Path, **config: Any) -> BaseRouter:
    """A learned router for the model ``path``, with a small random network."""
    file = folder / f"{name}.safetensors"
    if name == "r2r":
        kind = networks.R2R_CLASSES[0]
        save_file(networks.r2r_tensors(kind, HIDDEN, (32, 32)), file)
        file.with_suffix(".json").write_text(json.dumps({"model_type": kind}))
    elif name == "co-llm":
        save_file({"vector": networks.defer_vector(HIDDEN)}, file)
    else:
        save_file(networks.confidence_tensors(HIDDEN), file)
    return router_of(name, checkpoint=str(file), model=str(path), **config)


def median_of(beside: Beside) -> float:
    """A threshold that divides the rows of one step."""
    rows = [beside.row(int(n)) for n in beside.rng.integers(1, 9, 6)]
    beside.fill(rows, [len(row.tokens) for row in rows])
    found = beside.graphs.decide(beside.step, beside.ask(rows))
    assert found.scores is not None
    return float(sorted(found.scores.tolist())[2])


def check(beside: Beside) -> None:
    """Steps of all shapes, some of whose rows leave and some of which stay."""
    name, middle = beside.router.parameters[0].name, median_of(beside)
    rows = [beside.row(6, temperature=t) for t in (0.0, 0.0, 0.0, 1.0, 1.0)]
    seen: set[int | None] = set()
    for number, count in enumerate((4, 1, 3, 1, 1)):
        for row in rows[1:]:
            row.params.router[name] = middle
        # The last two have just come from the other model, by the length that came with them.
        for row in rows[3:]:
            row.extras = struct.pack("<i", len(row.tokens))
        tokens, destinations = beside.check(rows, [count] * len(rows))
        seen |= set(destinations)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.tokens += [token, number, 7]
    assert seen == {0, 1}


@pytest.mark.parametrize("name", ["entropy", "top-prob", "margin"])
def test_signals(path, name):
    check(Beside(path, router_of(name, hysteresis=0.2), seed=1))


def test_both_ways(path):
    for model in (0, 1):
        check(Beside(path, router_of("r-stitch", model, hysteresis=0.1), seed=2))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("r2r", {"hysteresis": 0.01}),
        ("citer", {}),
        ("confidence", {"tap": "pre-mlp"}),
        ("co-llm", {"warm_up": 4.0}),
    ],
)
def test_learned(path, tmp_path, name, config):
    """Networks, the tap before the last MLP, and thresholds that depend on the request."""
    config |= {"eta" if name == "co-llm" else "tau" if name == "citer" else "threshold": 0.5}
    check(Beside(path, learned(name, path, tmp_path, **config), seed=3))


@pytest.mark.parametrize("name", sorted(set(BUILTIN) - {"emulated"}))
def test_which_routers_can_be_captured(name):
    assert load_router_class(name).capturable is (name in CAPTURABLE)


def test_where_a_router_has_no_score_the_host_asks_it(path):
    """Model 1 of the one-way routers only counts, and chance is drawn on the host."""
    for router in (router_of("entropy", 1), router_of("random"), router_of("none")):
        runner = graphs_runner(path, router)
        assert not runner.routes and not router.reads_model


class Overridden(Entropy):
    """A signal that asks for values."""

    def signal(self, result: StepResult) -> torch.Tensor:
        return torch.tensor([float(value) for value in result.logits.amax(-1).tolist()])


class Declared(Overridden):
    """Says that it has thought of that."""

    capturable = True


class Failing(BaseRouter):
    """Declares what it does not keep."""

    capturable = True

    def route(self, result: StepResult) -> list[int]:
        return [0] * len(result.requests)

    def score(self, result: StepResult) -> torch.Tensor:
        largest = result.logits.amax(-1)
        return largest if largest.max() > 0 else -largest


def instance(kind: type[BaseRouter]) -> BaseRouter:
    config = {parameter.name: parameter.default for parameter in kind.parameters}
    return kind(RouterContext(0, ("a", "b"), 90, config))


def test_an_override_takes_the_declaration_back():
    assert is_capturable(instance(Entropy))
    assert not is_capturable(instance(Overridden))
    assert is_capturable(instance(Declared))


def test_a_router_that_breaks_its_word_is_asked_after_the_step(path, caplog):
    runner = graphs_runner(path, instance(Failing))
    assert not runner.routes
    assert "cannot be captured" in caplog.text and "asks for a value" in caplog.text


def test_a_threshold_that_is_moved_at_each_step_leaves_the_decision_to_the_host():
    router = instance(Entropy)
    share = ShareControl(0.2, router, [memoryview(np.zeros(4, np.int64))] * 2)
    request: Any = SimpleNamespace(params=SimpleNamespace(router={}), extras=b"")
    assert Routing(router).bounds([request]).tolist() == pytest.approx([0.03])
    assert Routing(router, share).bounds([request]) is None


def test_bounds_that_fail_leave_the_decision_to_the_host(caplog):
    class Broken(Entropy):
        def limits(self, params, requests):
            raise ValueError("no")

    assert Routing(instance(Broken)).bounds([]) is None
    assert "asking it after the step" in caplog.text
