"""The dispatcher's rules with models that are made up."""

import asyncio
import itertools
import json
import math
import random

import pytest

from bench.std_dispatch import Row, Tally, read_token, write
from bench.std_official import Lane, lockstep
from bench.std_policy import (
    LLM,
    SLM,
    Alone,
    Chance,
    Decision,
    Drawn,
    EntropyStitch,
    Mixture,
    TopProbability,
    normalized_entropy,
)
from bench.workloads import Question, Workload

SURE = [math.log(0.98), math.log(0.01)]
UNSURE = [math.log(0.05)] * 20


class Scripted:
    """A model that draws tokens of its own: 100 x (its index + 1) + their position."""

    def __init__(self, model, ends_at=None, logprobs=()):
        self.model, self.ends_at, self.logprobs, self.asked = model, ends_at, logprobs, []

    async def token(self, row):
        position = len(row.output)
        self.asked.append(list(row.output))
        tops = self.logprobs[len(self.asked) - 1] if self.logprobs else ()
        return Drawn(100 * (self.model + 1) + position, tops, position == self.ends_at)


class Routed:
    """Routes the small model's tokens at ``positions``, for one token each."""

    tops = 0

    def __init__(self, *positions):
        self._positions, self._drawn = positions, itertools.count()

    def decide(self, model, drawn):
        if model == LLM:
            return Decision(True, SLM)
        routed = drawn.token % 100 in self._positions
        return Decision(not routed, LLM if routed else SLM)


def run(policy, models, most=4):
    tally = Tally(len(models))
    output = asyncio.run(write(Row([7, 8]), models, policy, most, tally))
    return output, tally


def test_a_routed_token_is_replaced():
    models = [Scripted(0), Scripted(1)]
    output, tally = run(Routed(1, 2), models)
    assert output == [100, 201, 202, 103]
    assert tally.tokens == [2, 2] and tally.handoffs == 4 and tally.calls == 6
    assert models[1].asked == [[100], [100, 201]]


def test_a_discarded_end_ends_nothing_and_a_kept_one_does():
    assert run(Routed(1), [Scripted(0, ends_at=1), Scripted(1)])[0] == [100, 201, 102, 103]
    assert run(Routed(1), [Scripted(0), Scripted(1, ends_at=1)])[0] == [100, 201]
    assert run(Alone(), [Scripted(0, ends_at=2)])[0] == [100, 101, 102]


def test_r_stitch_keeps_every_token_of_the_large_model():
    models = [Scripted(0, logprobs=[UNSURE, SURE]), Scripted(1, logprobs=[UNSURE, SURE])]
    output, tally = run(EntropyStitch(0.1, 1000), models, most=3)
    assert output == [200, 201, 102]
    assert tally.handoffs == 2


@pytest.mark.parametrize(("p", "expected"), [(0.0, [100, 101, 102]), (1.0, [200, 201, 202])])
def test_never_and_always(p, expected):
    assert run(Chance(p, seed=1), [Scripted(0), Scripted(1)], most=3)[0] == expected


def test_chance_has_its_probabilities_and_its_seed():
    def decisions(seed):
        policy = Chance(0.3, 0.6, seed=seed)
        return [[policy.decide(model, Drawn(0)) for _ in range(5000)] for model in (SLM, LLM)]

    small, large = decisions(3)
    assert [small, large] == decisions(3) != decisions(4)
    assert sum(each == Decision(False, LLM) for each in small) / 5000 == pytest.approx(
        0.3, abs=0.03
    )
    assert sum(each == Decision(True, SLM) for each in large) / 5000 == pytest.approx(0.6, abs=0.03)


def test_a_mixture_keeps_all_and_draws_by_weight():
    policy = Mixture((0.5, 0.3, 0.2), seed=1)
    decisions = [policy.decide(0, Drawn(0)) for _ in range(5000)]
    assert all(decision.keep for decision in decisions)
    shares = [sum(d.model == model for d in decisions) / 5000 for model in range(3)]
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.03)


def test_top_probability():
    policy = TopProbability(0.9)
    assert policy.decide(SLM, Drawn(1, SURE)) == Decision(True, SLM)
    assert policy.decide(SLM, Drawn(1, UNSURE)) == Decision(False, LLM)
    assert policy.decide(LLM, Drawn(1, UNSURE)) == Decision(True, SLM)


def test_the_entropy_of_twenty_is_at_most_the_exact_one_and_near_it():
    dice = random.Random(5)
    for sharpness in (2, 5, 10):
        weights = [math.exp(sharpness * dice.random()) ** 3 for _ in range(500)]
        probabilities = sorted((w / sum(weights) for w in weights), reverse=True)
        exact = -sum(p * math.log(p) for p in probabilities) / math.log(500)
        found = normalized_entropy([math.log(p) for p in probabilities[:20]], 500)
        left = 1 - sum(probabilities[:20])
        assert exact - left - 1e-9 <= found <= exact + 1e-9


def test_the_entropy_of_a_certain_token_is_nothing():
    assert normalized_entropy([0.0], 1000) == 0
    assert normalized_entropy([-1e-9, -30.0], 1000) == pytest.approx(0, abs=1e-6)


def test_a_row_is_sent_as_json():
    row = Row([5, 6])
    row.append(7)
    assert json.loads(row.body(b'"max_tokens":1')) == {"prompt": [5, 6, 7], "max_tokens": 1}


def test_an_answer_of_one_token_is_read():
    choice = {"token_ids": [9], "finish_reason": "stop", "logprobs": None}
    assert read_token(json.dumps({"choices": [choice]}).encode()) == Drawn(9, (), True)
    choice = {
        "token_ids": [9],
        "finish_reason": "length",
        "logprobs": {"top_logprobs": [{"a": -0.5, "b": -1.5}]},
    }
    assert read_token(json.dumps({"choices": [choice]}).encode()) == Drawn(9, [-0.5, -1.5], False)


def test_a_static_batch_waits_for_its_routed_rows():
    tally = Tally(2)
    lanes = [lane(Routed(0)), lane(Routed())]
    asyncio.run(lockstep(lanes, tally))
    assert [each.row.output for each in lanes] == [[200], [100]]
    asyncio.run(lockstep(lanes, tally))
    assert [each.row.output for each in lanes] == [[200, 101], [100, 101]]
    assert all(each.ended for each in lanes) and tally.tokens == [3, 1]


def lane(policy):
    made = Lane(Question(0, [7], 2), policy, (), ignore_eos=True)
    made._clients = [Scripted(0), Scripted(1)]
    return made


def test_first_answers_are_staggered_with_contexts_as_they_stay():
    workload = Workload("w", 10, 400)
    first = [workload.question(0, place, 4) for place in range(4)]
    assert [each.max_tokens for each in first] == [100, 200, 300, 400]
    assert [len(each.prompt) + each.max_tokens for each in first] == [410] * 4
    later = [workload.question(1, place, 4) for place in range(4)]
    assert [(len(each.prompt), each.max_tokens) for each in later] == [(10, 400)] * 4
    assert len({tuple(each.prompt[:10]) for each in first + later}) == 8


def test_a_scaled_workload_is_shorter():
    assert Workload("w", 100, 2048).scaled(0.25) == Workload("w", 25, 512)
