"""Storage of keys and values, in blocks of token slots.

Knows shapes and memory; nothing of who owns a block or when one is free.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch

from trserve.models.spec import ModelSpec

_ALIGNMENT: Final = 64


class KVCache:
    """Keys and values of every layer: ``layers[i]`` is
    ``[num_blocks + 1, kv_heads, 2, block_size, head_dim]``.

    One block more than ``num_blocks`` is allocated, at the end: the *dummy*. It stays zero, no
    block table names it, and padding reads from it. Padded scores are minus infinity, but a
    probability of zero times a NaN is a NaN: padding must never read what another row has left.

    Within a block the keys of one head lie side by side, then its values: attention reads head by
    head, and memory is fast only where it is read in order.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.num_kv_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        shape = (num_blocks + 1, spec.num_kv_heads, 2, block_size, spec.head_dim)
        self.layers = [_zeros(shape, dtype, device) for _ in range(spec.num_layers)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    """A tensor of zeros; on the CPU its pages are taken when a block is first written.

    ``torch.zeros`` writes all of them, so that a server would hold its whole KV budget from the
    start. numpy leaves it to the kernel, which hands out zero pages.
    """
    if device is not None and device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)
