"""What a step reads, in one pinned host buffer and one device buffer of the same layout.

The host writes into views of the first; one copy brings all of it over. Views never move, so a
graph may have captured those of the device. On the CPU both buffers are ordinary memory, and the
copy is a copy.

Knows layouts and padding; nothing of attention, graphs or requests. Block tables and lengths go by
the attention's own plan.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from trserve.models.cuda import ops
from trserve.models.cuda.decoder import TokenInputs
from trserve.workers.cuda.buckets import Bucket
from trserve.workers.sampler import RowSampling
from trserve.workers.step import StepInputs

_Int64Array = NDArray[np.int64]
_A = TypeVar("_A")

NOWHERE: Final = -1
"""The slot of a token whose keys and values are stored nowhere: padding, and what is known."""

_WORD: Final = 8
_TOKEN_FIELDS: Final = 3


@dataclass(slots=True)
class RowFields(Generic[_A]):
    """One entry a row: how its token is drawn, what its score is compared with, where it ends.

    ``seeds`` are the bits of unsigned seeds; ``draw_positions`` those of the tokens to be drawn;
    ``last`` the row's last token among the step's, which ragged steps read.
    """

    temperatures: _A
    top_p: _A
    min_p: _A
    bounds: _A
    top_k: _A
    seeds: _A
    draw_positions: _A
    last: _A


_FLOATS: Final = frozenset({"temperatures", "top_p", "min_p", "bounds"})
_ROW_FIELDS: Final = tuple(field.name for field in fields(RowFields))
_PADDING: Final = {"top_p": 1.0, "bounds": np.nan}
"""Padding rows are greedy, unfiltered and cross no bound; what is not named is 0."""


class StaticInputs:
    """The buffers for steps of up to ``max_rows`` rows and ``max_tokens`` tokens.

    Args:
        with_sources: whether tokens have a field for where their id lies on the device.

    Attributes:
        host: numpy views of the host buffer, [max_rows]: float64 or int64.
        device: torch views of the device buffer, likewise.
    """

    def __init__(
        self, device: torch.device, *, max_rows: int, max_tokens: int, with_sources: bool = False
    ) -> None:
        self._token_fields = _TOKEN_FIELDS + with_sources
        words = len(_ROW_FIELDS) * max_rows + self._token_fields * max_tokens
        pinned = device.type == "cuda"
        self._max_rows = max_rows
        self._first_token = len(_ROW_FIELDS) * max_rows
        self._host = torch.zeros(words, dtype=torch.int64, pin_memory=pinned)
        self._device = torch.zeros(words, dtype=torch.int64, device=device)
        self._words: _Int64Array = self._host.numpy()
        arrays, tensors = self._rows_of(self._words), self._rows_of(self._device)
        self.host = RowFields(
            *(a.view(np.float64) if name in _FLOATS else a for name, a in arrays.items())
        )
        self.device = RowFields(
            *(t.view(torch.float64) if name in _FLOATS else t for name, t in tensors.items())
        )
        self._loaded: RowSampling | None = None
        self._offsets = np.arange(max_tokens + 1)
        self.pad_rows(0)

    def _rows_of(self, words: _A) -> dict[str, _A]:
        size = self._max_rows
        return {
            name: words[at * size : (at + 1) * size]  # type: ignore[index]
            for at, name in enumerate(_ROW_FIELDS)
        }

    # ---------------------------------------------------------------- tokens

    def tokens(self, count: int) -> TokenViews:
        """The views of a step of ``count`` tokens; those of another count share their memory."""
        fields = self._token_fields
        first, last = self._first_token, self._first_token + fields * count
        host = self._words[first:last].reshape(fields, count)
        device = self._device[first:last].view(fields, count)
        has_sources = fields > _TOKEN_FIELDS
        return TokenViews(
            count=count,
            host=host[:_TOKEN_FIELDS],
            device=TokenInputs(*device[:_TOKEN_FIELDS]),
            source=self._host[:last],
            target=self._device[:last],
            host_addresses=host[_TOKEN_FIELDS] if has_sources else None,
            device_addresses=device[_TOKEN_FIELDS] if has_sources else None,
        )

    def fill_ragged(self, views: TokenViews, step: StepInputs) -> None:
        """Take over the tokens of ``step``, and where each row's last one is."""
        rows, count = step.num_rows, step.num_tokens
        views.fill(step, count)
        np.subtract(step.query_start[1 : rows + 1], 1, out=self.host.last[:rows])

    def fill(self, views: TokenViews, step: StepInputs, bucket: Bucket) -> None:
        """Take over the tokens of ``step``, padded to ``bucket``."""
        rows, count, width = step.num_rows, step.num_tokens, bucket.width
        if count == rows * width:
            views.fill(step, count)
            if count < views.count:
                views.pad(count)
            return
        ids, positions, slots = views.host
        views.pad(0)
        starts = step.query_start
        # A row's own tokens are its last; what leads them is known already, whatever its id.
        own = self._offsets[:count] + np.repeat(
            np.arange(1, rows + 1) * width - starts[1 : rows + 1], np.diff(starts[: rows + 1])
        )
        ids[own] = step.token_ids[:count]
        slots[own] = step.slots[:count]
        if step.sources is not None and views.host_addresses is not None:
            views.host_addresses[own] = step.sources.addresses[:count]
        leading = positions[: rows * width].reshape(rows, width)
        np.add(step.kv_len[:rows, None] - width, self._offsets[:width], out=leading)

    # ---------------------------------------------------------------- rows

    def load(self, sampling: RowSampling, count: int) -> None:
        """Take over how ``count`` rows draw; what follows them is padding.

        The same object is taken to hold the same, but for its positions.
        """
        host = self.host
        if sampling is not self._loaded:
            host.temperatures[:count] = sampling.temperatures[:count]
            host.top_p[:count] = sampling.top_p[:count]
            host.min_p[:count] = sampling.min_p[:count]
            host.top_k[:count] = sampling.top_k[:count]
            host.seeds[:count] = sampling.seeds[:count].view(np.int64)
            self.pad_rows(count)
            self._loaded = sampling
        host.draw_positions[:count] = sampling.positions[:count]

    def pad_rows(self, count: int) -> None:
        """Make all rows from ``count`` on padding."""
        for name in _ROW_FIELDS:
            getattr(self.host, name)[count:] = _PADDING.get(name, 0)


