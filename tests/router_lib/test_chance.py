"""The routers by chance: which number decides what, and the laws that follow from it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.golden.philox import uniform
from tests.router_lib.worlds import PROMPTS, compare
from trserve.errors import ConfigError
from trserve.router_lib.base import RouterContext, StepResult
from trserve.router_lib.draws import RouterDraws
from trserve.router_lib.me import MixtureEnsemble
from trserve.router_lib.random_router import RandomRouter

ROUTER, ADMIT = 1, 2
WEIGHTS = {2: "0.7/0.3", 3: "0.5/0.3/0.2", 4: "1/0/2/1"}


def request(seed: int, length: int, prompt_len: int = 1) -> Any:
    sampling = SimpleNamespace(seed=seed)
    return SimpleNamespace(
        committed_len=length,
        prompt_len=prompt_len,
        params=SimpleNamespace(sampling=sampling, router={}),
        rid=seed,
        token_ids=np.zeros(length + 1, np.int32),
    )


def context(model: int, models: int, **config: Any) -> RouterContext:
    names = tuple(f"m{n}" for n in range(models))
    return RouterContext(model=model, models=names, tokenizer_size=8, config=config)


def step(requests: list[Any], **params: float) -> StepResult:
    rows = len(requests)
    return StepResult(
        logits=torch.zeros(rows, 8),
        hidden=torch.zeros(rows, 1),
        token_ids=torch.zeros(rows, dtype=torch.long),
        params={name: torch.full((rows,), value) for name, value in params.items()},
        requests=requests,
        is_prefill=torch.zeros(rows, dtype=torch.bool),
    )


def drawn(weights: str, u: float) -> int:
    """The model at ``u`` of the cumulative weights, by a plain sum."""
    numbers = [float(part) for part in weights.split("/")]
    below = 0.0
    for model, weight in enumerate(numbers):
        below += weight / sum(numbers)
        if u < below:
            return model
    raise AssertionError("the weights end below 1")


@pytest.mark.parametrize("seed", [0, 7, 2**32, 2**64 - 1])
@pytest.mark.parametrize("model", [0, 2])
def test_numbers_are_those_of_the_generator_in_any_order(seed: int, model: int) -> None:
    draws = RouterDraws(model)
    positions = [5, 64, 63, 4096, 5, 0, 65]
    asked = [request(seed, position) for position in positions]
    expected = [uniform(seed, position, model, ROUTER) for position in positions]
    assert draws.at(asked) == expected
    assert [draws.at([each])[0] for each in reversed(asked)] == expected[::-1]
    assert RouterDraws(model).at(asked[3:4]) == expected[3:4]
    assert draws.admit(request(seed, 9, prompt_len=9)) == uniform(seed, 9, model, ADMIT)


def test_what_is_remembered_is_bounded_and_changes_nothing() -> None:
    draws = RouterDraws(0)
    for seed in range(5000):
        draws.at([request(seed, 3)])
    assert len(draws._blocks) <= 4096
    assert draws.at([request(1, 3)]) == [uniform(1, 3, 0, ROUTER)]


def test_random_goes_there_and_back_by_its_draws() -> None:
    p, q = 0.4, 0.3

    def decide(seed: int, prompt_len: int) -> Any:
        def rule(model: int, row: Any) -> int:
            return int(uniform(seed, len(row) - 1, model, ROUTER) < (q if model else p))

        return rule

    outcomes = compare(RandomRouter, {"p": p, "q": q}, decide)
    assert {source for outcome in outcomes for source in outcome.sources} == {0, 1}
    assert outcomes == compare(RandomRouter, {"p": p, "q": q}, decide, max_rows=1)
    assert outcomes == compare(RandomRouter, {"p": 0.0, "q": 1.0}, decide, own={"p": p, "q": q})


@pytest.mark.parametrize(("p", "q"), [(0.0, 1.0), (1.0, 1.0), (1.0, 0.0)])
def test_random_at_the_ends_of_its_range(p: float, q: float) -> None:
    def decide(seed: int, prompt_len: int) -> Any:
        return lambda model, row: int((q if model else p) == 1.0)

    outcomes = compare(RandomRouter, {"p": p, "q": q}, decide)
    assert {source for outcome in outcomes for source in outcome.sources} == {int(p == 1.0)}


@pytest.mark.parametrize(("model", "name"), [(0, "p"), (1, "q")])
def test_random_routes_with_its_probability(model: int, name: str) -> None:
    router = RandomRouter(context(model, 2, p=0.2, q=0.7))
    asked = [request(seed, position) for seed in range(40) for position in range(100)]
    result = step(asked, p=0.2, q=0.7)
    share = sum(router.route(result)) / len(asked)
    probability = {"p": 0.2, "q": 0.7}[name]
    # Four standard deviations.
    assert abs(share - probability) < 4 * (probability * (1 - probability) / len(asked)) ** 0.5
    scores = router.score(result).double()
    assert [int(u < probability) for u in scores.tolist()] == router.route(result)


@pytest.mark.parametrize("models", WEIGHTS)
def test_every_token_is_the_drawn_models_the_first_one_too(models: int) -> None:
    weights = WEIGHTS[models]

    def decide(seed: int, prompt_len: int) -> Any:
        def rule(model: int, row: Any) -> int:
            wanted = drawn(weights, uniform(seed, len(row) - 1, model, ROUTER))
            others = [m for m in range(models) if m != model]
            return 0 if wanted == model else 1 + others.index(wanted)

        return rule

    outcomes = compare(
        MixtureEnsemble,
        {"weights": weights},
        decide,
        keeps=lambda model, row: 1,
        models=models,
        admit=lambda seed, prompt_len: drawn(weights, uniform(seed, prompt_len, 0, ADMIT)),
    )
    assert len({outcome.sources[0] for outcome in outcomes}) > 1, "the first token is drawn as well"


@pytest.mark.parametrize("models", WEIGHTS)
def test_the_writers_are_independent_draws_of_the_weights(models: int) -> None:
    """Chi-square of the pairs of neighbours along many chains, their beginnings included."""
    weights = WEIGHTS[models]
    routers = [MixtureEnsemble(context(m, models, weights=weights)) for m in range(models)]
    pairs: Counter[tuple[int, int]] = Counter()
    for seed in range(400):
        writers = [routers[0].admit(request(seed, 4, prompt_len=4))]
        for position in range(4, 12):
            router = routers[writers[-1]]
            (destination,) = router.route(step([request(seed, position)]))
            writers.append(router.peers[destination - 1] if destination else router.model)
        # Every second pair, so that they do not overlap.
        pairs.update(list(pairwise(writers))[::2])
    numbers = np.array([float(part) for part in weights.split("/")])
    law = np.outer(numbers, numbers) / numbers.sum() ** 2
    found = np.array([[pairs[a, b] for b in range(models)] for a in range(models)])
    assert found[law == 0].sum() == 0
    total = found.sum()
    statistic = (((found - total * law) ** 2)[law > 0] / (total * law[law > 0])).sum()
    # The 99.9 % points of chi-squared.
    bound = {3: 16.3, 8: 26.1}[int((law > 0).sum()) - 1]
    assert statistic < bound


def test_equal_weights_by_default_and_any_scale() -> None:
    asked = [request(seed, 3) for seed in range(300)]
    routes = [
        MixtureEnsemble(context(1, 3, weights=weights)).route(step(asked))
        for weights in ("", "1/1/1", "7/7/7")
    ]
    assert routes[0] == routes[1] == routes[2]
    assert set(routes[0]) == {0, 1, 2}


def test_weights_must_be_as_many_as_models() -> None:
    with pytest.raises(ConfigError, match="2 for 3 models"):
        MixtureEnsemble(context(0, 3, weights="1/2"))


def test_a_weight_of_zero_gets_nothing_whatever_the_rounding() -> None:
    router = MixtureEnsemble(context(0, 4, weights="0.1/0.2/0.7/0"))
    assert router._drawn(np.nextafter(1.0, 0.0)) == 2
    assert MixtureEnsemble(context(0, 3, weights="0/1/1"))._drawn(0.0) == 1


def test_prompts_differ_in_length() -> None:
    """Guards the worlds: positions are counted from the row's beginning, prompt included."""
    assert len({len(prompt) for prompt in PROMPTS}) > 3
