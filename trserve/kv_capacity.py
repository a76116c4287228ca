"""How many tokens of KV cache models can have beside their weights in one memory. Pure arithmetic.

A request that visits several models holds KV of its whole row in each, so they all get the same
capacity: more in one of them would never be used. The memory may be a CPU's or a GPU's that they
share; knows neither, nor any file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

RESERVE_SHARE: Final = 8
"""One part in so many of the memory is left for activations, the slab and everybody else."""


def kv_budget(memory: int, weights: Sequence[int], most: int) -> int:
    """Bytes for the KV caches of all models together, at most ``most``.

    Args:
        memory: bytes that are free before the weights are loaded.
        weights: bytes of each model's weights.
    """
    return max(0, min(most, memory - sum(weights) - memory // RESERVE_SHARE))


def common_capacity(budget: int, bytes_per_token: Sequence[int]) -> int | None:
    """The largest number of tokens that all models can hold at once; None where they hold none.

    ``budget / sum of bytes per token``.
    """
    per_token = sum(bytes_per_token)
    return budget // per_token if per_token else None
