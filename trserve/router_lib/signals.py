"""Signals of uncertainty that routers decide on. Knows no router."""

from __future__ import annotations

import math

import torch


def normalized_entropy(logits: torch.Tensor, tokenizer_size: int) -> torch.Tensor:
    """Entropy of the next-token distribution over its maximum: H = -sum p ln p / ln V.

    Args:
        logits: float32 [B, V or more], raw. Columns past ``tokenizer_size`` are left out: they
            are padding, and -inf times a probability of 0 would be NaN.
        tokenizer_size: V, the number of ids of the tokenizer, so that a model whose rows are
            padded more than another's is measured with the same yardstick.

    Returns:
        float32 [B] in 0 to 1; NaN for rows whose logits are not finite.
    """
    log_p = torch.log_softmax(logits[:, :tokenizer_size], dim=-1)
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return entropy.div_(math.log(tokenizer_size))
