"""Paged attention on the CPU, in plain torch operations.

Knows a step's geometry and the KV cache's layout; nothing of weights, requests or scheduling.

Small torch operations cost as much as the arithmetic here. So everything that does not depend on
the layer, views of buffers included, is made once per step (:meth:`PagedAttention.plan`), and a
layer is six operations where all rows are decodes: store, gather, product, mask, softmax, product.
Rows that compute few tokens (decodes, suffixes that came by handoff) are padded into batches in
which the query heads that share a KV head are rows of one matrix product. Long rows (prompt
chunks) go one by one through the fused kernel, over exactly their own keys. What a gather costs
follows the longest row of its group, never the capacity.
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
from trserve.workers.step import StepInputs

MAX_SHORT_QUERY = 16
"""Rows with at most this many tokens to compute are batched by padding."""

_PADDING_TOLERATED = 1 << 18
"""Score elements (query, key and head triples) up to which padding is cheaper than grouping."""

_GATHER_ELEMENTS = 1 << 22
"""Upper bound on what one group gathers, in elements: beyond it the gathered keys have left the
processor's cache before the products read them."""

_HIDDEN = np.float32(-1e38)
"""Added to hidden scores. As good as minus infinity, but a mask is then a plain product."""

_Int64Array = npt.NDArray[np.int64]
_BoolArray = npt.NDArray[np.bool_]


@dataclass(slots=True)
class _Batch:
    """Rows attended to together: ``rows`` rows, ``width`` queries each, ``length`` keys each.

    ``length`` is a whole number of blocks. ``index`` [2, rows, kv_heads, length] says which row of
    the cache, seen as rows of one head's key or value each, is whose; ``gather`` is its torch
    view, flat. ``mask`` [rows, 1, 1, width, length] is added to the scores, by their view
    ``scores_by_row``. The other tensors are views of workspaces, in the shapes that the products
    want. ``queries`` and ``targets`` are None where the batch is the whole step and each row one
    token; else they are the tokens [rows * width] to read and to write, padding being read from
    the row's first token and written past the last.
    """

    rows: int
    width: int
    length: int
    positions: _Int64Array
    index: _Int64Array
    gather: torch.Tensor
    mask: torch.Tensor
    gathered: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scores: torch.Tensor
    scores_by_row: torch.Tensor
    weights: torch.Tensor
    queries: torch.Tensor | None = None
    targets: torch.Tensor | None = None


@dataclass(slots=True)
class _Extend:
    """One long row: tokens ``first : last``.

    ``gather`` [2 * kv_heads * length] says where its keys, then its values lie, by head; None
    where it has no earlier tokens.
    """

    first: int
    last: int
    gather: torch.Tensor | None
    mask: torch.Tensor | None


