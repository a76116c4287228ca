"""What the one-way routers share: model 0 compares a signal with a threshold, model 1 returns.

Where its signal crosses the threshold, model 0's token is discarded and model 1 writes that
position and, with ``visit_tokens`` above 1, some more; then control returns whatever model 1
thinks of it. Knows no signal.

With ``hysteresis`` above 0 a token that model 0 writes right after model 1's must be better by that
much to be kept, so that a hard passage is not left at its first easy token.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

import torch

from trserve.router_lib.base import BaseRouter, PeerReq, RequestView, RouterContext, StepResult

_LENGTH: Final = struct.Struct("<i")
"""A router's own bytes on every hop: the committed length with which the request arrives."""


class ThresholdRouter(BaseRouter):
    """Subclasses define ``signal``, and on which side of the threshold it is uncertain.

    Their first parameter is the threshold; the others include those of ``VISIT_PARAMETERS``.
    ``above``: uncertain above the threshold, else below; ``inclusive``: at the threshold too.
    """

    above: ClassVar[bool | None] = False
    inclusive: ClassVar[bool] = False

    def __init__(self, context: RouterContext) -> None:
        super().__init__(context)
        # The other models count tokens.
        counts = self.model != 0 and type(self).route is ThresholdRouter.route
        self.reads_model = not counts

    @abstractmethod
    def signal(self, result: StepResult) -> torch.Tensor:
        """float32 [B]; asked at model 0 alone."""

    def score(self, result: StepResult) -> torch.Tensor | None:
        """The signal; nothing at the other model, which decides on none."""
        return self.signal(result) if self.model == 0 else None

    def route(self, result: StepResult) -> torch.Tensor | Sequence[int]:
        """Model 0: to the other where uncertain. Model 1: back after ``visit_tokens`` tokens."""
        if self.model == 0:
            bounds = self.bounds(result.params, result.requests)
            signal = self.signal(result)
            return self.crosses(signal, bounds.to(signal.device)).long()
        wanted = result.params["visit_tokens"]
        if float(wanted.max()) <= 1.0:
            return [1] * len(result.requests)
        rows = zip(result.requests, wanted.tolist(), strict=True)
        return [int(_written(request) >= tokens) for request, tokens in rows]

    def limits(
        self, params: Mapping[str, torch.Tensor], requests: Sequence[RequestView]
    ) -> torch.Tensor:
        """float32 [B]: each row's threshold, before any hysteresis."""
        return params[self.parameters[0].name]

    def bounds(
        self, params: Mapping[str, torch.Tensor], requests: Sequence[RequestView]
    ) -> torch.Tensor:
        """The limits; stricter by ``hysteresis`` right after the other model's token."""
        limits, hysteresis = self.limits(params, requests), params["hysteresis"]
        if float(hysteresis.max()) <= 0.0:
            return limits
        margin = hysteresis * torch.tensor([_has_just_returned(each) for each in requests])
        return limits - margin if self.above else limits + margin

    def crosses(self, score: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        """Where model 0 is uncertain."""
        if self.above:
            return score >= bounds if self.inclusive else score > bounds
        return score <= bounds if self.inclusive else score < bounds

    def send(self, req: RequestView, token: int) -> PeerReq:
        """By default what counts at which model; and the length at which the visit begins."""
        peer_req = super().send(req, token)
        peer_req.extras = _LENGTH.pack(req.committed_len + peer_req.keep_token)
        return peer_req


def _written(request: RequestView) -> int:
    """Tokens written here since the request came, with the one just sampled."""
    return request.committed_len + 1 - (_arrival(request) or request.prompt_len)


def _has_just_returned(request: RequestView) -> bool:
    """Whether the last token of the row is the other model's."""
    return request.committed_len == _arrival(request)


def _arrival(request: RequestView) -> int | None:
    """The row's length when the request came from the other model; None before it ever did."""
    extras = request.extras
    # They arrive padded with zeros, and no row is empty: 0 is what a hop without a length says.
    return _LENGTH.unpack_from(extras)[0] or None if extras else None
