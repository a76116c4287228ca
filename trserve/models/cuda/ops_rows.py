"""What operations over logits take and give, by row. Knows shapes and memory; no operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

NO_TOKEN: Final = -1
"""The token of a row whose logits are not finite, as in :mod:`trserve.workers.sampler`."""


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What one pass over the logits finds, one entry for each of B rows.

    A row that holds a NaN or plus infinity, or nothing but minus infinity, has the token
    ``NO_TOKEN``, ``finite`` 0, and NaN everywhere else. Minus infinity is a probability of 0.

    Attributes:
        packed: int32 [7, B], the memory of all the others, in their order: one transfer.
        tokens: int32, the arg max, the lowest index where several are equal.
        finite: int32, 1 or 0.
        largest: float32, the largest logit.
        logsumexp: float32.
        entropy: float32, H = -sum p ln p = logsumexp - sum p z, in nats. Routers' normalised
            entropy is that over ln of the tokenizer's size.
        top_probability: float32.
        margin: float32, the largest probability minus the second largest.
    """

    packed: torch.Tensor
    tokens: torch.Tensor
    finite: torch.Tensor
    largest: torch.Tensor
    logsumexp: torch.Tensor
    entropy: torch.Tensor
    top_probability: torch.Tensor
    margin: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, device: torch.device | str) -> Epilogue:
        """For ``rows`` rows, zeroed."""
        return cls.over(torch.zeros(7, rows, dtype=torch.int32, device=device))

    @classmethod
    def over(cls, packed: torch.Tensor) -> Epilogue:
        """Over memory int32 [7, B] of which each row is contiguous."""
        return cls(packed, packed[0], packed[1], *packed[2:].view(torch.float32))

    def first(self, rows: int) -> Epilogue:
        """Views of the first ``rows`` rows."""
        return self.over(self.packed[:, :rows])


@dataclass(frozen=True, slots=True)
class Filters:
    """What each of B rows may draw: ``top_k`` integer (0: off), ``top_p`` float64 (1: off),
    ``min_p`` float64 (0: off)."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    def first(self, rows: int) -> Filters:
        """Views of the first ``rows`` rows."""
        return Filters(self.top_k[:rows], self.top_p[:rows], self.min_p[:rows])
