"""The closed loop over processes that hand on by a threshold, and in a real server."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trserve import BaseRouter, Engine
from trserve.demo.grammar import held_out
from trserve.errors import ConfigError, RequestError, StartupError
from trserve.router_lib import target_share
from trserve.router_lib.base import RouterContext, StepResult
from trserve.router_lib.none import NoRouter
from trserve.router_lib.r_stitch import RStitch
from trserve.router_lib.random_router import RandomRouter
from trserve.router_lib.target_share import ShareControl, share_control
from trserve.router_lib.uncertainty import Entropy, TopProb

ROWS = 4


def control_of(router: type[BaseRouter], target: float, tallies) -> ShareControl:
    config = {each.name: each.default for each in router.parameters} | {"target_share": target}
    found = share_control(router(RouterContext(0, ("a", "b"), 50, config)), tallies)
    assert found is not None
    return found


class Process:
    """Steps of ``ROWS`` requests whose scores are drawn; visits to the other model are geometric.

    ``certainty``: scores are near 1 where the model is sure, and not near 0.
    """

    def __init__(self, router: type[BaseRouter], target: float, visit: float, keeps: bool = False):
        self.words = [np.zeros(4, np.int64) for _ in range(2)]
        self.control = control_of(router, target, [memoryview(each) for each in self.words])
        self.above = router.above
        self.visit, self.keeps = visit, keeps
        self.rng = np.random.default_rng(3)
        self.usual = 0.5
        self.shape = (0.3, 3.0)
        params = SimpleNamespace(router={})
        self.requests = [SimpleNamespace(params=params, rid=rid) for rid in range(ROWS)]

    @property
    def tokens(self) -> tuple[int, int]:
        own, other = (int(words[2:].sum()) for words in self.words)
        return own, other

    def step(self) -> torch.Tensor:
        scores = self.rng.beta(*self.shape, ROWS)
        scores = scores if self.above else 1 - scores
        values = torch.full((ROWS,), self.usual)
        result = StepResult(None, None, None, {self.control.name: values}, self.requests, None)
        self.control.adjust(result, lambda asked: scores.tolist())
        leaves = scores > values.numpy() if self.above else scores < values.numpy()
        self.control.note(result, leaves.tolist())
        own, other = self.words
        own[0] += ROWS - leaves.sum()
        own[2] += ROWS - leaves.sum()
        own[1] += leaves.sum()
        own[3] += leaves.sum() * self.keeps
        for _ in range(leaves.sum()):
            length = self.rng.geometric(1 / self.visit)
            other[2] += 1
            other[3] += length - 1
        return values

    def run(self, tokens: int) -> float:
        """The share of the next so many tokens."""
        own, other = self.tokens
        while sum(self.tokens) < own + other + tokens:
            self.step()
        now_own, now_other = self.tokens
        return (now_other - other) / (now_own + now_other - own - other)


@pytest.mark.parametrize("router", [RStitch, Entropy, TopProb])
@pytest.mark.parametrize("target", [0.02, 0.07, 0.3])
@pytest.mark.parametrize("visit", [1.0, 2.5])
@pytest.mark.parametrize("keeps", [False, True])
def test_the_share_is_within_two_points_after_2000_tokens(router, target, visit, keeps):
    process = Process(router, target, visit, keeps)
    first = process.run(2000)
    assert abs(first - target) < 0.02, "of all tokens from the first on"
    windows = [process.run(2000) for _ in range(6)]
    assert all(abs(share - target) < 0.02 + 0.05 * target for share in windows), windows
    assert abs(np.mean(windows) - target) < 0.005 + 0.02 * target


class Crowd(Process):
    """64 requests, many of which are at the other model at any time; only what is written counts.

    The other model takes all that wait, once every few steps of the first one's, and writes one
    token for each. Answers begin with easy tokens and differ in length and in how hard they are.
    """

    def __init__(self, router: type[BaseRouter], target: float, seed: int):
        super().__init__(router, target, 1.0)
        self.rng = np.random.default_rng(seed)
        self.usual = 0.03
        self.requests = [self.begin(rid) for rid in range(64)]
        self.waiting: list[SimpleNamespace] = []
        self.steps = 0
        self.last = 64

    def begin(self, rid: int) -> SimpleNamespace:
        size, hard = int(self.rng.integers(30, 70)), float(self.rng.beta(2, 2))
        params = SimpleNamespace(router={})
        return SimpleNamespace(params=params, rid=rid, left=size, size=size, hard=hard)

    def score(self, request: SimpleNamespace) -> float:
        mean = 0.05 if request.left > 0.75 * request.size else 0.02 + 0.35 * request.hard
        return float(self.rng.beta(0.4, 0.4 * (1 - mean) / mean))

    def step(self) -> torch.Tensor:
        values = torch.full((len(self.requests),), self.usual)
        if self.requests:
            scores = [self.score(request) for request in self.requests]
            result = StepResult(None, None, None, {self.control.name: values}, self.requests, None)
            self.control.adjust(result, lambda asked: scores)
            leaves = (np.array(scores) > values.numpy()).tolist()
            self.control.note(result, leaves)
            pairs = list(zip(self.requests, leaves, strict=True))
            self.waiting += [request for request, leaving in pairs if leaving]
            kept = [request for request, leaving in pairs if not leaving]
            self.words[0][[0, 2]] += len(kept)
            self.words[0][1] += len(pairs) - len(kept)
            self.requests = self.written(kept)
        self.steps += 1
        if self.steps % 3 == 0:
            self.words[1][2] += len(self.waiting)
            self.requests += self.written(self.waiting)
            self.waiting = []
        return values

    def written(self, requests: list[SimpleNamespace]) -> list[SimpleNamespace]:
        """One token on; whoever is through is followed by somebody new."""
        found = []
        for request in requests:
            request.left -= 1
            self.last += request.left == 0
            found.append(request if request.left else self.begin(self.last))
        return found


@pytest.mark.parametrize("target", [0.04, 0.1, 0.2])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_under_way_at_64_requests_is_not_missing_for_good(target, seed):
    """Of what is written, not of what is finished: long answers end late and are routed most."""
    crowd = Crowd(Entropy, target, seed)
    assert abs(crowd.run(2000) - target) < 0.02
    later = [crowd.run(2000) for _ in range(6)]
    assert abs(np.mean(later) - target) < 0.003
    assert all(abs(share - target) < 0.01 + 0.1 * target for share in later), later


def test_it_follows_when_the_text_gets_harder():
    process = Process(RStitch, 0.1, 1.5)
    process.run(4000)
    before = process.control.threshold
    process.shape = (1.0, 3.0)
    process.run(4000)
    assert abs(process.run(4000) - 0.1) < 0.02
    assert process.control.threshold > before


def test_requests_with_a_threshold_of_their_own_keep_it():
    process = Process(RStitch, 0.1, 1.0)
    process.run(1000)
    own = SimpleNamespace(params=SimpleNamespace(router={"tau": 0.5}), rid=9)
    process.requests = [process.requests[0], own, process.requests[0], own]
    values = process.step()
    assert values[1] == values[3] == 0.5
    assert values[0] == values[2] == np.float32(process.control.threshold) != 0.5
    process.requests = [own] * 4
    moved = process.control.threshold
    for _ in range(100):
        assert (process.step() == 0.5).all()
    assert process.control.threshold == moved


def test_who_never_comes_back_is_not_remembered_for_good(monkeypatch):
    """Where each has a threshold of its own nothing is moved, and nothing forgotten by that."""
    monkeypatch.setattr(target_share, "_MOST_AWAY", 100)
    process = Process(RStitch, 0.1, 1.0)
    params = SimpleNamespace(router={"tau": -1.0})
    for rid in range(0, 1000, ROWS):
        process.requests = [SimpleNamespace(params=params, rid=rid + n) for n in range(ROWS)]
        process.usual = -1.0
        process.step()
    assert list(process.control._away) == list(range(900, 1000))


def test_too_few_scores_move_nothing():
    process = Process(RStitch, 0.1, 1.0)
    for _ in range(15):
        assert (process.step() == 0.5).all()
    process.step()
    assert (process.step() != 0.5).all()


def test_a_share_that_was_passed_stops_all_handoffs():
    """A debt the other way: what pinned requests of the other model wrote counts too."""
    process = Process(TopProb, 0.1, 1.0)
    process.run(1000)
    process.words[1][3] += 5000
    process.step()
    process.step()
    assert process.control.threshold == 0.0, "nothing is below the least probability"


def test_only_routers_that_say_on_which_side_are_controlled():
    tallies = [memoryview(np.zeros(4, np.int64))] * 2
    assert control_of(RandomRouter, 0.5, tallies).name == "p"
    for model, share in ((1, 0.5), (0, 0.0)):
        config = {"tau": 0.1, "target_share": share}
        assert share_control(RStitch(RouterContext(model, ("a", "b"), 50, config)), tallies) is None
    with pytest.raises(ConfigError, match="NoRouter does not say in `above`"):
        control_of(NoRouter, 0.5, tallies)


def test_a_server_keeps_the_share():
    problems = held_out(150, 99)
    prompts = [[{"role": "user", "content": problem.question}] for problem in problems]
    config = {"target_share": 0.1}
    settings = {"models": ("tiny", "small"), "threads": (1, 1)}
    with Engine(**settings, router="entropy", router_config=config) as engine:
        assert "target_share" not in [each.name for each in engine.router_parameters]
        options = {"temperature": 0, "max_tokens": 80}
        first = engine.generate(prompts[:100], **options)
        usages = [answer.usage["trserve"]["tokens"] for answer in first]
        total = sum(sum(usage.values()) for usage in usages)
        assert total > 2000
        assert abs(sum(usage.get("small", 0) for usage in usages) / total - 0.1) < 0.02
        own = {"router": {"threshold": 1.0}}
        alone = engine.generate(prompts[100:], **options, trserve=own)
        assert all(set(answer.sources) == {0} for answer in alone)
        with pytest.raises(RequestError, match="no parameter 'target_share'"):
            engine.generate("x", trserve={"router": {"target_share": 0.5}})
    with pytest.raises(StartupError, match=r"target_share = 1.5 is outside 0 to 1"):
        Engine(**settings, router="entropy", router_config={"target_share": 1.5})
