"""Opens the links that were chosen for a worker. Imports what a device needs when it does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from trserve.errors import StartupError
from trserve.ipc.device.api import DeviceApi, DeviceError
from trserve.ipc.device.choice import AUTO, CUDA_IPC, HOST_MAPPED, NCCL, SHM
from trserve.ipc.device.host_mapped import HostMappedMedium
from trserve.ipc.device.inbox import DeviceView
from trserve.ipc.device.inbox_medium import InboxMedium
from trserve.ipc.device.medium import Offer, RingsOnly, SuffixMedium
from trserve.ipc.links import LinkReceiver
from trserve.ipc.publish import LinkSender
from trserve.ipc.slab import Slab

log = logging.getLogger(__name__)

Opener = Callable[[Slab, int, DeviceApi, Sequence[int]], SuffixMedium]
_STEP_DOWN: Final = {CUDA_IPC: HOST_MAPPED, HOST_MAPPED: SHM}
"""What ``auto`` tries where a link is refused."""


def _cuda() -> DeviceApi:
    from trserve.ipc.device.cuda_device import CudaDevice

    return CudaDevice()  # a worker sees one GPU, its own


def _open_nccl(slab: Slab, index: int, api: DeviceApi, peers: Sequence[int]) -> SuffixMedium:
    from trserve.ipc.device.cuda_device import CudaDevice
    from trserve.ipc.device.cupy_communicator import CupyCommunicators
    from trserve.ipc.device.nccl_medium import NcclMedium

    if not isinstance(api, CudaDevice):
        raise DeviceError(f"nccl joins CUDA devices, not {api.name}")
    return NcclMedium(slab, index, api, CupyCommunicators(api), peers)


OPENERS: Final[Mapping[str, Opener]] = {
    CUDA_IPC: InboxMedium,
    HOST_MAPPED: lambda slab, index, api, peers: HostMappedMedium(slab, index, api),
    NCCL: _open_nccl,
    SHM: lambda slab, index, api, peers: RingsOnly(slab, index),
}


def open_links(
    slab: Slab,
    index: int,
    names: Sequence[str],
    *,
    wanted: str = AUTO,
    device: Callable[[], DeviceApi] = _cuda,
) -> SuffixMedium:
    """The links of worker ``index``; to be opened after its graphs were captured.

    (A thread of ``nccl`` asks CUDA for events, which ends a capture in another thread.)

    Args:
        names: the link to each worker, row ``index`` of ``LinkChoice.names``.
        wanted: what --link says: only ``auto`` steps down where a device refuses a link.
        device: makes this worker's device, called once, and only if a link needs one.

    Raises StartupError for a link that was asked for and is refused.
    """
    peers: dict[str, list[int]] = {}
    for peer, name in enumerate(names):
        if peer != index and name != SHM:
            peers.setdefault(name, []).append(peer)
    if not peers:
        return RingsOnly(slab, index)
    try:
        api = device()
    except DeviceError as error:
        return _without(slab, index, error, wanted)
    media = [_open(slab, index, api, name, found, wanted) for name, found in peers.items()]
    if len(media) == 1:
        return media[0]
    return JoinedLinks(slab, index, api, media, list(peers.values()))


def _open(
    slab: Slab, index: int, api: DeviceApi, name: str, peers: Sequence[int], wanted: str
) -> SuffixMedium:
    while True:
        try:
            return OPENERS[name](slab, index, api, peers)
        except DeviceError as error:
            if wanted != AUTO or name not in _STEP_DOWN:
                return _without(slab, index, error, wanted)
            log.warning("%s is refused (%s): trying %s", name, error, _STEP_DOWN[name])
            name = _STEP_DOWN[name]


def _without(slab: Slab, index: int, error: DeviceError, wanted: str) -> SuffixMedium:
    if wanted != AUTO:
        raise StartupError(
            f"--link {wanted}: {error}\nleave --link out, and the fastest link that there is will "
            "be taken"
        )
    log.warning("no link through the device: %s; tokens go through the slab", error)
    return RingsOnly(slab, index)


class JoinedLinks(RingsOnly):
    """Several media, each to some of the workers."""

    def __init__(
        self,
        slab: Slab,
        index: int,
        api: DeviceApi,
        media: Sequence[SuffixMedium],
        peers: Sequence[Sequence[int]],
    ) -> None:
        super().__init__(slab, index, api)
        self.name = "+".join(medium.name for medium in media)
        self._media = media
        self._of = {w: medium for medium, found in zip(media, peers, strict=True) for w in found}

    def sender(self, producer: int, consumer: int) -> LinkSender:
        """The end of the medium to ``consumer``."""
        medium = self._of.get(consumer)
        if producer != self._index or medium is None:
            return super().sender(producer, consumer)
        return medium.sender(producer, consumer)

    def receiver(self, producer: int, consumer: int) -> LinkReceiver:
        """The end of the medium from ``producer``."""
        medium = self._of.get(producer)
        if consumer != self._index or medium is None:
            return super().receiver(producer, consumer)
        return medium.receiver(producer, consumer)

    def offers(self) -> list[Offer]:
        """Those of all."""
        return [offer for medium in self._media for offer in medium.offers()]

    def accept(self, offer: Offer) -> list[Offer]:
        """Each knows its own."""
        return [answer for medium in self._media for answer in medium.accept(offer)]

    def take(self, slot: int, gen: int, length: int, start: int) -> DeviceView | None:
        """From whichever has it."""
        for medium in self._media:
            view = medium.take(slot, gen, length, start)
            if view is not None:
                return view
        return None

    def holds(self, view: DeviceView) -> bool:
        """Whether the medium that it is from says so; another's words are other numbers."""
        return any(medium.holds(view) for medium in self._media)

    def close(self) -> None:
        """All of them."""
        for medium in self._media:
            medium.close()
