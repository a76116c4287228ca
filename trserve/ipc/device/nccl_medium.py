"""``nccl``: suffixes between GPUs that cannot write each other's memory; see nccl_ends.py.

One communicator of two ranks for each ordered pair, because two directions on one would need the
same order of operations on both sides. A receiver that learns of a new life of a producer makes a
new unique id, offers it, and joins; the producer joins when it has the offer. Until both have, and
whenever the link is down, the row has the ids. Knows no CUDA.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

from trserve.ipc.device.api import GRANULE, PAGE_BYTES, DeviceApi
from trserve.ipc.device.choice import NCCL
from trserve.ipc.device.communicator import MESSAGE_BYTES, Communicators, Guarded, Watchdog
from trserve.ipc.device.inbox import DeviceView
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
from trserve.ipc.device.nccl_ends import MAILBOX_WORDS, ReceivingEnd, SendingEnd
from trserve.ipc.layout import WORKER_WORDS
from trserve.ipc.links import LinkReceiver
from trserve.ipc.publish import LinkSender
from trserve.ipc.rings import Descriptor
from trserve.ipc.slab import Slab, WorkerStatus

TIMEOUT_S: Final = 5.0
"""How long one message may be under way. Joining has no such bound; it blocks a thread only."""

_LOOKS_PER_TIMEOUT: Final = 8
_RANKS: Final = 2
_STATUS: Final = WORKER_WORDS.index("status")


class NcclSender:
    """A ring's end that announces a message first, if none is under way."""

    def __init__(self, ring: LinkSender, finder: SuffixFinder) -> None:
        self._ring = ring
        self._finder = finder
        self.end: SendingEnd | None = None
        self.mailbox: MemoryFile | None = None
        self.age = (0, 0)  # life and epoch of the offer that ``end`` is from

    def push(self, descriptors: Sequence[Descriptor]) -> bool:
        """As the ring does it."""
        end = self.end
        if end is not None and end.is_up and not end.is_busy:
            suffixes = self._finder.find(descriptors)
            if suffixes:
                end.offer(suffixes)
        return self._ring.push(descriptors)


class NcclReceiver:
    """A ring's end that has announced messages received."""

    def __init__(self, ring: LinkReceiver) -> None:
        self._ring = ring
        self.end: ReceivingEnd | None = None

    def overflowed(self) -> bool:
        """As the ring says."""
        return self._ring.overflowed()

    def drain(self) -> Sequence[Descriptor]:
        """As the ring does it; what was announced was so before its descriptors were pushed."""
        found = self._ring.drain()
        if found and self.end is not None:
            self.end.look()
        return found


