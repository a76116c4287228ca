"""Paged attention on the CPU, in plain torch operations.

Knows a step's geometry and the KV cache's layout; nothing of weights, requests or scheduling.

Small torch operations cost as much as the arithmetic here, so everything that does not depend on
the layer is worked out once per step (:meth:`PagedAttention.plan`), in numpy, and rows that
compute few tokens (decodes, suffixes that came by handoff) are gathered into padded batches, in
which the query heads that share a KV head are rows of one matrix product. Long rows (prompt
chunks) go one by one through the fused kernel, over exactly their own keys.

What a gather costs follows the longest row of its group, never the capacity; rows of very
different lengths get groups of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from trserve.models.spec import ModelSpec
from trserve.workers.kv_cache import KVCache
from trserve.workers.step import Int32Array, StepInputs

MAX_SHORT_QUERY = 16
"""Rows with at most this many tokens to compute are batched by padding."""

_PADDING_TOLERATED = 1 << 18
"""Score elements (query, key and head triples) up to which padding is cheaper than grouping."""

_GATHER_ELEMENTS = 1 << 20
"""Upper bound on what one group gathers, in elements: beyond it the gathered keys have left the
cache before the products read them."""


@dataclass(slots=True)
class _Batch:
    """Rows attended to together: ``rows`` rows, ``width`` queries each, ``length`` keys each.

    ``queries`` are token indices [rows * width], padded by repetition, and ``targets`` where the
    results go, padding to the row past the end; both are None where the batch is the whole step
    and every row is one token. ``mask`` is additive, [rows, 1, 1, width, length]; None where all
    is visible.
    """

    rows: int
    width: int
    length: int
    gather: torch.Tensor
    mask: torch.Tensor | None
    queries: torch.Tensor | None
    targets: torch.Tensor | None


@dataclass(slots=True)
class _Extend:
    """One long row: tokens ``first : last``; ``slots`` is None where it has no earlier tokens."""

    first: int
    last: int
    slots: torch.Tensor | None
    mask: torch.Tensor | None


class PagedAttention:
    """Attention of one model over one KV cache; ``plan`` once per step, then ``run`` per layer."""

    def __init__(self, spec: ModelSpec, kv: KVCache) -> None:
        self._kv = kv
        self._kv_heads = spec.num_kv_heads
        self._heads_per_kv = spec.num_heads // spec.num_kv_heads
        self._head_dim = spec.head_dim
        self._q_size = spec.q_size
        self._scale = spec.head_dim**-0.5
        # The cache as rows of one head each; and as rows of one token slot each.
        self._head_rows = [layer.view(-1, spec.head_dim) for layer in kv.layers]
        self._slot_rows = [layer.view(layer.shape[0], -1) for layer in kv.layers]
        self._workspace = torch.empty(0, dtype=kv.dtype)
        heads = np.arange(spec.num_kv_heads)
        # Index of (keys or values, head) within a slot, [2, 1, kv_heads, 1].
        self._within_slot = np.stack((heads, heads + spec.num_kv_heads))[:, None, :, None]
        self._writes = torch.empty(0, dtype=torch.int64)
        self._batches: list[_Batch] = []
        self._extends: list[_Extend] = []
        self._num_tokens = 0

    # ---------------------------------------------------------------- once per step

    def plan(self, step: StepInputs, slots: torch.Tensor) -> None:
        """Work out gathers, masks and groups of ``step``; ``slots``: its slots, int64 [T]."""
        self._writes = slots
        self._num_tokens = step.num_tokens
        starts = step.query_start[: step.num_rows + 1]
        counts = np.diff(starts)
        self._extends = []
        if step.decode_only:
            short = None
        else:
            is_short = counts <= MAX_SHORT_QUERY
            short = np.flatnonzero(is_short)
            for row in np.flatnonzero(~is_short).tolist():
                self._extends.append(self._plan_extend(step, row))
        self._batches = [self._plan_batch(step, rows) for rows in self._groups(step, short, counts)]

    def _groups(
        self, step: StepInputs, short: npt.NDArray[np.int64] | None, counts: Int32Array
    ) -> Iterator[npt.NDArray[np.int64] | None]:
        """Rows to pad together; None for the whole of a step of decodes, in its own order."""
        rows = np.arange(step.num_rows) if short is None else short
        if not len(rows):
            return
        queries, lengths = counts[rows], step.kv_len[rows]
        heads = self._kv_heads * self._heads_per_kv
        padded = len(rows) * int(queries.max()) * int(lengths.max()) * heads
        gathered = len(rows) * int(lengths.max()) * 2 * self._kv_heads * self._head_dim
        if padded <= _PADDING_TOLERATED and gathered <= _GATHER_ELEMENTS:
            yield short
            return
        # Powers of two: no group pads a row's queries or keys to more than twice their number.
        classes = np.frexp(queries - 1)[1] * 64 + np.frexp(lengths - 1)[1]
        for size_class in np.unique(classes):
            members = rows[classes == size_class]
            longest = int(step.kv_len[members].max())
            per_row = longest * 2 * self._kv_heads * self._head_dim
            stride = max(1, _GATHER_ELEMENTS // per_row)
            for first in range(0, len(members), stride):
                yield members[first : first + stride]

    def _plan_batch(self, step: StepInputs, rows: npt.NDArray[np.int64] | None) -> _Batch:
        ends = step.query_start[1 : step.num_rows + 1]
        starts = step.query_start[: step.num_rows]
        lengths = step.kv_len[: step.num_rows]
        tables = step.block_tables
        if rows is not None:
            ends, starts, lengths, tables = ends[rows], starts[rows], lengths[rows], tables[rows]
        longest = int(lengths.max())
        counts = ends - starts
        width = int(counts.max())
        keys = np.arange(longest)
        slots = self._key_slots(tables[: len(lengths)], longest, step.block_size)
        valid = keys < lengths[:, None]
        uneven = not valid.all()
        if uneven:
            slots = np.where(valid, slots, self._kv.dummy_slot)
        gather = (slots * (2 * self._kv_heads))[None, :, None, :] + self._within_slot
        # Query s of a row sits at position length - count + s and sees the keys up to there.
        offsets = np.arange(width)
        visible: npt.NDArray[np.bool_] | None = None
        if width > 1:
            last_seen = (lengths - counts)[:, None] + offsets
            visible = keys <= np.minimum(last_seen, lengths[:, None] - 1)[:, :, None]
        elif uneven:
            visible = valid[:, None, :]
        queries = targets = None
        if rows is not None:
            indices = starts[:, None] + np.minimum(offsets, counts[:, None] - 1)
            queries = _indices(indices)
            targets = _indices(np.where(offsets < counts[:, None], indices, self._num_tokens))
        return _Batch(
            rows=len(lengths),
            width=width,
            length=longest,
            gather=_indices(gather),
            mask=None if visible is None else self._mask(visible[:, None, None]),
            queries=queries,
            targets=targets,
        )

    def _plan_extend(self, step: StepInputs, row: int) -> _Extend:
        first, last = int(step.query_start[row]), int(step.query_start[row + 1])
        length = int(step.kv_len[row])
        count = last - first
        if length == count:
            return _Extend(first, last, slots=None, mask=None)
        slots = self._key_slots(step.block_tables[row : row + 1], length, step.block_size)
        visible = np.arange(length) <= np.arange(length - count, length)[:, None]
        return _Extend(first, last, slots=_indices(slots), mask=self._mask(visible))

    def _key_slots(self, tables: Int32Array, length: int, block_size: int) -> npt.NDArray[np.int64]:
        """Slots of the first ``length`` positions of each row, [rows, length]."""
        blocks = tables[:, : -(-length // block_size), None].astype(np.int64)
        slots = blocks * block_size + np.arange(block_size)
        return slots.reshape(len(tables), -1)[:, :length]

    def _mask(self, visible: npt.NDArray[np.bool_]) -> torch.Tensor:
        mask = np.where(visible, np.float32(0.0), np.float32(-np.inf))
        return torch.from_numpy(mask).to(self._kv.dtype)

    # ---------------------------------------------------------------- once per layer

    def run(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Store this step's keys and values of ``layer`` and attend.

        Args:
            qkv: [T, (heads + 2 * kv_heads) * head_dim]: queries, keys, values, already rotated.

        Returns:
            [T, heads * head_dim].
        """
        self._slot_rows[layer].index_copy_(0, self._writes, qkv[:, self._q_size :])
        batches = self._batches
        if len(batches) == 1 and batches[0].queries is None:
            return self._run_batch(layer, qkv, batches[0])
        # One row more than tokens: what padded queries computed is thrown there.
        out = qkv.new_empty((self._num_tokens + 1, self._q_size))
        for batch in batches:
            assert batch.targets is not None
            out.index_copy_(0, batch.targets, self._run_batch(layer, qkv, batch))
        for extend in self._extends:
            out[extend.first : extend.last] = self._run_extend(layer, qkv, extend)
        return out[: self._num_tokens]

    def _run_batch(self, layer: int, qkv: torch.Tensor, batch: _Batch) -> torch.Tensor:
        """Grouped-query attention of a padded batch, [rows * width, heads * head_dim]."""
        rows, width, length = batch.rows, batch.width, batch.length
        kv_heads, group, dim = self._kv_heads, self._heads_per_kv, self._head_dim
        gathered = self._gather(self._head_rows[layer], batch.gather)
        keys, values = gathered.view(2, rows * kv_heads, length, dim).unbind()
        queries = qkv[:, : self._q_size]
        if batch.queries is not None:
            queries = queries.index_select(0, batch.queries)
        if width == 1:
            queries = queries.reshape(rows * kv_heads, group, dim)
        else:
            queries = queries.view(rows, width, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
            queries = queries.reshape(rows * kv_heads, group * width, dim)
        scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(self._scale)
        if batch.mask is not None:
            scores.view(rows, kv_heads, group, width, length).add_(batch.mask)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)
        out = torch.bmm(weights, values)
        if width > 1:
            out = out.view(rows, kv_heads, group, width, dim).permute(0, 3, 1, 2, 4)
        return out.reshape(rows * width, self._q_size)

    def _run_extend(self, layer: int, qkv: torch.Tensor, extend: _Extend) -> torch.Tensor:
        """Attention of one long row, [tokens, heads * head_dim]."""
        own = qkv[extend.first : extend.last]
        count = len(own)
        kv = own[:, self._q_size :]
        if extend.slots is not None:
            kv = self._gather(self._slot_rows[layer], extend.slots)
        heads = kv.view(len(kv), 2, self._kv_heads, self._head_dim)
        keys, values = heads.permute(1, 2, 0, 3)
        queries = own[:, : self._q_size].view(count, -1, self._head_dim).transpose(0, 1)
        out = functional.scaled_dot_product_attention(
            queries[None],
            keys[None],
            values[None],
            attn_mask=extend.mask,
            is_causal=extend.mask is None,
            enable_gqa=self._heads_per_kv > 1,
        )
        return out[0].transpose(0, 1).reshape(count, self._q_size)

    def _gather(self, source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """``source[index]`` in a workspace kept from call to call.

        A fresh buffer of this size costs more page faults than the copy itself; it is read before
        the next gather overwrites it.
        """
        width = source.shape[1]
        needed = len(index) * width
        if len(self._workspace) < needed:
            self._workspace = source.new_empty(1 << (needed - 1).bit_length())
        out = self._workspace[:needed].view(-1, width)
        return torch.index_select(source, 0, index, out=out)


def _indices(array: npt.NDArray[np.integer]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64).reshape(-1))
