"""The other process of the device links' tests: ``python -m tests.ipc.device.peer ROLE ARGUMENTS``.

Talks in lines of JSON: what it is told on standard input, what it says on standard output. Every
wait in it ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any
from zlib import crc32

import numpy as np

from tests.ipc.device.emulated_communicator import EmulatedCommunicators
from trserve.ipc.baton import LENGTH_SHIFT, MAX_OWNER, OWNER_SHIFT, Finish, SlotState, pack
from trserve.ipc.device.api import GRANULE, DeviceError
from trserve.ipc.device.cpu_device import CpuDevice
from trserve.ipc.device.host_mapped import HostMappedMedium
from trserve.ipc.device.inbox_medium import InboxMedium
from trserve.ipc.device.medium import SuffixMedium
from trserve.ipc.device.memory_file import MemoryFile, Place
from trserve.ipc.device.nccl_medium import NcclMedium
from trserve.ipc.layout import Layout
from trserve.ipc.links import LinkReceiver
from trserve.ipc.publish import Outbox
from trserve.ipc.rings import Descriptor, Kind
from trserve.ipc.slab import Slab

GIVE_UP_S = 60.0
MEDIA: dict[str, Callable[[Slab, int, CpuDevice], SuffixMedium]] = {
    "emulated-cuda_ipc": InboxMedium,
    "emulated-host_mapped": HostMappedMedium,
    "emulated-nccl": lambda slab, index, api: NcclMedium(
        slab, index, api, EmulatedCommunicators(api), timeout_s=1.0
    ),
}
CONTRACT = ("emulated-cuda_ipc", "emulated-host_mapped")


def say(message: Any) -> None:
    print(json.dumps(message), flush=True)


def told() -> Any:
    line = sys.stdin.readline()
    if not line:
        sys.exit("nobody is there any more")
    return json.loads(line)


def token(gen: int, position: int) -> int:
    return (gen * 7919 + position) * 2654435761 % 2**31


def hand_over(slab: Slab, outbox: Outbox, slot: int, gen: int, span: range, to: int) -> None:
    """Write the tokens of ``span``, as the baton's holder does, and give the baton to ``to``."""
    slab.gen[slot] = gen
    slab.prompt_len[slot] = span.start
    slab.tokens[slot, : span.stop] = [token(gen, at) for at in range(span.stop)]
    hop = gen % 2**22
    outbox.store_baton(slot, pack(span.stop, to, SlotState.LIVE, Finish.NONE, 0, hop))
    outbox.send(to, Descriptor(Kind.RUN, slot, gen, hop))


def _export() -> None:
    """Owns memory; says its handle; writes and reads as it is told."""
    api = CpuDevice()
    pointer = api.allocate(GRANULE)
    say(api.export(pointer).hex())
    while (what := told()) != "end":
        if what == "read":
            say(api.read(pointer, 64).hex())
        else:
            try:
                api.free(pointer)
                say("freed")
            except DeviceError as error:
                say(str(error))


def _memory() -> None:
    memory = MemoryFile.create("trserve-test", 4096)
    say(list(memory.place))
    told()
    memory.close()
    say("closed")
    told()


def _sender(medium_name: str, slab_fd: str, layout: str, bells: str, first: str, last: str) -> None:
    """Worker 0: answers offers, then hands generations ``first`` to ``last`` to worker 1.

    One handoff a generation and slot, and never more under way than slots: the next round waits
    until worker 1 has given the one before to nobody (the largest owner).
    """
    slab = Slab(int(slab_fd), Layout(*json.loads(layout)))
    medium = MEDIA[medium_name](slab, 0, CpuDevice())
    outbox = Outbox(slab, {1: medium.sender(0, 1)}, json.loads(bells), worker=0)
    say([offer for offer in medium.offers() if offer["to"] == 1])
    while isinstance(offers := told(), list):
        say([answer for offer in offers for answer in medium.accept(offer)])
    slots = slab.layout.slots
    deadline = time.monotonic() + GIVE_UP_S + int(last) / 2000
    for gen in range(int(first), int(last)):
        slot = gen % slots
        while slab.baton[slot] and slab.baton[slot] >> OWNER_SHIFT & MAX_OWNER != MAX_OWNER:
            if time.monotonic() > deadline:
                sys.exit("worker 1 takes nothing")
            os.sched_yield()
        length = 4 + gen * 31 % (slab.layout.row_tokens - 4)
        hand_over(slab, outbox, slot, gen, range(max(1, length - 1 - gen % 149), length), to=1)
        if gen % 3 or gen % slots == slots - 1:
            outbox.flush()
    outbox.flush()
    say({"pushed": getattr(medium, "pushed", 0)})
    told()


def _receiver(medium_name: str, slab_fd: str, layout: str) -> None:
    """Worker 1: answers offers, then takes whatever comes until it is told to end or killed."""
    slab = Slab(int(slab_fd), Layout(*json.loads(layout)))
    api = CpuDevice()
    medium = MEDIA[medium_name](slab, 1, api)
    say([offer for offer in medium.offers() if offer["to"] == 0])
    while isinstance(offers := told(), list):
        say([answer for offer in offers for answer in medium.accept(offer)])
    say(look(slab, medium, api, medium.receiver(0, 1), offers))


def look(
    slab: Slab,
    medium: SuffixMedium,
    api: CpuDevice,
    receiver: LinkReceiver,
    until: int,
    seconds: float | None = None,
    patience_s: float = 0.0,
) -> dict[str, int]:
    """Take what comes, until that of generation ``until`` has, or for so long; checks it all.

    ``patience_s`` is how long to look for the ids of a descriptor, where they come after it.
    """
    seen = {"received": 0, "taken": 0, "wrong": 0, "last": 0, "overflows": 0, "crc": 0}
    deadline = time.monotonic() + (GIVE_UP_S + until / 2000 if seconds is None else seconds)
    while seen["last"] < until and time.monotonic() < deadline:
        for found in receiver.drain():
            _take(slab, medium, api, found, seen, patience_s)
        seen["overflows"] += receiver.overflowed()
        os.sched_yield()
    return seen


def _take(
    slab: Slab,
    medium: SuffixMedium,
    api: CpuDevice,
    found: Descriptor,
    seen: dict[str, int],
    patience_s: float,
) -> None:
    slot, gen = found.slot, found.gen
    length = slab.baton[slot] >> LENGTH_SHIFT
    start = slab.prompt_len[slot]
    wanted = [token(gen, at) for at in range(start, length)]
    give_up = time.monotonic() + patience_s
    while (view := medium.take(slot, gen, length, start)) is None:
        if time.monotonic() >= give_up:
            break
        time.sleep(0)
    if view is not None:
        ids = api.read(view.pointer, 4 * view.num_ids)
        seen["wrong"] += np.frombuffer(ids, np.int32).tolist() != wanted
        seen["taken"] += 1
        seen["crc"] = crc32(ids, seen["crc"])
    seen["wrong"] += slab.tokens[slot, start:length].tolist() != wanted
    seen["received"] += 1
    seen["wrong"] += gen <= seen["last"]
    seen["last"] = gen
    slab.baton[slot] = pack(length, MAX_OWNER, SlotState.LIVE, Finish.NONE, 0, gen % 2**22)


def _open_place(place: str) -> None:
    memory = MemoryFile.open(Place(*json.loads(place)))
    memory.words[0] = 42
    say("open")
    told()


ROLES: dict[str, Callable[..., None]] = {
    "export": _export,
    "memory": _memory,
    "sender": _sender,
    "receiver": _receiver,
    "open-place": _open_place,
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
