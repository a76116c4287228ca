"""R-Stitch (arXiv 2507.17307, Algorithm 1): entropy decides, in both directions.

The small model (0) writes; where its normalised entropy exceeds tau its token is discarded and
the large model (1) writes that position. The large model's token always counts; it goes on until
its own entropy is at most tau, and control returns for the next position.

The paper says that the large model's side mirrors the small one's. Its ``send`` must not: were
the confident token dropped there too, the small model would decode the same position again, be
uncertain again, and the request would bounce for ever. ``BaseRouter.send`` keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trserve.router_lib.base import BaseRouter, RequestView, StepResult
from trserve.router_lib.registry import R_STITCH_PARAMETERS
from trserve.router_lib.signals import normalized_entropy


class RStitch(BaseRouter):
    """Two models; parameters ``tau`` and ``hysteresis``, which a request may set for itself."""

    parameters = R_STITCH_PARAMETERS
    above = True
    capturable = True

    def score(self, result: StepResult) -> torch.Tensor:
        """The normalised entropy."""
        return normalized_entropy(result.logits, self.context.tokenizer_size)

    def bounds(
        self, params: Mapping[str, torch.Tensor], requests: Sequence[RequestView]
    ) -> torch.Tensor:
        """``tau``, at the large model less ``hysteresis``."""
        return params["tau"] if self.model == 0 else params["tau"] - params["hysteresis"]

    def crosses(self, score: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        """Uncertain at the small model; confident at the large one."""
        return score > bounds if self.model == 0 else score <= bounds

    def route(self, result: StepResult) -> torch.Tensor:
        """Uncertain: to (or on at) the large model; confident: to (or on at) the small one."""
        entropy = self.score(result)
        bounds = self.bounds(result.params, result.requests).to(entropy.device)
        # With two models the other one is always peer 1, so the mask is the destination.
        return self.crosses(entropy, bounds).long()
