"""Entropy, largest probability, or the lead of the largest: routers by one number of the logits.

None needs training. Each is one class over ``ThresholdRouter``; the signals are in ``signals``.
"""

from __future__ import annotations

import torch

from trserve.router_lib.base import StepResult
from trserve.router_lib.registry import ENTROPY_PARAMETERS, MARGIN_PARAMETERS, TOP_PROB_PARAMETERS
from trserve.router_lib.signals import normalized_entropy, probability_margin, top_probability
from trserve.router_lib.threshold import ThresholdRouter


class Entropy(ThresholdRouter):
    """To the other model where the normalised entropy exceeds the threshold."""

    parameters = ENTROPY_PARAMETERS
    capturable = True
    above = True

    def signal(self, result: StepResult) -> torch.Tensor:
        """-sum p ln p / ln V."""
        return normalized_entropy(result.logits, self.context.tokenizer_size)


class TopProb(ThresholdRouter):
    """To the other model where the largest probability is below the threshold."""

    parameters = TOP_PROB_PARAMETERS
    capturable = True

    def signal(self, result: StepResult) -> torch.Tensor:
        """max p."""
        return top_probability(result.logits, self.context.tokenizer_size)


class Margin(ThresholdRouter):
    """To the other model where the two largest probabilities differ by less than the threshold."""

    parameters = MARGIN_PARAMETERS
    capturable = True

    def signal(self, result: StepResult) -> torch.Tensor:
        """Largest p minus second largest p."""
        return probability_margin(result.logits, self.context.tokenizer_size)
