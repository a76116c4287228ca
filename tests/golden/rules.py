"""What each router decides, written from its definition for one request at a time, in float64.

A rule is asked after every step of the model that has the floor, and says which model writes
next, whether the token counts, and how close that was to a different decision. Shares no code with
trserve; knows no servers. The learned ones take their networks from ``tests.router_lib.networks``,
which is as independent.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tests.golden.philox import uniform
from tests.golden.reference import normalised_entropy

ROUTER, ADMIT = 1, 2
"""Purposes of random numbers."""


@dataclass(frozen=True)
class View:
    """One step: ``row`` is what was committed before it, ``token`` what it drew.

    ``logits`` float64 [V], -inf past the tokenizer's ``size``; ``hidden`` [H] after the last norm;
    ``tap`` [H] what the last layer's MLP read.
    """

    model: int
    models: int
    row: Sequence[int]
    token: int
    logits: torch.Tensor
    hidden: torch.Tensor
    tap: torch.Tensor
    size: int
    seed: int
    prompt_len: int


@dataclass(frozen=True)
class Decision:
    """``margin`` is the distance of the signal from its threshold, infinite for other decisions."""

    next: int
    kept: bool
    margin: float = math.inf
    score: float = math.nan


class Rule(ABC):
    """One request's router; a rule may remember what happened, so each request has its own."""

    def first(self, seed: int, prompt_len: int, models: int) -> int:
        """Who writes the first token where the request does not say."""
        return 0

    @abstractmethod
    def decide(self, view: View) -> Decision:
        """After a step."""


Signal = Callable[[View], float]


class OneWay(Rule):
    """A signal of model 0 against a threshold; ``visit`` tokens of model 1, and back."""

    def __init__(
        self,
        signal: Signal,
        threshold: float,
        *,
        above: bool,
        visit: int = 1,
        hysteresis: float = 0.0,
    ) -> None:
        self.signal = signal
        self.threshold = threshold
        self.above = above
        self.visit = visit
        self.hysteresis = hysteresis
        self.written_there = 0
        self.just_returned = False

    def decide(self, view: View) -> Decision:
        if view.model == 1:
            self.written_there += 1
            returns = self.written_there >= self.visit
            self.just_returned = returns
            return Decision(next=0 if returns else 1, kept=True)
        score, bound = self.signal(view), self.threshold
        if self.just_returned:
            bound += -self.hysteresis if self.above else self.hysteresis
        self.just_returned = False
        leaves = score > bound if self.above else score < bound
        self.written_there = 0
        return Decision(int(leaves), not leaves, abs(score - bound), score)


class BothWays(Rule):
    """R-Stitch: model 1 returns where its own entropy is low enough."""

    def __init__(self, tau: float, hysteresis: float) -> None:
        self.tau = tau
        self.hysteresis = hysteresis

    def decide(self, view: View) -> Decision:
        score = entropy(view)
        if view.model == 0:
            leaves = score > self.tau
            return Decision(int(leaves), not leaves, abs(score - self.tau), score)
        bound = self.tau - self.hysteresis
        return Decision(int(score > bound), True, abs(score - bound), score)


class Chance(Rule):
    """Model 0 hands on with probability p, model 1 returns with probability q."""

    def __init__(self, p: float, q: float) -> None:
        # As the server holds them: a request's parameters are float32.
        self.limits = torch.tensor([p, q], dtype=torch.float32).tolist()

    def decide(self, view: View) -> Decision:
        u = uniform(view.seed, len(view.row), view.model, ROUTER)
        leaves = u < self.limits[view.model]
        return Decision(1 - view.model if leaves else view.model, view.model == 1 or not leaves)


class Mixture(Rule):
    """Every token by a model drawn from the weights."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.weights = weights

    def first(self, seed: int, prompt_len: int, models: int) -> int:
        return self._drawn(uniform(seed, prompt_len, 0, ADMIT))

    def decide(self, view: View) -> Decision:
        return Decision(self._drawn(uniform(view.seed, len(view.row), view.model, ROUTER)), True)

    def _drawn(self, u: float) -> int:
        below = 0.0
        for model, weight in enumerate(self.weights):
            below += weight / sum(self.weights)
            if u < below:
                return model
        return len(self.weights) - 1


class Leader(Rule):
    """Model 1 writes the first tokens of the answer and of each step; ``ends`` are step ends."""

    def __init__(self, tokens: int, ends: frozenset[int]) -> None:
        self.tokens = tokens
        self.ends = ends
        self.into_step = 0

    def first(self, seed: int, prompt_len: int, models: int) -> int:
        return 1 if self.tokens else 0

    def decide(self, view: View) -> Decision:
        self.into_step = 0 if view.token in self.ends else self.into_step + 1
        return Decision(1 if self.into_step < self.tokens else 0, True)


def entropy(view: View) -> float:
    """Normalised."""
    return normalised_entropy(view.logits, view.size)


def top_prob(view: View) -> float:
    """The largest probability."""
    return float(torch.softmax(view.logits, dim=-1).max())


def margin(view: View) -> float:
    """The lead of the largest probability."""
    first, second = torch.softmax(view.logits, dim=-1).topk(2).values.tolist()
    return float(first - second)
