"""A backend tried out before anything waits for it: what its first use builds is built by then.

flashinfer compiles a kernel the first time that a plan needs it, for up to a minute, and says only
then that it cannot; between two steps of a server that would look like a worker that hangs.

Knows plans and shapes; nothing of any one backend, and stores nothing in the caches.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch

from trserve.models.cuda.attention import AttentionBackend, BatchGeometry, PagedLayers

_WIDEST: Final = 64
"""Tokens of the wider row: as many as fill a tile, which some kernels are compiled for."""


def try_out(backend: AttentionBackend, paged: PagedLayers) -> None:
    """Attend once for a row of one token, and once for a row of several, over the dummy block; then
    as the largest graphs of either kind will, which plan otherwise.

    Raises:
        ModelUnavailableError: the backend has no kernels for this device, and cannot build them.
        RuntimeError: what CUDA says of those that it has.
    """
    room = min(paged.max_tokens, paged.max_blocks_per_row * paged.block_size)
    for width in sorted({1, min(_WIDEST, room)}):
        _attend(backend, paged, _one_row(paged, width))
    if backend.replays:
        for rows, width in _largest_graphs(paged):
            _attend(backend, paged, _one_row(paged, width, rows))
    if paged.device.type == "cuda":
        torch.cuda.current_stream(paged.device).synchronize()


def _attend(backend: AttentionBackend, paged: PagedLayers, batch: BatchGeometry) -> None:
    backend.plan(batch)
    shape = (batch.tokens, paged.num_heads, paged.head_dim)
    q = torch.zeros(shape, dtype=paged.dtype, device=paged.device)
    backend.run(0, q, torch.empty_like(q))


def _largest_graphs(paged: PagedLayers) -> list[tuple[int, int]]:
    """Rows and width of the largest graph of decodes, and of the largest of wider rows."""
    kinds = [
        [graph for graph in paged.graphs if (graph[1] > 1) == wider] for wider in (False, True)
    ]
    return [max(graphs, key=math.prod) for graphs in kinds if graphs]


def _one_row(paged: PagedLayers, width: int, bucket: int = 0) -> BatchGeometry:
    blocks = -(-width // paged.block_size)
    return BatchGeometry(
        num_rows=1,
        query_start=np.array([0, width], np.int32),
        kv_len=np.array([width], np.int32),
        block_tables=np.full((1, blocks), paged.dummy, np.int32),
        width=width,
        bucket=bucket,
    )
