"""When the external dispatcher of standard serving changes models: the routers' rules, outside.

A dispatcher sees what a server's answer says: the token and, if asked for, the logarithms of its
20 most probable tokens' probabilities. Entropy has to be taken from these 20. What they leave over
counts as one token more, so the value is at most the exact one, and its error is at most what is
left over times the logarithm of the tokenizer's size, over that logarithm: little where the model
is certain, and near no threshold in use where it is not. The benchmark prints the realised share
of tokens of the large model beside trserve's. Knows no servers and no clocks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

TOPS: Final = 20
SLM: Final = 0
LLM: Final = 1


class Drawn(NamedTuple):
    """What a server says of one token; ``logprobs`` is empty unless asked for."""

    token: int
    logprobs: Sequence[float] = ()
    ends: bool = False


class Decision(NamedTuple):
    """Whether the token counts, and which model writes next."""

    keep: bool
    model: int


class Policy(Protocol):
    """One request's router; ``tops`` is how many logprobs it needs with each token."""

    @property
    def tops(self) -> int: ...

    def decide(self, model: int, drawn: Drawn) -> Decision: ...


@dataclass(frozen=True)
class Alone:
    """One model writes everything."""

    model: int = SLM
    tops: int = 0

    def decide(self, model: int, drawn: Drawn) -> Decision:
        return Decision(True, self.model)


class Chance:
    """Seeded draws: R2R's rule with probability ``p``, R-Stitch's if ``q`` is given.

    The small model's routed token is replaced. The large model returns after one token, or with
    probability ``q`` after each; its tokens always count.
    """

    tops = 0

    def __init__(self, p: float, q: float = 1.0, *, seed: int) -> None:
        self._p = p
        self._q = q
        self._dice = random.Random(seed)

    def decide(self, model: int, drawn: Drawn) -> Decision:
        if model == SLM:
            routed = self._dice.random() < self._p
            return Decision(not routed, LLM if routed else SLM)
        return Decision(True, SLM if self._dice.random() < self._q else LLM)


class Mixture:
    """ME: every token's model is drawn by ``weights``, and every token counts."""

    tops = 0

    def __init__(self, weights: Sequence[float], *, seed: int) -> None:
        self._weights = list(weights)
        self._models = range(len(weights))
        self._dice = random.Random(seed)

    def decide(self, model: int, drawn: Drawn) -> Decision:
        return Decision(True, self._dice.choices(self._models, self._weights)[0])


@dataclass(frozen=True)
class EntropyStitch:
    """R-Stitch: above ``tau`` to (or on at) the large model, else to (or on at) the small one."""

    tau: float
    vocabulary: int
    tops: int = TOPS

    def decide(self, model: int, drawn: Drawn) -> Decision:
        uncertain = normalized_entropy(drawn.logprobs, self.vocabulary) > self.tau
        return Decision(model == LLM or not uncertain, LLM if uncertain else SLM)


@dataclass(frozen=True)
class TopProbability:
    """To the large model for one token where the largest probability is below ``threshold``."""

    threshold: float
    tops: int = 1

    def decide(self, model: int, drawn: Drawn) -> Decision:
        if model == LLM:
            return Decision(True, SLM)
        routed = math.exp(max(drawn.logprobs)) < self.threshold
        return Decision(not routed, LLM if routed else SLM)


def normalized_entropy(logprobs: Sequence[float], vocabulary: int) -> float:
    """Entropy over the logarithm of ``vocabulary``, what ``logprobs`` leave over being one token.

    ``logprobs``: natural logarithms of the largest probabilities.
    """
    entropy = -sum(math.exp(each) * each for each in logprobs)
    left = 1 - math.fsum(map(math.exp, logprobs))
    if left > 0:
        entropy -= left * math.log(left)
    return entropy / math.log(vocabulary)
