"""The emulated confidence of the edge study: scores drawn so that as many tokens are routed as the
paper's were.

No network reads a hidden state here. The paper (arXiv 2504.07878) says of four thresholds how many
of an answer's 100 tokens the cloud wrote, and that at 0.3 and below none were; between those points
the share is taken to grow along straight lines, and from 0.9 on to 1 at a threshold of 1. That is
a distribution function, and an answer's scores are its quantiles at 0.5, 1.5, ... 99.5 percent, in
an order that the request's seed draws: at every threshold exactly the paper's count, somewhere
else in each answer.

``--router bench.edge_scores:EmulatedConfidence`` routes by it. Knows positions and seeds; nothing
of texts, servers or times.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from trserve.router_lib.base import StepResult
from trserve.router_lib.parameters import Parameter
from trserve.router_lib.registry import VISIT_PARAMETERS
from trserve.router_lib.threshold import ThresholdRouter

THRESHOLDS: Final = (0.3, 0.4, 0.5, 0.6, 0.7, 0.72, 0.76, 0.8, 0.9)
"""Those of the study."""

ANSWER_TOKENS: Final = 100
_POINTS: Final = {0.3: 0.0, 0.6: 0.01, 0.7: 0.14, 0.8: 0.65, 0.9: 0.76, 1.0: 1.0}
"""Share of the tokens whose score is below a threshold; those from 0.6 to 0.9 are published."""


def share_below(threshold: float) -> float:
    """The share of an answer's tokens that a threshold routes, by the fit."""
    return float(np.interp(threshold, list(_POINTS), list(_POINTS.values())))


@lru_cache(maxsize=4096)
def _scores(seed: int, block: int) -> NDArray[np.float64]:
    """[ANSWER_TOKENS]: the scores of one hundred positions in a row."""
    ranks = np.random.default_rng([seed, block]).permutation(ANSWER_TOKENS)
    shares = (ranks + 0.5) / ANSWER_TOKENS
    return np.interp(shares, list(_POINTS.values()), list(_POINTS))


def score(seed: int, position: int) -> float:
    """The score of the token at ``position`` of an answer, in [0.3, 1)."""
    block, offset = divmod(position, ANSWER_TOKENS)
    return float(_scores(seed, block)[offset])


class EmulatedConfidence(ThresholdRouter):
    """To the second model where the drawn score is below ``threshold``."""

    parameters: tuple[Parameter, ...] = (
        Parameter("threshold", "drawn score below which the second model writes", 0.7, 0.0, 1.0),
        *VISIT_PARAMETERS,
    )

    def signal(self, result: StepResult) -> torch.Tensor:
        """The scores of the positions that were just sampled, whatever was sampled."""
        found = [
            score(each.params.sampling.seed, each.committed_len - each.prompt_len)
            for each in result.requests
        ]
        return torch.tensor(found, dtype=torch.float32)
