"""Mixture-model-like ensemble (arXiv 2605.00419): each token by a model drawn from fixed weights.

The draw does not look at the text, and no token is discarded, so with temperature alone the output
has the law of sampling from the weighted mean of the models' distributions. That includes the
first token: ``admit`` draws who writes it. Any number of models.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import torch

from trserve.errors import ConfigError
from trserve.router_lib.base import BaseRouter, PeerReq, RequestView, RouterContext, StepResult
from trserve.router_lib.draws import RouterDraws
from trserve.router_lib.parameters import split_weights
from trserve.router_lib.registry import ME_PARAMETERS


class MixtureEnsemble(BaseRouter):
    """Parameter ``weights``, one a model, normalised; equal where none are given."""

    parameters = ME_PARAMETERS
    reads_model = False
    decides_early = True

    def __init__(self, context: RouterContext) -> None:
        super().__init__(context)
        count = len(context.models)
        weights = split_weights(context.config["weights"]) or (1.0,) * count
        if len(weights) != count:
            raise ConfigError(f"weights: {len(weights)} for {count} models")
        sums = list(accumulate(weights))
        last = max(model for model, weight in enumerate(weights) if weight)
        # Rounding must not leave a gap below 1, and a weight of 0 must get nothing of it.
        self._bounds = [total / sums[-1] for total in sums[:last]]
        self._draws = RouterDraws(self.model)
        self._destinations = [
            0 if model == self.model else self.peer(model) for model in range(count)
        ]

    def score(self, result: StepResult) -> torch.Tensor:
        """The numbers drawn, in [0, 1)."""
        return torch.tensor(self._draws.at(result.requests))

    def route(self, result: StepResult) -> list[int]:
        """Whoever is drawn for the next token."""
        return [self._destinations[self._drawn(u)] for u in self._draws.at(result.requests)]

    def send(self, req: RequestView, token: int) -> PeerReq:
        """Every token counts, the first model's too."""
        peer_req = super().send(req, token)
        peer_req.keep_token = True
        return peer_req

    def admit(self, req: RequestView) -> int:
        """Whoever is drawn for the first token."""
        return self._drawn(self._draws.admit(req))

    def _drawn(self, u: float) -> int:
        """The first model up to which the weights exceed ``u``."""
        return bisect_right(self._bounds, u)
