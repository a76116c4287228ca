"""Finds the ids of a step that a link has put on this worker's device already.

Asked once for each baton that came, when its request is first in a step; steps that go on by
themselves are not looked at. What is found only feeds the device: the row was read as always, and
says the same. Knows links and steps; nothing of devices, and not who uses what is found.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trserve.ipc.device.inbox import MAX_IDS, DeviceView
from trserve.ipc.device.medium import SuffixMedium
from trserve.ipc.slab import Slab
from trserve.workers.request import Request
from trserve.workers.rows import RowWriter
from trserve.workers.step import StepInputs, TokenSources
from trserve.workers.table import RequestTable

_ID_BYTES = 4


class ViewedRows(RowWriter):
    """Rows whose suffixes ``medium`` may have on the device; takes the place of ``table.rows``.

    To be made when everything else that waits for arrivals at the table is there.

    Attributes:
        came: suffixes that came by handoff, behind a prompt that was computed here, and are short
            enough for an inbox.
        viewed: those of them that were found on the device.
    """

    def __init__(
        self, slab: Slab, index: int, table: RequestTable, medium: SuffixMedium, max_tokens: int
    ) -> None:
        super().__init__(slab, index, table.block_tables)
        self.came = self.viewed = 0
        self._medium = medium
        self._runnable = table.runnable
        self._fresh: dict[int, Request] = {}
        self._views: list[DeviceView] = []
        self._sources = TokenSources(np.zeros(max_tokens, np.int64), self._hold)
        self._offsets = np.arange(MAX_IDS) * _ID_BYTES
        self._on_arrival, table.on_arrival = table.on_arrival, self._note
        table.rows = self

    def fill(self, rows: Sequence[tuple[Request, int]], inputs: StepInputs) -> None:
        """See :class:`RowWriter`; and say where ids lie on the device, if any do."""
        super().fill(rows, inputs)
        if self._fresh:
            self._look(rows, inputs)

    def _note(self, request: Request) -> None:
        if request.hop:  # else it comes from the gateway, which has no device
            self._fresh[request.slot] = request
        self._on_arrival(request)

    def _look(self, rows: Sequence[tuple[Request, int]], inputs: StepInputs) -> None:
        self._sources.addresses[: inputs.num_tokens] = 0
        self._views.clear()
        for row, (request, tokens) in enumerate(rows):
            if self._fresh.get(request.slot) is request:
                del self._fresh[request.slot]
                self._take(request, int(inputs.query_start[row]), tokens)
        if self._views:
            inputs.sources = self._sources
        runnable = self._runnable  # what left before it was in a step would be looked for forever
        self._fresh = {s: found for s, found in self._fresh.items() if runnable.get(s) is found}

    def _take(self, request: Request, first: int, tokens: int) -> None:
        """The view of what ``request`` has not computed, for its tokens of the step."""
        start, length = request.num_computed, request.length
        if start < request.prompt_len - 1 or length - start > MAX_IDS:
            return
        self.came += 1
        view = self._medium.take(request.slot, request.gen, length, start)
        if view is None:
            return
        self.viewed += 1
        self._views.append(view)
        np.add(
            self._offsets[:tokens],
            view.pointer,
            out=self._sources.addresses[first : first + tokens],
        )

    def _hold(self) -> bool:
        return all(self._medium.holds(view) for view in self._views)
