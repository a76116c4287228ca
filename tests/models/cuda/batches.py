"""Steps over caches in which everything that no row may read is a NaN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trserve.models.cuda.attention import BatchGeometry, PagedLayers
from trserve.workers.step import StepInputs


@dataclass
class Batch:
    """A step of rows, each given as (tokens to compute, tokens before them)."""

    paged: PagedLayers
    step: StepInputs
    q: torch.Tensor
    geometry: BatchGeometry

    @property
    def layer(self) -> torch.Tensor:
        return self.paged.layers[0]


def make(
    rows: list[tuple[int, int]],
    *,
    kv_heads: int = 2,
    group: int = 2,
    dim: int = 16,
    block_size: int = 4,
    bucket: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Batch:
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    needed = [-(-sum(row) // block_size) for row in rows]
    blocks, longest = sum(needed) + 2, max(needed)
    tokens = max(sum(width for width, _ in rows), bucket * max(width for width, _ in rows))
    step = StepInputs(
        max_tokens=tokens,
        max_rows=len(rows),
        max_blocks_per_row=longest + 1,
        block_size=block_size,
    )
    # Block 0 is nobody's: what reads it by accident reads NaNs.
    free = 1 + random.permutation(blocks - 1).astype(np.int32)
    # What lies past a row's own blocks may name no block at all.
    step.block_tables[:] = 1 << 30
    for (width, before), count in zip(rows, needed, strict=True):
        own, free = free[:count], free[count:]
        step.add_row(random.integers(0, 100, width), before, own)
    layer = torch.randn(blocks + 1, 2, kv_heads, block_size, dim)
    layer.masked_fill_(~_owned(step, blocks, block_size)[:, None, None, :, None], torch.nan)
    layer[-1] = 0.0
    paged = PagedLayers(
        [layer.to(device, dtype)],
        num_heads=kv_heads * group,
        max_rows=max(len(rows), bucket),
        max_tokens=tokens,
        max_blocks_per_row=longest + 1,
    )
    geometry = BatchGeometry.of(step, bucket)
    q = torch.randn(geometry.tokens, kv_heads * group, dim).to(device, dtype)
    return Batch(paged, step, q, geometry)


def expected(batch: Batch) -> torch.Tensor:
    """Attention by its formula, one token and head at a time, float64; zero for padding."""
    step, paged = batch.step, batch.paged
    layer, q = batch.layer.double().cpu(), batch.q.double().cpu()
    out = torch.zeros_like(q)
    for row in range(step.num_rows):
        first, last = step.query_start[row : row + 2].tolist()
        length = int(step.kv_len[row])
        places = np.arange(length)
        table = step.block_tables[row, places // paged.block_size]
        kv = layer[torch.from_numpy(table), :, :, torch.from_numpy(places % paged.block_size)]
        for token in range(first, last):
            seen = length - (last - 1 - token)
            for head in range(paged.num_heads):
                keys, values = kv[:seen, 0, head // paged.group], kv[:seen, 1, head // paged.group]
                weights = (keys @ q[token, head] / paged.head_dim**0.5).softmax(0)
                out[token, head] = weights @ values
    return out


def _owned(step: StepInputs, blocks: int, block_size: int) -> torch.Tensor:
    """Which slots hold a row's tokens, bool [blocks + 1, block_size]."""
    owned = torch.zeros(blocks + 1, block_size, dtype=torch.bool)
    for row in range(step.num_rows):
        places = np.arange(step.kv_len[row])
        table = step.block_tables[row, places // block_size]
        owned[torch.from_numpy(table), torch.from_numpy(places % block_size)] = True
    return owned