class NcclMedium(RingsOnly):
    """The links of worker ``index``.

    Args:
        api: its device.
        communicators: what joins two of them.
        peers: the workers that suffixes are moved from and to; None: all others.
        timeout_s: how long a message may be under way before the link is given up.
    """

    def __init__(
        self,
        slab: Slab,
        index: int,
        api: DeviceApi,
        communicators: Communicators,
        peers: Collection[int] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        super().__init__(slab, index, api)
        self.name = name_over(api, NCCL)
        self._api = api
        self._communicators = communicators
        self._timeout_s = timeout_s
        others = [w for w in range(slab.layout.workers) if w != index]
        self._peers = [w for w in others if peers is None or w in peers]
        self._inbox = Inbox(slab, index, api)
        notices = self._inbox.notices
        self._notices = api.register(notices.address, notices.place.nbytes)
        mailboxes = 8 * MAILBOX_WORDS * slab.layout.workers
        pages = -(-mailboxes // PAGE_BYTES) * PAGE_BYTES
        self._mailboxes = MemoryFile.create("trserve-mailboxes", pages)
        # Two messages a peer, one each way, for all lives of the peers.
        self._messages = api.allocate(GRANULE)
        self._life = new_life()
        self._watchdog = Watchdog(timeout_s / _LOOKS_PER_TIMEOUT)
        ring = self._rings
        self.senders = {
            peer: NcclSender(ring.sender(index, peer), SuffixFinder(slab, peer))
            for peer in self._peers
        }
        self.receivers = {peer: NcclReceiver(ring.receiver(peer, index)) for peer in self._peers}

    def sender(self, producer: int, consumer: int) -> LinkSender:
        """An end that sends, from this worker to a peer; a ring's between any others."""
        if producer == self._index and consumer in self.senders:
            return self.senders[consumer]
        return super().sender(producer, consumer)

    def receiver(self, producer: int, consumer: int) -> LinkReceiver:
        """An end that receives, from a peer to this worker; a ring's between any others."""
        if consumer == self._index and producer in self.receivers:
            return self.receivers[producer]
        return super().receiver(producer, consumer)

    def offers(self) -> list[Offer]:
        """That this worker has started; what a peer needs follows when it has, too."""
        return [self._offer(peer, b"") for peer in self._peers]

    def _offer(self, peer: int, unique_id: bytes) -> Offer:
        return {
            "type": OFFER,
            "link": self.name,
            "from": self._index,
            "to": peer,
            "life": self._life,
            "epoch": self._inbox.epoch(peer),
            "unique_id": unique_id.hex(),
            "mailboxes": list(self._mailboxes.place),
        }

    def accept(self, offer: Offer) -> list[Offer]:
        """Join what is offered; answer a life that is new with a communicator to join."""
        peer = int(offer["from"])
        if offer["link"] != self.name or peer not in self.senders:
            return []
        answers = []
        if self._inbox.is_news(peer, int(offer["life"])):
            unique_id = self._communicators.unique_id()
            answers.append(self._offer(peer, unique_id))
            self._receive_from(peer, unique_id)
        if offer["unique_id"]:
            self._send_to(peer, offer)
        return answers

    def _receive_from(self, peer: int, unique_id: bytes) -> None:
        receiver = self.receivers[peer]
        if receiver.end is not None:
            receiver.end.close()
        receiver.end = ReceivingEnd(
            partial(self._join, unique_id, 1, peer),
            _mailbox(self._mailboxes, peer),
            peer,
            self._api,
            self._inbox,
            self._notices,
        )

    def _send_to(self, peer: int, offer: Offer) -> None:
        sender, age = self.senders[peer], (int(offer["life"]), int(offer["epoch"]))
        if age <= sender.age:
            return  # it came late, or twice
        sender.age = age
        if sender.end is not None:
            sender.end.close()
        try:
            sender.mailbox = MemoryFile.open(Place(*offer["mailboxes"]))
        except OSError as error:
            sender.end = None
            say_once(self.name, peer, error)
            return
        unique_id = bytes.fromhex(offer["unique_id"])
        join = partial(self._join, unique_id, 0, peer)
        sender.end = SendingEnd(join, _mailbox(sender.mailbox, self._index), peer, age[1])

    def _join(self, unique_id: bytes, rank: int, peer: int) -> Guarded:
        buffer = self._messages + MESSAGE_BYTES * (_RANKS * peer + rank)
        made = self._communicators.join(unique_id, rank, buffer)
        guarded = Guarded(made, partial(self._is_alive, peer), self._timeout_s)
        self._watchdog.add(guarded)
        return guarded

    def _is_alive(self, peer: int) -> bool:
        return bool(self._slab.workers[peer].words[_STATUS] <= WorkerStatus.UP)

    def take(self, slot: int, gen: int, length: int, start: int) -> DeviceView | None:
        """See ``SuffixMedium``."""
        return self._inbox.reader.take(slot, gen, length, start)

    def holds(self, view: DeviceView) -> bool:
        """See ``SuffixMedium``."""
        return self._inbox.reader.holds(view)

    def close(self) -> None:
        """Abort what is under way."""
        ends = [sender.end for sender in self.senders.values()]
        for end in (*ends, *(receiver.end for receiver in self.receivers.values())):
            if end is not None:
                end.close()
        self._watchdog.close()


def _mailbox(memory: MemoryFile, producer: int) -> memoryview:
    return memory.words[MAILBOX_WORDS * producer : MAILBOX_WORDS * (producer + 1)]
