"""The router ``emulated``: requests travel along P and commit C, whatever the models."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests.golden.philox import uniform
from tests.router_lib.test_chance import request, step
from tests.router_lib.worlds import compare
from trserve.emulated.behaviour import behaviour_of, matrix_text
from trserve.errors import ConfigError
from trserve.router_lib.base import RouterContext
from trserve.router_lib.emulated import EmulatedRouter
from trserve.router_lib.random_router import RandomRouter
from trserve.router_lib.registry import EMULATED_PARAMETERS, FROM_PROFILE
from trserve.sched.algorithms import ALGORITHMS, behaviour

ROUTER = 1
DEFAULTS = {p.name: p.default for p in EMULATED_PARAMETERS}
THREE = {
    "routing": "0.5/0.3/0.2:0.1/0.2/0.7:0.9/0.1/0",
    "tokens": "1/0/1:1/1/1:1/1/1",
}
SHAPES: list[tuple[int, dict[str, Any]]] = [
    (2, {"p": 0.35}),
    (2, {"algorithm": "r2r", "p": 0.2}),
    (2, {"algorithm": "r-stitch", "p": 0.1, "q": 0.8}),
    (2, {"routing": "0.7/0.3:0.4/0.6", "tokens": "1/1:1/1"}),
    (3, {"algorithm": "me", "weights": "0.5/0.3/0.2"}),
    (3, THREE),
]


def values(**given: Any) -> dict[str, Any]:
    return {**DEFAULTS, **given}


def context(model: int, models: int, **given: Any) -> RouterContext:
    names = tuple(f"m{n}" for n in range(models))
    return RouterContext(model=model, models=names, tokenizer_size=8, config=values(**given))


@pytest.mark.parametrize(("models", "given"), SHAPES)
def test_p_and_c_are_realised(models: int, given: dict[str, Any]) -> None:
    """Chi-square of the destinations, and every commit, over 4,000 draws a model."""
    found = behaviour_of(values(**given), models)
    for model in range(models):
        router = EmulatedRouter(context(model, models, **given))
        asked = [request(seed, position) for seed in range(40) for position in range(100)]
        own = {p.name: given.get(p.name, FROM_PROFILE) for p in router.parameters}
        route = router.route(step(asked, **own))
        to = [router.peers[k - 1] if k else model for k in route]
        counts, row = Counter(to), found.routing[model]
        assert all(row[each] for each in counts)
        likely = [each for each in range(models) if row[each]]
        if len(likely) > 1:
            expected = [4000 * row[each] for each in likely]
            assert stats.chisquare([counts[each] for each in likely], expected).pvalue > 1e-4
        for req, destination in zip(asked, to, strict=True):
            if destination != model:
                assert router.send(req, 0).keep_token == found.tokens[model][destination]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms_are_the_schedulers(algorithm: str) -> None:
    """Their P, and their C wherever P says that it matters."""
    given = {"me": {"weights": "1/3"}, "r-stitch": {"p": 0.1, "q": 0.8}}.get(algorithm, {"p": 0.3})
    numbers = {"me": [1, 3], "r-stitch": [0.1, 0.8]}.get(algorithm, [0.3])
    found = behaviour_of(values(algorithm=algorithm, **given), 2)
    wanted = behaviour(algorithm, numbers)
    assert np.allclose(found.routing, wanted.routing)
    assert (found.tokens == wanted.tokens)[wanted.routing > 0].all()


def test_p_and_q_replace_rows_of_a_profile() -> None:
    given = {"routing": "0.65/0.35:1/0", "tokens": "1/0:1/0"}
    found = behaviour_of(values(p=0.1, q=0.25, **given), 2)
    assert np.allclose(found.routing, [[0.9, 0.1], [0.25, 0.75]])
    assert found.tokens.tolist() == [[1, 0], [1, 1]], "who stays commits"


def test_a_request_has_a_p_of_its_own() -> None:
    router = EmulatedRouter(context(0, 2, p=0.35))
    asked = [request(seed, 9) for seed in range(500)]
    for own in (0.0, 0.35, 0.9, 1.0):
        route = router.route(step(asked, p=own, q=FROM_PROFILE))
        assert route == [int(uniform(r.rid, 9, 0, ROUTER) < np.float32(own)) for r in asked]
    default = router.route(step(asked, p=FROM_PROFILE, q=FROM_PROFILE))
    assert default == [int(uniform(r.rid, 9, 0, ROUTER) < 0.35) for r in asked]
    assert not EmulatedRouter(context(0, 3, **THREE)).parameters, "three models have no p"


def test_the_values_of_a_profile_are_told() -> None:
    given = {"routing": "0.65/0.35:1/0", "tokens": "1/0:1/0"}
    for model in (0, 1):
        config = EmulatedRouter(context(model, 2, **given)).context.config
        assert (config["p"], config["q"]) == (0.35, 1.0)


def test_two_models_travel_as_with_the_router_random() -> None:
    asked = [request(seed, 9) for seed in range(500)]
    for model in (0, 1):
        other = RandomRouter(context(model, 2, p=0.3, q=0.6))
        ours = EmulatedRouter(context(model, 2, p=0.3, q=0.6))
        result = step(asked, p=0.3, q=0.6)
        assert ours.route(result) == other.route(result)


@pytest.mark.parametrize(("models", "given"), [SHAPES[0], SHAPES[2], SHAPES[5]])
def test_requests_travel_and_commit_as_a_plain_loop_says(models: int, given: Any) -> None:
    """Through the runtime's own steps, sends and handoffs."""
    found = behaviour_of(values(**given), models)
    last = [0]

    def decide(seed: int, prompt_len: int) -> Any:
        def rule(model: int, row: Any) -> int:
            u, destination = uniform(seed, len(row) - 1, model, ROUTER), 0
            others = [m for m in range(models) if m != model]
            for k in range(len(others), 0, -1):
                below = sum(found.routing[model][others[:k]])
                if u < below or (k == len(others) and not found.routing[model][model]):
                    destination = k
            last[0] = others[destination - 1] if destination else model
            return destination

        return rule

    outcomes = compare(
        EmulatedRouter,
        values(**given),
        decide,
        keeps=lambda model, row: int(found.tokens[model][last[0]]),
        models=models,
        own=None,
    )
    assert {source for each in outcomes for source in each.sources} == set(range(models))


