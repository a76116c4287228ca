"""Routing by chance along two matrices: the process that an algorithm is to a scheduler.

A step at model i sends its request to j with probability ``P[i][j]``, whatever the text, and
commits ``C[i][j]`` tokens then. For two models ``p`` and ``q`` are per request. Knows nothing of
logits, and nothing of where the matrices are from.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate

import torch

from trserve.emulated.behaviour import behaviour_of
from trserve.router_lib.base import BaseRouter, PeerReq, RequestView, RouterContext, StepResult
from trserve.router_lib.draws import RouterDraws
from trserve.router_lib.parameters import Parameter
from trserve.router_lib.registry import EMULATED_PARAMETERS


class EmulatedRouter(BaseRouter):
    """Any number of models; a request's draws depend on its seed and its positions alone."""

    parameters: tuple[Parameter, ...] = EMULATED_PARAMETERS
    reads_model = False
    decides_early = True

    def __init__(self, context: RouterContext) -> None:
        super().__init__(context)
        models = len(context.models)
        found = behaviour_of(context.config, models)
        row, tokens = found.routing[self.model], found.tokens[self.model]
        self._bounds = _bounds([float(row[peer]) for peer in self.peers], stays=row[self.model] > 0)
        self._keeps = [bool(tokens[peer]) for peer in self.peers]
        self._draws = RouterDraws(self.model)
        self._name = ("p", "q")[self.model] if models == 2 else None
        if models != 2:
            self.parameters = ()
            return
        # What the profile says is what whoever asks for the server's values is told.
        values = {"p": float(found.routing[0][1]), "q": float(found.routing[1][0])}
        self.context = replace(context, config={**context.config, **values})

    def score(self, result: StepResult) -> torch.Tensor:
        """The numbers drawn, in [0, 1)."""
        return torch.tensor(self._draws.at(result.requests))

    def route(self, result: StepResult) -> list[int]:
        """To the peer whose share of [0, 1) the number drawn is in; the rest stay."""
        drawn = self._draws.at(result.requests)
        if self._name is None:
            return [self._destination(u) for u in drawn]
        own = self._bounds[0]
        limits = result.params[self._name].tolist()
        return [
            int(u < (limit if limit >= 0 else own)) for u, limit in zip(drawn, limits, strict=True)
        ]

    def send(self, req: RequestView, token: int) -> PeerReq:
        """The token counts where C says so for the destination that ``route`` drew."""
        peer_req = super().send(req, token)
        # Its number can be drawn again; two models need none.
        peer = 1 if len(self._keeps) == 1 else self._destination(self._draws.at([req])[0])
        peer_req.keep_token = self._keeps[peer - 1]
        return peer_req

    def _destination(self, u: float) -> int:
        peer = bisect_right(self._bounds, u)
        return peer + 1 if peer < len(self._bounds) else 0


def _bounds(shares: list[float], *, stays: bool) -> list[float]:
    """Where each peer's part of [0, 1) ends."""
    bounds = list(accumulate(shares))
    if not stays:
        # Rounding must not leave a gap below 1, and a share of 0 must get nothing of it.
        last = max(peer for peer, share in enumerate(shares) if share)
        bounds[last:] = [1.0] * (len(bounds) - last)
    return bounds
