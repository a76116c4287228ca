"""Routing by chance, with known probabilities: the workload that a scheduler is calibrated with.

Model 0 hands each token on with probability ``p``; the other model returns after each of its
tokens with probability ``q``. The chain of the writers is ((1 - p, p), (q, 1 - q)), whatever the
text. Knows nothing of logits.
"""

from __future__ import annotations

import torch

from trserve.router_lib.base import BaseRouter, RouterContext, StepResult
from trserve.router_lib.draws import RouterDraws
from trserve.router_lib.registry import RANDOM_PARAMETERS


class RandomRouter(BaseRouter):
    """Two models; a request's draws depend on its seed and its positions alone."""

    parameters = RANDOM_PARAMETERS
    reads_model = False
    decides_early = True
    above = False

    def __init__(self, context: RouterContext) -> None:
        super().__init__(context)
        self._draws = RouterDraws(self.model)
        self._name = "p" if self.model == 0 else "q"

    def score(self, result: StepResult) -> torch.Tensor:
        """The numbers drawn, in [0, 1)."""
        return torch.tensor(self._draws.at(result.requests))

    def route(self, result: StepResult) -> list[int]:
        """To the other model where the number drawn is below the probability."""
        limits = result.params[self._name].tolist()
        drawn = self._draws.at(result.requests)
        return [int(u < limit) for u, limit in zip(drawn, limits, strict=True)]
