"""How long a suffix takes from one process's push to the other's Python. A measurement, not a link.

Two processes, workers 0 and 1 of a small slab. The producer (this process) commits a suffix that
begins with the time, stores the baton, pushes; the consumer polls its ring and takes the ids. Two
times are taken of each handoff: until its *descriptor* was drained, and until its *ids* could be
given to a kernel (for ``shm``, until the row could be read). What the consumer waits for then, its
next step, is not in them. The consumer spins while it is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Final

import numpy as np

from trserve.errors import StartupError
from trserve.ipc.baton import LENGTH_SHIFT, Finish, SlotState, pack
from trserve.ipc.device.api import DeviceApi
from trserve.ipc.device.choice import CUDA_IPC, HOST_MAPPED, NCCL, SHM
from trserve.ipc.device.cpu_device import CpuDevice
from trserve.ipc.device.medium import EMULATED, Offer, SuffixMedium
from trserve.ipc.device.opening import OPENERS
from trserve.ipc.doorbell import create_doorbell
from trserve.ipc.fence import load_fence
from trserve.ipc.layout import Layout
from trserve.ipc.publish import Outbox
from trserve.ipc.rings import Descriptor, Kind
from trserve.ipc.slab import Slab, create_slab_file

MEDIA: Final = (SHM, EMULATED + CUDA_IPC, EMULATED + HOST_MAPPED, CUDA_IPC, HOST_MAPPED, NCCL)
WARM_UP: Final = 200
_LAYOUT: Final = Layout(slots=64, row_tokens=256, workers=2)
_STAMP_TOKENS: Final = 2
_PATIENCE_NS: Final = 50_000_000
_CONNECT_S: Final = 60.0
_GIVE_UP_S: Final = 120.0
_START: Final = 100
"""Position of a suffix; even, for the time that stands in its first two tokens."""


@dataclass(frozen=True)
class TransportSamples:
    """Nanoseconds of each handoff, in order.

    Attributes:
        descriptor_ns: until the descriptor was drained.
        ids_ns: until the ids could be used on the consumer's device; those that came in time.
        missed: handoffs whose ids had to be taken from the row.
    """

    medium: str
    descriptor_ns: list[int]
    ids_ns: list[int]
    missed: int

    def summary(self) -> dict[str, float | int | str]:
        """p50 and p99 in microseconds."""
        found: dict[str, float | int | str] = {"medium": self.medium, "missed": self.missed}
        for name, values in (("descriptor", self.descriptor_ns), ("ids", self.ids_ns)):
            if values:
                p50, p99 = np.percentile(values, (50, 99)) / 1e3
                found[f"{name}_p50_us"] = round(float(p50), 2)
                found[f"{name}_p99_us"] = round(float(p99), 2)
        return found


def transport_samples(
    medium: str, n: int, *, tokens: int = 16, devices: tuple[int, int] = (0, 0)
) -> TransportSamples:
    """``n`` handoffs of ``tokens`` (2 to 100) tokens over ``medium``, one of :data:`MEDIA`.

    Args:
        devices: the producer's and the consumer's GPU; two for ``nccl``.

    Raises DeviceError or StartupError if the medium cannot be had, TimeoutError if it stops.
    """
    if medium not in MEDIA:
        raise StartupError(f"no medium {medium!r}: {', '.join(MEDIA)}")
    fd = create_slab_file(_LAYOUT)
    bells = [create_doorbell() for _ in range(_LAYOUT.workers + 1)]
    try:
        slab = Slab(fd, _LAYOUT, create=True)
        ends = open_medium(medium, slab, 0, devices[0])
        arguments = [medium, str(fd), str(n + WARM_UP), str(devices[1])]
        with subprocess.Popen(
            [sys.executable, "-m", __name__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(fd,),
            text=True,
        ) as consumer:
            try:
                return _measure(medium, slab, ends, bells, consumer, n, tokens)
            finally:
                consumer.kill()
                ends.close()
    finally:
        for each in (fd, *bells):
            os.close(each)


def open_medium(name: str, slab: Slab, index: int, device: int) -> SuffixMedium:
    """One of :data:`MEDIA` for worker ``index`` on ``device``."""
    kind = name.removeprefix(EMULATED)
    return OPENERS[kind](slab, index, _device_of(name, device), [1 - index])


def _device_of(name: str, device: int) -> DeviceApi:
    if name == SHM or name.startswith(EMULATED):
        return CpuDevice()
    from trserve.ipc.device.cuda_device import CudaDevice

    return CudaDevice(device)


def _measure(
    name: str,
    slab: Slab,
    medium: SuffixMedium,
    bells: Sequence[int],
    consumer: subprocess.Popen[str],
    n: int,
    tokens: int,
) -> TransportSamples:
    assert consumer.stdin is not None and consumer.stdout is not None
    _introduce(medium, consumer.stdout, consumer.stdin)
    outbox = Outbox(slab, {1: medium.sender(0, 1)}, bells, worker=0)
    for gen in range(1, n + WARM_UP + 1):
        _hand_over(slab, outbox, gen, tokens)
        _await_taken(slab, gen, consumer, _CONNECT_S if gen == 1 else _GIVE_UP_S)
    found = json.loads(consumer.stdout.readline())
    drained, usable = found["descriptor"][WARM_UP:], found["ids"][WARM_UP:]
    in_time = [value for value in usable if value]
    return TransportSamples(name, drained, in_time, len(usable) - len(in_time))


def _introduce(medium: SuffixMedium, heard: IO[str], said: IO[str]) -> None:
    """What the launcher does: both sides speak in turns until neither has anything to say."""
    mine = medium.offers()
    while True:
        said.write(json.dumps(mine) + "\n")
        said.flush()
        line = heard.readline()
        if not line:
            raise StartupError(f"{medium.name}: the consumer ended; its message stands above")
        theirs = json.loads(line)
        if not mine and not theirs:
            return
        mine = _answers(medium, theirs)


def _answers(medium: SuffixMedium, offers: list[Offer]) -> list[Offer]:
    return [answer for offer in offers for answer in medium.accept(offer)]


def _hand_over(slab: Slab, outbox: Outbox, gen: int, tokens: int) -> None:
    slot, hop = gen % _LAYOUT.slots, gen % 2**22
    length = _START + tokens
    slab.gen[slot] = gen
    slab.prompt_len[slot] = _START + 1  # a push begins with the token before
    row = slab.tokens[slot]
    row[_START:length] = gen
    stamp = row[_START : _START + _STAMP_TOKENS].data.cast("B").cast("q")
    outbox.store_baton(slot, pack(length, 1, SlotState.LIVE, Finish.NONE, 0, hop))
    outbox.send(1, Descriptor(Kind.RUN, slot, gen, hop))
    stamp[0] = time.monotonic_ns()
    outbox.flush()


def _await_taken(slab: Slab, gen: int, consumer: subprocess.Popen[str], patience_s: float) -> None:
    slot, deadline = gen % _LAYOUT.slots, time.monotonic() + patience_s
    while slab.closed[1][slot] != gen:
        if time.monotonic() > deadline or consumer.poll() is not None:
            raise TimeoutError(f"handoff {gen} was not taken within {patience_s:g} s")
        time.sleep(50e-6)  # longer than what is measured, so that the consumer is waiting


def consume(name: str, fd: int, total: int, device: int) -> None:
    """The other process."""
    slab = Slab(fd, _LAYOUT)
    medium = open_medium(name, slab, 1, device)
    mine = medium.offers()
    while True:
        theirs = json.loads(sys.stdin.readline())
        mine += _answers(medium, theirs)
        print(json.dumps(mine), flush=True)
        if not mine and not theirs:
            break
        mine = []
    receiver = medium.receiver(0, 1)
    found: dict[str, list[int]] = {"descriptor": [], "ids": []}
    while len(found["ids"]) < total:
        for descriptor in receiver.drain():
            drained, usable = _take(name, slab, medium, descriptor)
            found["descriptor"].append(drained)
            found["ids"].append(usable)
            slab.closed[1][descriptor.slot] = descriptor.gen
    print(json.dumps(found), flush=True)


def _take(name: str, slab: Slab, medium: SuffixMedium, descriptor: Descriptor) -> tuple[int, int]:
    """Nanoseconds until the descriptor was here, and until its ids were; 0 if they never came."""
    now = time.monotonic_ns
    drained, slot = now(), descriptor.slot
    length = slab.baton[slot] >> LENGTH_SHIFT
    load_fence()
    row = slab.tokens[slot, _START:length]
    usable = now()
    if name != SHM:
        while (view := medium.take(slot, descriptor.gen, length, _START)) is None:
            if now() - drained > _PATIENCE_NS:
                break
        usable = now() if view is not None else 0
    began = int(row[:_STAMP_TOKENS].data.cast("B").cast("q")[0])
    return drained - began, usable and usable - began


if __name__ == "__main__":
    consume(sys.argv[1], *(int(argument) for argument in sys.argv[2:]))
