"""``cuda_ipc``: the producer's device writes suffixes into the receiver's inbox.

Each worker owns one inbox, whose handle it offers to every producer when it starts; a producer
opens it once. Then a handoff is one launch, with no call for it in the receiver. The doorbell stays
the eventfd behind the ring: the launch goes first, so that the ids have usually arrived when the
receiver looks, and if not, the row has them.

Restarts. A worker that starts anew offers a new inbox (its old one is gone), and asks nobody: who
gets an offer of a life that it did not know answers with its own offer, under a new epoch, so that
nothing that the dead one pushed counts. Offers may come twice, late, or in any order.

The same class over ``CpuDevice`` is the medium ``emulated-cuda_ipc``. Knows no CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Final

from trserve.ipc.device.api import DeviceApi, DeviceError, Push, sync
from trserve.ipc.device.choice import CUDA_IPC
from trserve.ipc.device.inbox import DeviceView, InboxLayout, Suffix, encode, next_seq
from trserve.ipc.device.medium import (
    OFFER,
    Inbox,
    Offer,
    RingsOnly,
    SuffixFinder,
    name_over,
    new_life,
    say_once,
)
from trserve.ipc.device.memory_file import MemoryFile, Place
from trserve.ipc.publish import LinkSender
from trserve.ipc.rings import Descriptor
from trserve.ipc.slab import Slab

_CLOSE_TIMEOUT_S: Final = 1.0
"""How long the last copies to a peer that was replaced may take: they are small, but a GPU without
MPS may be in another process's time slice."""


class Target:
    """A receiver's inbox, open in this process."""

    def __init__(self, api: DeviceApi, offer: Offer, layout: InboxLayout, producer: int) -> None:
        self.life = int(offer["life"])
        self.epoch = int(offer["epoch"])
        self._api = api
        self._layout = layout
        self._producer = producer
        place = Place(*offer["notices"])
        self._notices = MemoryFile.open(place)
        try:
            self._notice_base = api.register(self._notices.address, place.nbytes)
        except DeviceError:
            self._notices.close()
            raise
        self._opened = place.pid != os.getpid()  # a process cannot open its own handle
        try:
            handle = bytes.fromhex(offer["handle"])
            self._pointer = api.open(handle) if self._opened else int(offer["pointer"])
        except DeviceError:
            self._close_notices()
            raise
        self._seq = 0

    def push(self, suffixes: Sequence[Suffix]) -> bool:
        """Have them written; False (and none) if the device is behind: the row has them."""
        return self._api.push([self._to_push(suffix) for suffix in suffixes])

    def _to_push(self, suffix: Suffix) -> Push:
        self._seq = next_seq(self._seq, self.epoch)
        layout, producer, slot = self._layout, self._producer, suffix.slot
        return Push(
            encode(suffix, self._seq, self.epoch),
            self._pointer + layout.entry(producer, slot),
            self._notice_base + layout.notice(producer, slot),
        )

    def close(self) -> None:
        """Close the receiver's memory, once the device has nothing under way to it.

        DeviceError if that takes too long; it stays open then, because a copy into memory that is
        not mapped any more would end everything that this device does.
        """
        sync(self._api, _CLOSE_TIMEOUT_S)
        if self._opened:
            self._api.close(self._pointer)
        self._close_notices()

    def _close_notices(self) -> None:
        self._api.unregister(self._notices.address)
        self._notices.close()


class PushingSender:
    """A ring's end that has the suffixes pushed first.

    Attributes:
        target: the receiver's inbox, once it was offered.
        pushed: suffixes that were pushed.
    """

    def __init__(self, ring: LinkSender, finder: SuffixFinder, link: str, consumer: int) -> None:
        self._ring = ring
        self._finder = finder
        self._link = link
        self._consumer = consumer
        self.target: Target | None = None
        self.pushed = 0

    def push(self, descriptors: Sequence[Descriptor]) -> bool:
        """As the ring does it; what becomes of the suffixes changes nothing of that."""
        if self.target is not None and (suffixes := self._finder.find(descriptors)):
            try:
                self.pushed += len(suffixes) * self.target.push(suffixes)
            except DeviceError as error:
                say_once(self._link, self._consumer, error)
                self.target = None
        return self._ring.push(descriptors)


class InboxMedium(RingsOnly):
    """The links of worker ``index``.

    Args:
        api: its device.
        peers: the workers that suffixes are moved from and to; None: all others.
    """

    def __init__(
        self, slab: Slab, index: int, api: DeviceApi, peers: Collection[int] | None = None
    ) -> None:
        super().__init__(slab, index, api)
        self.name = name_over(api, CUDA_IPC)
        self._api = api
        others = [w for w in range(slab.layout.workers) if w != index]
        self._peers = [w for w in others if peers is None or w in peers]
        self._inbox = Inbox(slab, index, api)
        self._handle = api.export(self._inbox.pointer).hex()
        self._life = new_life()
        self._senders = {
            peer: PushingSender(
                super(InboxMedium, self).sender(index, peer),
                SuffixFinder(slab, peer),
                self.name,
                peer,
            )
            for peer in self._peers
        }

    @property
    def pushed(self) -> int:
        """Suffixes that this worker pushed."""
        return sum(sender.pushed for sender in self._senders.values())

    def sender(self, producer: int, consumer: int) -> LinkSender:
        """A pushing end from this worker to a peer; a ring's end between any others."""
        if producer == self._index and consumer in self._senders:
            return self._senders[consumer]
        return super().sender(producer, consumer)

    def offers(self) -> list[Offer]:
        """One to every peer."""
        return [self._offer(peer) for peer in self._peers]

    def _offer(self, peer: int) -> Offer:
        return {
            "type": OFFER,
            "link": self.name,
            "from": self._index,
            "to": peer,
            "life": self._life,
            "epoch": self._inbox.epoch(peer),
            "handle": self._handle,
            "pointer": self._inbox.pointer,
            "notices": list(self._inbox.notices.place),
        }

    def accept(self, offer: Offer) -> list[Offer]:
        """Open a peer's inbox; answer a life that is new with our own offer."""
        peer = int(offer["from"])
        if offer["link"] != self.name or peer not in self._senders:
            return []
        is_news = self._inbox.is_news(peer, int(offer["life"]))
        self._open(peer, offer)
        return [self._offer(peer)] if is_news else []

    def _open(self, peer: int, offer: Offer) -> None:
        sender = self._senders[peer]
        old, age = sender.target, (int(offer["life"]), int(offer["epoch"]))
        if not age[1] or (old is not None and age <= (old.life, old.epoch)):
            return  # it came late, or twice, or before the peer knew of us
        layout = InboxLayout(self._slab.layout.slots, self._slab.layout.workers, peer)
        sender.target = None
        try:
            if old is not None:
                old.close()
            sender.target = Target(self._api, offer, layout, self._index)
        except (DeviceError, OSError) as error:
            say_once(self.name, peer, error)

    def take(self, slot: int, gen: int, length: int, start: int) -> DeviceView | None:
        """See ``SuffixMedium``."""
        return self._inbox.reader.take(slot, gen, length, start)

    def holds(self, view: DeviceView) -> bool:
        """See ``SuffixMedium``."""
        return self._inbox.reader.holds(view)

    def close(self) -> None:
        """Close the peers' inboxes. DeviceError if the device is still writing into one."""
        for sender in self._senders.values():
            target, sender.target = sender.target, None
            if target is not None:
                target.close()