@dataclass(slots=True)
class TokenViews:
    """Views for a step of ``count`` tokens.

    Attributes:
        host: int64 [3, count]: ids, positions, slots.
        device: the same on the device.
        source, target: all of the buffers that such a step uses, rows' fields included.
        host_addresses: int64 [count], where ids lie on the device, 0: nowhere; None without.
        device_addresses: the same on the device.
    """

    count: int
    host: _Int64Array
    device: TokenInputs
    source: torch.Tensor
    target: torch.Tensor
    host_addresses: _Int64Array | None = None
    device_addresses: torch.Tensor | None = None

    def copy(self) -> None:
        """Bring everything over, in stream order, and ids from where else they lie; capturable."""
        self.target.copy_(self.source, non_blocking=True)
        if self.device_addresses is not None:
            ops.take_ids(self.device.ids, self.device_addresses)

    def fill(self, step: StepInputs, count: int) -> None:
        """Take over the first ``count`` tokens of ``step``."""
        ids, positions, slots = self.host
        ids[:count] = step.token_ids[:count]
        positions[:count] = step.positions[:count]
        slots[:count] = step.slots[:count]
        if self.host_addresses is not None:
            given = step.sources
            self.host_addresses[:count] = 0 if given is None else given.addresses[:count]

    def pad(self, first: int) -> None:
        """Make the tokens from ``first`` on padding."""
        self.host[:2, first:] = 0
        self.host[2, first:] = NOWHERE
        if self.host_addresses is not None:
            self.host_addresses[first:] = 0
