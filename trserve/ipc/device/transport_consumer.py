"""The other process of ``transport``: worker 1, which takes what worker 0 hands over.

``python -m trserve.ipc.device.transport_consumer MEDIUM SLAB_FD LAST DEVICE HOW``; it speaks in
lines of JSON. HOW is ``time``, which spins and notes times, or ``check``, which compares every id.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from trserve.ipc.baton import LENGTH_SHIFT
from trserve.ipc.device.api import DeviceApi
from trserve.ipc.device.choice import CUDA_IPC, HOST_MAPPED, NCCL, SHM
from trserve.ipc.device.cpu_device import CpuDevice
from trserve.ipc.device.inbox import MAX_IDS, DeviceView
from trserve.ipc.device.medium import EMULATED, Offer, SuffixMedium
from trserve.ipc.device.opening import OPENERS
from trserve.ipc.fence import load_fence
from trserve.ipc.layout import Layout
from trserve.ipc.rings import Descriptor
from trserve.ipc.slab import Slab

MEDIA: Final = (SHM, EMULATED + CUDA_IPC, EMULATED + HOST_MAPPED, CUDA_IPC, HOST_MAPPED, NCCL)
LAYOUT: Final = Layout(slots=64, row_tokens=256, workers=2)
START: Final = 100
"""Position of a suffix; even, for the time that stands in its first two tokens."""

STAMP_TOKENS: Final = 2
TIME: Final = "time"
CHECK: Final = "check"
_PATIENCE_NS: Final = 50_000_000
_HOPELESS: Final = 64
"""After so many in a row whose ids did not come through the device none is waited for: a link that
was refused is to be told by its counts, in time."""


class Ends(NamedTuple):
    """A medium, and the device under it."""

    medium: SuffixMedium
    device: DeviceApi


def open_ends(name: str, slab: Slab, index: int, device: int) -> Ends:
    """One of :data:`MEDIA` for worker ``index`` on ``device``. DeviceError if it is refused."""
    if name == SHM or name.startswith(EMULATED):
        api: DeviceApi = CpuDevice()
    else:
        from trserve.ipc.device.cuda_device import CudaDevice

        api = CudaDevice(device)
    return Ends(OPENERS[name.removeprefix(EMULATED)](slab, index, api, [1 - index]), api)


def tokens_of(gen: int, count: int) -> NDArray[np.int32]:
    """What the suffix of generation ``gen`` says: int32 [count]."""
    return (np.arange(count, dtype=np.int64) * 7919 + gen * 104729 & 0x7FFFFFFF).astype(np.int32)


def answers(medium: SuffixMedium, offers: list[Offer]) -> list[Offer]:
    """What ``medium`` says to all of them."""
    return [answer for offer in offers for answer in medium.accept(offer)]


def _introduce(medium: SuffixMedium) -> None:
    mine = medium.offers()
    while True:
        theirs = json.loads(sys.stdin.readline())
        mine += answers(medium, theirs)
        print(json.dumps(mine), flush=True)
        if not mine and not theirs:
            return
        mine = []


def _look(
    name: str, slab: Slab, ends: Ends, found: Descriptor, patience_ns: int
) -> tuple[DeviceView | None, int, int]:
    """The view, and when the descriptor and the ids were here; 0 for ids that never came."""
    now = time.monotonic_ns
    drained, slot = now(), found.slot
    length = slab.baton[slot] >> LENGTH_SHIFT
    load_fence()
    if name == SHM:
        return None, drained, now()
    if length - START > MAX_IDS:
        patience_ns = 0
    while (view := ends.medium.take(slot, found.gen, length, START)) is None:
        if now() - drained > patience_ns:
            return None, drained, 0
    return view, drained, now()


class Consumer:
    """Takes handoffs until that of generation ``last``."""

    def __init__(self, name: str, slab: Slab, ends: Ends) -> None:
        self._name = name
        self._slab = slab
        self._ends = ends
        self._times: dict[str, list[int]] = {"descriptor": [], "ids": []}
        self._seen = {"received": 0, "taken": 0, "wrong": 0, "crc": 0}
        self._missed_in_a_row = 0

    def run(self, last: int, how: str) -> dict[str, list[int]] | dict[str, int]:
        """What was noted, or counted."""
        handle = self._time if how == TIME else self._check
        receiver, gen = self._ends.medium.receiver(0, 1), 0
        while gen != last:
            for found in receiver.drain():
                handle(found)
                gen = found.gen
                self._slab.closed[1][found.slot] = gen
        return self._times if how == TIME else self._seen

    def _look(self, found: Descriptor) -> tuple[DeviceView | None, int, int]:
        patience_ns = _PATIENCE_NS if self._missed_in_a_row < _HOPELESS else 0
        seen = _look(self._name, self._slab, self._ends, found, patience_ns)
        self._missed_in_a_row = 0 if seen[2] else self._missed_in_a_row + 1
        return seen

    def _time(self, found: Descriptor) -> None:
        _, drained, usable = self._look(found)
        row = self._slab.tokens[found.slot]
        began = int(row[START : START + STAMP_TOKENS].data.cast("B").cast("q")[0])
        self._times["descriptor"].append(drained - began)
        self._times["ids"].append(usable and usable - began)

    def _check(self, found: Descriptor) -> None:
        """The row's ids, and the device's, against what must be there."""
        seen, slot = self._seen, found.slot
        length = self._slab.baton[slot] >> LENGTH_SHIFT
        wanted = tokens_of(found.gen, length - START).tobytes()
        view, _, _ = self._look(found)
        seen["received"] += 1
        seen["wrong"] += self._slab.tokens[slot, START:length].tobytes() != wanted
        if view is not None:
            ids = self._ends.device.read(view.pointer, 4 * view.num_ids)
            held = self._ends.medium.holds(view)
            seen["taken"] += 1
            seen["wrong"] += ids != wanted or not held
            seen["crc"] = crc32(ids, seen["crc"])


def main(name: str, fd: int, last: int, device: int, how: str) -> None:
    """The process."""
    slab = Slab(fd, LAYOUT)
    ends = open_ends(name, slab, 1, device)
    _introduce(ends.medium)
    print(json.dumps(Consumer(name, slab, ends).run(last, how)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
