"""``host_mapped``: the receiver's kernel reads the ids from the row, in mapped host memory.

Nothing is pushed. Each process registers the rows of its own mapping of the slab with its device,
once, when it starts; a view is the row's address there. A kernel that reads some dozens of ids
across PCIe takes a microsecond or two, about as long as a read of an inbox that another device
wrote, and any layout of processes and GPUs can do it.

Registered pages stay in memory: all rows of the slab are resident from then on, used or not. And
whoever frees the pages of a registered row (a punched hole) would leave the device with pages that
nobody else sees any more: rows of such a slab must never be punched.

Memory order: the row was written before the baton, the baton loaded before the launch; the launch
is the acquire. Knows no CUDA.
"""

from __future__ import annotations

from trserve.ipc.baton import LENGTH_SHIFT
from trserve.ipc.device.api import PAGE_BYTES, DeviceApi
from trserve.ipc.device.choice import HOST_MAPPED
from trserve.ipc.device.inbox import DeviceView
from trserve.ipc.device.medium import RingsOnly, name_over
from trserve.ipc.slab import Slab


class HostMappedMedium(RingsOnly):
    """The links of worker ``index``. DeviceError if the system will not register the rows."""

    def __init__(self, slab: Slab, index: int, api: DeviceApi) -> None:
        super().__init__(slab, index, api)
        self.name = name_over(api, HOST_MAPPED)
        self._api = api
        rows = slab.tokens
        first = int(rows.ctypes.data)
        # Whole pages around the rows: what else lies on the first and the last is registered too.
        self._registered = first - first % PAGE_BYTES
        end = first + rows.nbytes
        nbytes = -(-(end - self._registered) // PAGE_BYTES) * PAGE_BYTES
        base = api.register(self._registered, nbytes)
        self._rows = base + first - self._registered
        self._row_bytes = rows.strides[0]

    def take(self, slot: int, gen: int, length: int, start: int) -> DeviceView | None:
        """The row itself, if slot, generation and length are the request's."""
        word = self._slab.baton[slot]
        if self._slab.gen[slot] != gen or word >> LENGTH_SHIFT != length:
            return None
        if not 0 <= start < length <= self._slab.layout.row_tokens:
            return None
        pointer = self._rows + slot * self._row_bytes + 4 * start
        return DeviceView(pointer, length - start, -1 - slot, gen)

    def holds(self, view: DeviceView) -> bool:
        """Rows only grow: as long as the generation is the same, what was seen is there."""
        return view.notice < 0 and self._slab.gen[-1 - view.notice] == view.seq

    def close(self) -> None:
        """Unregister, before the slab is unmapped."""
        self._api.unregister(self._registered)
