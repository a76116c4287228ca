"""The ends of the rows that this worker writes: sampled tokens, not committed yet.

They lie where only this worker and routers look, until a baton word covers them; nothing here
stores a baton. Knows slots, lengths and the slab's rows; no states and no rings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trserve.ipc.slab import Slab
from trserve.workers.request import Request
from trserve.workers.step import StepInputs

FEW_ROWS: Final = 14
"""Below this, filling rows one by one is cheaper than a handful of vector operations."""


class RowWriter:
    """Writes and reads the rows of worker ``index``'s requests, many at once.

    Args:
        block_tables: int32 [slots, blocks per row], the requests' own.
    """

    def __init__(self, slab: Slab, index: int, block_tables: NDArray[np.int32]) -> None:
        self._tokens = slab.tokens.reshape(-1)
        self._source = slab.source.reshape(-1)
        self._row_tokens = slab.layout.row_tokens
        self._index = index
        self._block_tables = block_tables

    def show(
        self, requests: Sequence[Request], tokens: NDArray[np.int64], places: NDArray[np.int64]
    ) -> None:
        """Write ``tokens`` and their source past the committed lengths, and let views show them.

        ``places``: those of :meth:`places`.
        """
        self.write(places, tokens)
        for request in requests:
            request.visible = request.length + 1

    def places(self, requests: Sequence[Request]) -> NDArray[np.int64]:
        """Where :meth:`write` puts the next token of each: the ends of their rows."""
        row_tokens = self._row_tokens
        return np.array([request.slot * row_tokens + request.length for request in requests])

    def write(self, places: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Write ``tokens`` and their source at ``places``; :meth:`show` but for the views."""
        self._tokens[places] = tokens.astype(np.int32)
        self._source[places] = self._index

    def fill(self, rows: Sequence[tuple[Request, int]], inputs: StepInputs) -> None:
        """Make ``inputs`` a step in which each request computes so many of its next tokens."""
        inputs.clear()
        if len(rows) >= FEW_ROWS and max([tokens for _, tokens in rows]) == 1:
            self.fill_decodes([request for request, _ in rows], inputs)
            return
        for request, tokens in rows:
            start = request.num_computed
            first = request.slot * self._row_tokens + start
            if tokens == 1:
                inputs.add_decode_row(int(self._tokens[first]), start, request.block_table)
                continue
            inputs.add_row(self._tokens[first : first + tokens], start, request.block_table)

    def fill_decodes(self, requests: Sequence[Request], inputs: StepInputs) -> None:
        """Make ``inputs`` a step in which each of ``requests`` computes one token."""
        slots = np.array([request.slot for request in requests])
        positions = np.array([request.num_computed for request in requests])
        blocks = int(positions.max()) // inputs.block_size + 1
        tokens = self._tokens[slots * self._row_tokens + positions]
        inputs.set_decode_rows(tokens, positions, self._block_tables[:, :blocks].take(slots, 0))
