"""Paged attention in plain torch operations, over gathered blocks: the reference of the others.

Runs on any device, in float32 throughout; slow, and so for the CPU and for comparisons. What it
gathers depends on a step's longest row, so it cannot replay in a graph over other lengths, and on a
GPU says so (``replays``); on the CPU a "graph" runs again and reads the plan that is current then.
Knows no triton.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from trserve.models.cuda.attention import BatchGeometry, PagedLayers
from trserve.models.cuda.attention_plan import PlanArrays, memory_size


class TorchAttention:
    """See :class:`trserve.models.cuda.attention.AttentionBackend`."""

    name = "torch"

    def __init__(self, paged: PagedLayers) -> None:
        self._paged = paged
        self.replays = paged.device.type != "cuda"
        self._arrays = PlanArrays(paged, np.zeros(memory_size(paged), np.int32))
        self._parts: list[_Part] = []

    def plan(self, batch: BatchGeometry) -> None:
        """Work out gathers and masks: one part if all rows are equally wide, else one a row."""
        arrays = self._arrays
        arrays.fill(batch)
        rows = np.arange(batch.rows)
        groups = [rows] if batch.width else np.split(rows, len(rows))
        self._parts = [_Part(self._paged, arrays, group) for group in groups]

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attend in ``layer``."""
        for part in self._parts:
            part.run(self._paged.layers[layer], q, out)


class _Part:
    """Rows of equally many tokens.

    ``slots`` [rows, longest] says where each row's keys lie; ``hidden`` [rows, width, longest]
    what each of its tokens does not see.
    """

    def __init__(self, paged: PagedLayers, arrays: PlanArrays, rows: npt.NDArray[np.int64]) -> None:
        self._paged = paged
        first, last = int(rows[0]), int(rows[-1]) + 1
        self._tokens = slice(int(arrays.query_start[first]), int(arrays.query_start[last]))
        self._rows = last - first
        width = (self._tokens.stop - self._tokens.start) // self._rows
        lengths = arrays.kv_len[first:last, None]
        places = np.arange(int(lengths.max()))
        blocks = arrays.block_start[first:last, None] + places // paged.block_size
        # What lies past a row's end is hidden, but must not be another row's NaN.
        real = places < lengths
        table = arrays.blocks[np.where(real, blocks, 0)]
        table = np.where(real, table, paged.dummy).astype(np.int64)
        self._blocks = torch.from_numpy(table).to(paged.device)
        self._offsets = torch.from_numpy(places % paged.block_size).to(paged.device)
        seen = lengths[:, :, None] - width + np.arange(width)[None, :, None]
        self._hidden = torch.from_numpy(places > seen)[:, None, None].to(paged.device)

    def run(self, cache: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
        """Grouped-query attention of these rows."""
        paged = self._paged
        own = q[self._tokens].float()
        queries = own.view(self._rows, -1, paged.num_kv_heads, paged.group, paged.head_dim)
        # [rows, longest, 2, kv_heads, head_dim]
        gathered = cache[self._blocks, :, :, self._offsets].float()
        keys, values = gathered.unbind(2)
        scores = torch.einsum("rwhgd,rlhd->rhgwl", queries, keys) * paged.softmax_scale
        weights = scores.masked_fill(self._hidden, -torch.inf).softmax(-1)
        attended = torch.einsum("rhgwl,rlhd->rwhgd", weights, values)
        out[self._tokens] = attended.reshape(own.shape).to(out.dtype)
