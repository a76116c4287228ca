"""Media of all workers of a slab, in one process and introduced, as one medium.

For the contract that every link keeps (tests/ipc/test_links.py): each end is that of the worker
that has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from tests.ipc.device.emulated_communicator import EmulatedCommunicators
from tests.ipc.memory import memory
from trserve.ipc.device.cpu_device import CpuDevice
from trserve.ipc.device.host_mapped import HostMappedMedium
from trserve.ipc.device.inbox_medium import InboxMedium
from trserve.ipc.device.medium import Offer, SuffixMedium
from trserve.ipc.device.nccl_medium import NcclMedium
from trserve.ipc.links import LinkReceiver, Medium
from trserve.ipc.publish import LinkSender
from trserve.ipc.slab import Slab


class World:
    """The gateway's ends are worker 0's medium's, which has rings for it."""

    def __init__(self, media: list[SuffixMedium]) -> None:
        self.media = media

    def sender(self, producer: int, consumer: int) -> LinkSender:
        return self.media[producer % len(self.media)].sender(producer, consumer)

    def receiver(self, producer: int, consumer: int) -> LinkReceiver:
        return self.media[consumer].receiver(producer, consumer)


def relay(media, messages: list[Offer]) -> None:
    """What the launcher does with offers."""
    for _ in range(5):
        messages = [answer for offer in messages for answer in media[offer["to"]].accept(offer)]
    assert not messages, "they never stop answering each other"


def _mapped(slab: Slab, index: int) -> SuffixMedium:
    return HostMappedMedium(slab, index, CpuDevice())


def _inboxes(slab: Slab, api: CpuDevice) -> Callable[[Slab, int], SuffixMedium]:
    return lambda slab, index: InboxMedium(slab, index, api)


def _nccl(slab: Slab, api: CpuDevice) -> Callable[[Slab, int], SuffixMedium]:
    made = EmulatedCommunicators(api)
    return lambda slab, index: NcclMedium(slab, index, api, made)


def _world(
    make: Callable[[Slab, CpuDevice], Callable[[Slab, int], SuffixMedium]],
) -> Callable[[], AbstractContextManager[Medium]]:
    @contextmanager
    def world() -> Iterator[Medium]:
        with memory(slots=4, row_tokens=16) as made:
            slab = made.slab()
            opener = make(slab, CpuDevice())
            media = [opener(slab, index) for index in range(made.layout.workers)]
            relay(media, [offer for medium in media for offer in medium.offers()])
            _await_connections(media)
            yield World(media)
            for medium in media:
                medium.close()

    return world


def _await_connections(media: list[SuffixMedium]) -> None:
    deadline = time.monotonic() + 30
    for medium in media:
        for sender in getattr(medium, "senders", {}).values():
            while not sender.end.is_up:
                assert time.monotonic() < deadline
                time.sleep(0.0005)


WORLDS = {
    "emulated-cuda_ipc": _world(_inboxes),
    "emulated-host_mapped": _world(lambda slab, api: _mapped),
    "emulated-nccl": _world(_nccl),
}
