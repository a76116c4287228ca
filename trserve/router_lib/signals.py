"""Signals of uncertainty that routers decide on. Knows no router.

All are of p = softmax(logits) over the ids of the tokenizer: columns past ``tokenizer_size`` are
padding and left out (-inf times a probability of 0 would be NaN), so that a model whose rows are
padded more than another's is measured with the same yardstick. Each takes logits float32
[B, V or more], raw, and returns float32 [B]; NaN for rows whose logits are not finite.
"""

from __future__ import annotations

import math
from typing import Final

import torch

_ROW_WISE: Final = 8192
"""From this many columns on, a row at a time: what one pass leaves in the cache, the next reads."""


def normalized_entropy(logits: torch.Tensor, tokenizer_size: int) -> torch.Tensor:
    """Entropy over its maximum: H = -sum p ln p / ln V, in 0 to 1."""
    valid = logits[:, :tokenizer_size]
    if tokenizer_size < _ROW_WISE:
        log_p = torch.log_softmax(valid, dim=-1)
        entropy = -(log_p.exp() * log_p).sum(dim=-1)
        return entropy.div_(math.log(tokenizer_size))
    return torch.stack([_entropy(*_exponentials(row)) for row in valid])


def top_probability(logits: torch.Tensor, tokenizer_size: int) -> torch.Tensor:
    """The largest probability: 1 / sum exp(z - max z)."""
    valid = logits[:, :tokenizer_size]
    return (valid.amax(dim=-1) - valid.logsumexp(dim=-1)).exp_()


def probability_margin(logits: torch.Tensor, tokenizer_size: int) -> torch.Tensor:
    """The largest probability minus the second largest; 0 where two are equal."""
    valid = logits[:, :tokenizer_size]
    largest = (valid.topk(2, dim=-1).values - valid.logsumexp(dim=-1, keepdim=True)).exp_()
    return largest[:, 0] - largest[:, 1]


def _exponentials(row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """z - max z and its exponentials, [V] each."""
    shifted = row - row.amax()
    return shifted, shifted.exp()


def _entropy(shifted: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """H = ln s - sum w d / s over ln V, with w = exp(d) and s = sum w."""
    total = weights.sum()
    return (total.log() - weights.dot(shifted) / total) / math.log(len(weights))
