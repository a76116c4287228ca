"""What a link that moves suffixes has beyond descriptors, and what a worker asks of it.

Descriptors go through the rings in the slab, whatever else a medium moves: the protocol is written
once. What a device medium adds is a place on the receiver's device where the ids of a suffix may
lie already when the descriptor is drained; if they do not, for whatever reason, the row has them.
Nothing here can delay, lose or change a token. Knows no CUDA.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

from trserve.ipc.baton import HOP_MASK, LENGTH_SHIFT
from trserve.ipc.device.api import PAGE_BYTES, DeviceApi, Piece
from trserve.ipc.device.inbox import MAX_IDS, DeviceView, InboxLayout, InboxReader, Suffix
from trserve.ipc.device.memory_file import MemoryFile
from trserve.ipc.layout import WORKER_WORDS, Layout
from trserve.ipc.links import LinkReceiver, ShmMedium
from trserve.ipc.publish import LinkSender
from trserve.ipc.rings import Descriptor, Kind
from trserve.ipc.slab import Slab, WorkerStatus

log = logging.getLogger(__name__)

Offer = dict[str, Any]
"""A control message ``{"type": "link_offer", "link", "from", "to", "life", ...}``; the launcher
hands it to worker ``to`` as it is."""

OFFER: Final = "link_offer"
CUDA: Final = "cuda"
EMULATED: Final = "emulated-"
_STATUS: Final = WORKER_WORDS.index("status")


class SuffixMedium(Protocol):
    """A ``links.Medium`` that may have suffixes on the device."""

    name: str

    def sender(self, producer: int, consumer: int) -> LinkSender:
        """See ``links.Medium``."""

    def receiver(self, producer: int, consumer: int) -> LinkReceiver:
        """See ``links.Medium``."""

    def offers(self) -> list[Offer]:
        """What this worker tells the others once, when it has started."""

    def accept(self, offer: Offer) -> list[Offer]:
        """Take in another's offer, at any time; returns what is to be answered."""

    def take(self, slot: int, gen: int, length: int, start: int) -> DeviceView | None:
        """Row[start : length] on this worker's device; None: take it from the row.

        The caller holds the baton of ``slot``, whose length is ``length``, and launches what reads
        the ids after this call; the view is good until it gives the baton away.
        """

    def holds(self, view: DeviceView) -> bool:
        """Whether what a view shows has not been written since."""

    def collect(self, pieces: Sequence[Piece]) -> bool:
        """Copy views to where a step reads its ids, in the order of the device's own copies.

        False if the device is behind, or there is none: take them from the row.
        """

    def close(self) -> None:
        """Close what belongs to others. Own memory goes with the process: others may have it."""


class RingsOnly:
    """The base of every medium, and a medium itself: descriptors in rings, ids in the row."""

    name = "shm"

    def __init__(self, slab: Slab, index: int, api: DeviceApi | None = None) -> None:
        self._slab = slab
        self._index = index
        self._device = api
        self._rings = ShmMedium(slab)

    def sender(self, producer: int, consumer: int) -> LinkSender:
        """The ring's end."""
        return self._rings.sender(producer, consumer)

    def receiver(self, producer: int, consumer: int) -> LinkReceiver:
        """The ring's end."""
        return self._rings.receiver(producer, consumer)

    def offers(self) -> list[Offer]:
        """None."""
        return []

    def accept(self, offer: Offer) -> list[Offer]:
        """None is for this medium."""
        return []

    def take(self, slot: int, gen: int, length: int, start: int) -> DeviceView | None:
        """Never anything."""
        return None

    def holds(self, view: DeviceView) -> bool:
        """There are no views."""
        return False

    def collect(self, pieces: Sequence[Piece]) -> bool:
        """By this worker's device."""
        return self._device is not None and self._device.collect(pieces)

    def close(self) -> None:
        """There is nothing to close."""


class SuffixFinder:
    """Which ids a consumer has not seen, by the slab alone.

    It needs the row from what it has computed on; that is at least what it had when it last gave
    the baton away, less the token that it had just sampled, or the prompt if it computed that
    early. A guess that is too short is found out at :meth:`SuffixMedium.take`.
    """

    def __init__(self, slab: Slab, consumer: int) -> None:
        self._baton = slab.baton
        self._left = slab.left[consumer]
        self._prompt_len = slab.prompt_len
        self._tokens = slab.tokens
        self._words = slab.workers[consumer].words

    def find(self, descriptors: Sequence[Descriptor]) -> list[Suffix]:
        """The suffixes behind ``descriptors`` whose batons were just stored.

        The slot cannot be given to another request meanwhile: this worker is in ``sent`` and has
        not closed it. The new owner may be writing already, but not below ``length``.
        """
        if self._words[_STATUS] > WorkerStatus.UP:
            return []  # its memory goes away, or has gone
        found = []
        for kind, slot, gen, hop in descriptors:
            word = self._baton[slot]
            if kind is not Kind.RUN or word & HOP_MASK != hop:
                continue
            length = word >> LENGTH_SHIFT
            start = max(self._left[slot], self._prompt_len[slot], 1) - 1
            if 0 < length - start <= MAX_IDS:
                ids = self._tokens[slot, start:length].tobytes()
                found.append(Suffix(slot, gen, hop, length, ids))
        return found


class Inbox:
    """This worker's own inbox and notices, and which life of every producer may write them."""

    def __init__(self, slab: Slab, index: int, api: DeviceApi) -> None:
        layout: Layout = slab.layout
        self.layout = InboxLayout(layout.slots, layout.workers, index)
        self.pointer = api.allocate(self.layout.device_bytes)
        pages = -(-self.layout.notice_bytes // PAGE_BYTES) * PAGE_BYTES
        self.notices = MemoryFile.create("trserve-notices", pages)
        self.reader = InboxReader(self.layout, self.notices.words, self.pointer, slab.tokens)
        self._lives: dict[int, int] = {}

    def epoch(self, producer: int) -> int:
        """The present epoch of ``producer``."""
        return self.reader.epochs[producer]

    def is_news(self, producer: int, life: int) -> bool:
        """Note a life of ``producer``; True if it is a new one, which gets an epoch of its own.

        From here on nothing that its predecessor pushed is taken.
        """
        if life <= self._lives.get(producer, 0):
            return False
        self._lives[producer] = life
        self.reader.epochs[producer] += 1
        return True


def name_over(api: DeviceApi, kind: str) -> str:
    """What the medium ``kind`` is called over ``api``: over an emulated device, it says so."""
    return kind if api.name == CUDA else f"{EMULATED}{kind}"


def new_life() -> int:
    """What tells the lives of a worker apart: later ones are larger."""
    return time.monotonic_ns()


def say_once(link: str, peer: int, error: Exception) -> None:
    """One line for a link that does not work; requests do not notice."""
    log.warning("link %s to worker %d: %s; its tokens go through the slab", link, peer, error)