class PagedAttention:
    """Attention of one model over one KV cache; ``plan`` once per step, then ``run`` per layer."""

    def __init__(self, spec: ModelSpec, kv: KVCache) -> None:
        self._kv = kv
        self._kv_heads = spec.num_kv_heads
        self._group = spec.num_heads // spec.num_kv_heads
        self._dim = spec.head_dim
        # The cache as rows of one head's key or value each.
        self._head_rows = [layer.view(-1, spec.head_dim) for layer in kv.layers]
        self._gathered, self._scores, self._weights = (_Workspace(kv.dtype) for _ in range(3))
        # Head rows of one block, relative to its first: [2, kv_heads, block_size].
        self._block_stride = kv.block_size * spec.num_kv_heads * 2
        within = np.arange(self._block_stride).reshape(spec.num_kv_heads, 2, kv.block_size)
        self._within_block = np.ascontiguousarray(within.transpose(1, 0, 2))
        self._qkv: torch.Tensor | None = None
        self._decodes: _Batch | None = None
        self._batches: list[_Batch] = []
        self._extends: list[_Extend] = []

    # ---------------------------------------------------------------- once per step

    def plan(self, step: StepInputs, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Work out gathers, masks and groups of ``step``.

        Args:
            qkv: [T, kv_heads, group + 2, head_dim], where every layer will leave, for each KV
                head, the rotated and scaled queries that share it, the rotated key, the value.
            out: [T + 1, kv_heads, group, head_dim], where every layer's output is wanted; the
                last row takes what padded queries compute.
        """
        if not self._kv.layers:
            return
        self._stored = self._rows_of(step.slots[: step.num_tokens])
        if qkv is not self._qkv:
            self._use_buffers(qkv, out)
        self._extends.clear()
        self._batches.clear()
        rows = step.num_rows
        if step.decode_only and self._fits(rows, 1, int(step.kv_len[:rows].max())):
            self._batches.append(self._plan_decodes(step))
            return
        counts = np.diff(step.query_start[: rows + 1])
        short = counts <= MAX_SHORT_QUERY
        for row in np.flatnonzero(~short).tolist():
            self._extends.append(self._plan_extend(step, row))
        for group in self._groups(np.flatnonzero(short), counts, step.kv_len):
            self._batches.append(self._plan_ragged(step, group))

    def _rows_of(self, slots: _Int64Array) -> torch.Tensor:
        """The head rows, by token, KV head, key and value, of ``slots``."""
        size = self._kv.block_size
        firsts = slots // size * self._block_stride + slots % size
        return _indices(firsts[:, None] + np.arange(0, self._block_stride, size))

    def _use_buffers(self, qkv: torch.Tensor, out: torch.Tensor) -> None:
        group = self._group
        self._qkv, self._out = qkv, out
        self._queries, self._new_kv = qkv[:, :, :group], qkv[:, :, group:]
        # Should every row be one token: a product for each row and KV head.
        self._decode_queries = qkv.view(-1, group + 2, self._dim)[:, :group]
        self._decode_out = out[:-1].view(-1, group, self._dim)

    def _fits(self, rows: int, width: int, longest: int) -> bool:
        """Whether one batch is cheap enough, whatever its padding."""
        scores = rows * width * longest * self._kv_heads * self._group
        gathered = rows * longest * 2 * self._kv_heads * self._dim
        return scores <= _PADDING_TOLERATED and gathered <= _GATHER_ELEMENTS

    def _groups(
        self, rows: _Int64Array, counts: npt.NDArray[np.int32], kv_len: npt.NDArray[np.int32]
    ) -> Iterator[_Int64Array]:
        """The groups of ``rows`` to pad together."""
        if not len(rows):
            return
        counts, lengths = counts[rows], kv_len[rows]
        if self._fits(len(rows), int(counts.max()), int(lengths.max())):
            yield rows
            return
        # Powers of two: no group pads a row's queries or keys to more than twice their number.
        classes = 64 * np.frexp(counts - 1)[1] + np.frexp(lengths - 1)[1]
        for size_class in np.unique(classes):
            members = rows[classes == size_class]
            per_row = int(kv_len[members].max()) * 2 * self._kv_heads * self._dim
            stride = max(1, _GATHER_ELEMENTS // per_row)
            for first in range(0, len(members), stride):
                yield members[first : first + stride]

    def _plan_decodes(self, step: StepInputs) -> _Batch:
        """One batch of all rows, one token each; kept while its shape stays the same."""
        rows = step.num_rows
        lengths = step.kv_len[:rows]
        length = self._whole_blocks(int(lengths.max()))
        batch = self._decodes
        if batch is None or batch.rows != rows or batch.length != length:
            batch = self._decodes = self._make_batch(rows, 1, length)
        hidden = batch.positions >= lengths[:, None]
        self._fill_index(batch, step.block_tables[:rows], hidden)
        self._fill_mask(batch, hidden[:, None])
        return batch

    def _plan_ragged(self, step: StepInputs, rows: _Int64Array) -> _Batch:
        starts, lengths = step.query_start[rows], step.kv_len[rows]
        counts = step.query_start[rows + 1] - starts
        width = int(counts.max())
        batch = self._make_batch(len(rows), width, self._whole_blocks(int(lengths.max())))
        offsets = np.arange(width)
        hidden = batch.positions >= lengths[:, None]
        self._fill_index(batch, step.block_tables[rows], hidden)
        # Query s of a row sits at position length - count + s and sees the keys up to there; what
        # the padded queries past its last see is of no interest, but must not be nothing.
        last_seen = np.minimum((lengths - counts)[:, None] + offsets, lengths[:, None] - 1)
        self._fill_mask(batch, batch.positions > last_seen[:, :, None])
        real = offsets < counts[:, None]
        tokens = starts[:, None] + np.where(real, offsets, 0)
        batch.queries = _indices(tokens)
        batch.targets = _indices(np.where(real, tokens, step.num_tokens))
        return batch

    def _plan_extend(self, step: StepInputs, row: int) -> _Extend:
        first, last = int(step.query_start[row]), int(step.query_start[row + 1])
        length = int(step.kv_len[row])
        count = last - first
        if length == count:
            return _Extend(first, last, gather=None, mask=None)
        blocks = step.block_tables[row, : -(-length // step.block_size), None].astype(np.int64)
        by_block = blocks * self._block_stride + self._within_block[:, :, None]
        gather = by_block.reshape(2, self._kv_heads, -1)[:, :, :length]
        hidden = np.arange(length) > np.arange(length - count, length)[:, None]
        mask = torch.from_numpy(hidden * _HIDDEN).to(self._kv.dtype)
        return _Extend(first, last, _indices(gather), mask)

    def _make_batch(self, rows: int, width: int, length: int) -> _Batch:
        products, group = rows * self._kv_heads, self._group
        index = np.empty((2, rows, self._kv_heads, length), np.int64)
        gathered = self._gathered.take(index.size, self._dim)
        keys, values = gathered.view(2, products, length, self._dim)
        scores = self._scores.take(products, group * width, length)
        return _Batch(
            rows=rows,
            width=width,
            length=length,
            positions=np.arange(length),
            index=index,
            gather=torch.from_numpy(index.reshape(-1)),
            mask=torch.empty((rows, 1, 1, width, length), dtype=self._kv.dtype),
            gathered=gathered,
            keys=keys.transpose(1, 2),
            values=values,
            scores=scores,
            scores_by_row=scores.view(rows, self._kv_heads, group, width, length),
            weights=self._weights.take(products, group * width, length),
        )

    def _fill_index(self, batch: _Batch, tables: npt.NDArray[np.int32], hidden: _BoolArray) -> None:
        """Point ``batch.index`` at the rows' keys and values, and at the dummy block elsewhere.

        Hidden positions include stale table entries and the unused end of a row's last block,
        where another request's values may lie.
        """
        size = self._kv.block_size
        blocks = batch.length // size
        firsts = tables[: batch.rows, :blocks].astype(np.int64) * self._block_stride
        by_block = batch.index.reshape(2, batch.rows, self._kv_heads, blocks, size)
        within = self._within_block[:, None, :, None]
        np.add(firsts[None, :, None, :, None], within, out=by_block)
        dummy = self._kv.num_blocks * self._block_stride
        np.copyto(batch.index, dummy, where=hidden[None, :, None, :])

    def _fill_mask(self, batch: _Batch, hidden: _BoolArray) -> None:
        """Hide what is ``hidden`` [rows, width, length]."""
        batch.mask.copy_(torch.from_numpy(hidden * _HIDDEN)[:, None, None])

    def _whole_blocks(self, length: int) -> int:
        size = self._kv.block_size
        return -(-length // size) * size

    # ---------------------------------------------------------------- once per layer

    def run(self, layer: int) -> None:
        """Store this step's keys and values of ``layer`` and attend, from and to the buffers."""
        rows = self._new_kv.reshape(-1, self._dim)
        self._head_rows[layer].index_copy_(0, self._stored, rows)
        for batch in self._batches:
            self._run_batch(layer, batch)
        for extend in self._extends:
            self._run_extend(layer, extend)

    def _run_batch(self, layer: int, batch: _Batch) -> None:
        """Grouped-query attention of a padded batch."""
        torch.index_select(self._head_rows[layer], 0, batch.gather, out=batch.gathered)
        decodes = batch.queries is None
        queries = self._decode_queries if decodes else self._ragged_queries(batch)
        scores = torch.bmm(queries, batch.keys, out=batch.scores)
        batch.scores_by_row.add_(batch.mask)
        if scores.dtype == torch.float32:
            torch.softmax(scores, -1, out=batch.weights)
        else:
            batch.weights.copy_(torch.softmax(scores, -1, dtype=torch.float32))
        if decodes:
            torch.bmm(batch.weights, batch.values, out=self._decode_out)
        else:
            self._scatter(batch, torch.bmm(batch.weights, batch.values))

    def _ragged_queries(self, batch: _Batch) -> torch.Tensor:
        """[rows * kv_heads, group * width, head_dim], gathered by token and padded."""
        assert batch.queries is not None
        queries = self._queries.index_select(0, batch.queries)
        by_row = queries.view(batch.rows, batch.width, self._kv_heads, self._group, self._dim)
        return by_row.permute(0, 2, 3, 1, 4).reshape(
            batch.rows * self._kv_heads, self._group * batch.width, self._dim
        )

    def _scatter(self, batch: _Batch, result: torch.Tensor) -> None:
        """The inverse of :meth:`_ragged_queries`, into the output."""
        assert batch.targets is not None
        by_row = result.view(batch.rows, self._kv_heads, self._group, batch.width, self._dim)
        tokens = by_row.permute(0, 3, 1, 2, 4).reshape(-1, *self._out.shape[1:])
        self._out.index_copy_(0, batch.targets, tokens)

    def _run_extend(self, layer: int, extend: _Extend) -> None:
        """Attention of one long row; the KV heads are the batch of the fused kernel."""
        own = slice(extend.first, extend.last)
        kv = self._new_kv[own].permute(2, 1, 0, 3)
        if extend.gather is not None:
            gathered = self._gathered.take(len(extend.gather), self._dim)
            torch.index_select(self._head_rows[layer], 0, extend.gather, out=gathered)
            kv = gathered.view(2, self._kv_heads, -1, self._dim)
        keys, values = kv.unsqueeze(2)
        result = functional.scaled_dot_product_attention(
            self._queries[own].permute(1, 2, 0, 3),
            keys,
            values,
            attn_mask=extend.mask,
            is_causal=extend.mask is None,
            scale=1.0,
            enable_gqa=self._group > 1,
        )
        self._out[own].copy_(result.permute(2, 0, 1, 3))


class _Workspace:
    """A buffer that grows to the largest use and is overwritten by every next one.

    A fresh tensor of this size would cost more page faults than the copy that fills it.
    """

    __slots__ = ("_buffer",)

    def __init__(self, dtype: torch.dtype) -> None:
        self._buffer = torch.empty(0, dtype=dtype)

    def take(self, *shape: int) -> torch.Tensor:
        """A contiguous tensor of ``shape`` at the start of the buffer."""
        size = int(np.prod(shape))
        if len(self._buffer) < size:
            self._buffer = torch.empty(1 << (size - 1).bit_length(), dtype=self._buffer.dtype)
        return self._buffer[:size].view(shape)


def _indices(array: npt.NDArray[np.integer]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64).reshape(-1))