@pytest.mark.parametrize(
    ("models", "given", "message"),
    [
        (2, {}, "needs --router-config"),
        (3, {"p": 0.3}, "two models"),
        (2, {"algorithm": "r2r"}, r"algorithm=r2r: needs p"),
        (2, {"algorithm": "r-stitch", "p": 0.3}, r"needs q"),
        (3, {"algorithm": "r2r", "p": 0.3}, "two models"),
        (2, {"algorithm": "me"}, "algorithm: me"),
        (2, {"p": 0.3, "weights": "1/3"}, "weights=1/3: is for algorithm=me"),
        (2, {"algorithm": "r2r", "p": 0.3, "weights": "1/3"}, "weights=1/3: is for algorithm=me"),
        (3, {**THREE, "weights": "1/3/1"}, "weights=1/3/1: is for algorithm=me"),
        (3, {**THREE, "algorithm": "me", "weights": "1/3/1"}, "routing=0.5.*algorithm=me says"),
        (2, {"algorithm": "r2r", "p": 0.3, "tokens": "1/1:1/1"}, "tokens=1.*algorithm=r2r says"),
        (2, {"routing": "0.5/0.5", "tokens": "1/1:1/1"}, "routing: "),
        (2, {"routing": "0.5/0.6:1/0", "tokens": "1/1:1/1"}, "routing: "),
        (2, {"routing": "x/0.6:1/0", "tokens": "1/1:1/1"}, "routing: "),
        (2, {"routing": "0.5/0.5:1/0"}, "tokens: "),
        (2, {"routing": "0.5/0.5:1/0", "tokens": "1/0.5:1/1"}, "tokens: "),
        (2, {"routing": "0.5/0.5:0.5/0.5", "tokens": "1/0:0/1"}, "tokens: "),
        (2, {"routing": "0.5/0.5:0.5/0.5", "tokens": "0/1:1/1"}, "tokens: "),
    ],
)
def test_what_does_not_fit_is_named(models: int, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        behaviour_of(values(**given), models)


def test_a_matrix_survives_the_command_line() -> None:
    matrix = [[0.1, 0.9], [1 / 3, 2 / 3]]
    text = matrix_text(matrix)
    assert "," not in text
    found = behaviour_of(values(routing=text, tokens="1/1:1/1"), 2)
    assert found.routing.tolist() == matrix
