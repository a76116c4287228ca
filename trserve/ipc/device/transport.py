"""How long a suffix takes from one process's push to the other's Python, and whether it arrives.

Two processes, workers 0 and 1 of a small slab. The producer (this process) commits a suffix, stores
the baton and pushes; the consumer polls its ring and takes the ids. :func:`transport_samples` takes
two times of each handoff: until its *descriptor* was drained, and until its *ids* could be given to
a kernel (for ``shm``, until the row could be read). What the consumer waits for then, its next
step, is not in them. :func:`soak` compares every id, also over a consumer that is killed. A
measurement and a check for benchmarks; no part of a server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trserve.errors import StartupError
from trserve.ipc.baton import Finish, SlotState, pack
from trserve.ipc.device import transport_consumer
from trserve.ipc.device.inbox import MAX_IDS
from trserve.ipc.device.medium import SuffixMedium
from trserve.ipc.device.transport_consumer import (
    CHECK,
    LAYOUT,
    MEDIA,
    STAMP_TOKENS,
    START,
    TIME,
    answers,
    open_ends,
    tokens_of,
)
from trserve.ipc.doorbell import create_doorbell
from trserve.ipc.publish import Outbox
from trserve.ipc.rings import Descriptor, Kind
from trserve.ipc.slab import Slab, create_slab_file
from trserve.waiting import wait_readable

WARM_UP: Final = 200
_LONGEST: Final = MAX_IDS + 20  # some are too long for an entry
_UNHEARD: Final = 8
_GIVE_UP_S: Final = 60.0
"""For a process to start, and for a handoff to be taken."""


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
    """``n`` handoffs of ``tokens`` (2 to 112) tokens over ``medium``, one of :data:`MEDIA`.

    Args:
        devices: the producer's and the consumer's GPU; two for ``nccl``.

    Raises DeviceError or StartupError if the medium cannot be had, TimeoutError if it stops.
    """
    with _Producer.open(medium, devices) as producer:
        last = n + WARM_UP
        with producer.consumer(last, TIME) as consumer:
            for gen in range(1, last + 1):
                producer.hand_over(gen, np.full(tokens, gen, np.int32), stamped=True)
                producer.await_taken(gen, consumer)
            found = _hear(consumer)
    drained, usable = found["descriptor"][WARM_UP:], found["ids"][WARM_UP:]
    in_time = [value for value in usable if value]
    return TransportSamples(medium, drained, in_time, len(usable) - len(in_time))


def soak(medium: str, n: int, *, devices: tuple[int, int] = (0, 0)) -> dict[str, int | str]:
    """``n`` handoffs of random lengths to two consumers; the first is killed after half of them.

    Returns counts: ``received``, ``taken`` (whose ids came through the device), ``wrong`` (must be
    0), ``crc`` of what was taken by the second. Errors as of :func:`transport_samples`.
    """
    with _Producer.open(medium, devices) as producer:
        half = n // 2
        with producer.consumer(-1, CHECK) as consumer:
            producer.soak(range(1, half + 1), consumer)
        for gen in range(half + 1, half + 1 + _UNHEARD):  # it is dead, and nobody knows yet
            producer.hand_over(gen, tokens_of(gen, 20))
        producer.medium.receiver(0, 1).drain()  # what a rescan makes void
        with producer.consumer(n, CHECK) as consumer:
            producer.soak(range(half + 1 + _UNHEARD, n + 1), consumer)
            return {"medium": medium, **_hear(consumer)}


class _Producer:
    """Worker 0."""

    def __init__(self, name: str, fd: int, bells: list[int], devices: tuple[int, int]) -> None:
        self._name = name
        self._fd = fd
        self._device = devices[1]
        self._slab = Slab(fd, LAYOUT, create=True)
        self.medium: SuffixMedium = open_ends(name, self._slab, 0, devices[0]).medium
        self._outbox = Outbox(self._slab, {1: self.medium.sender(0, 1)}, bells, worker=0)
        self._lengths = np.random.default_rng(0).integers(1, _LONGEST, 1024)

    @classmethod
    @contextmanager
    def open(cls, name: str, devices: tuple[int, int]) -> Iterator[_Producer]:
        """On a slab of its own."""
        if name not in MEDIA:
            raise StartupError(f"no medium {name!r}: {', '.join(MEDIA)}")
        fd = create_slab_file(LAYOUT)
        bells = [create_doorbell() for _ in range(LAYOUT.workers + 1)]
        try:
            producer = cls(name, fd, bells, devices)
            yield producer
            producer.medium.close()
        finally:
            for each in (fd, *bells):
                os.close(each)

    @contextmanager
    def consumer(self, last: int, how: str) -> Iterator[subprocess.Popen[bytes]]:
        """Worker 1, introduced; killed at the end if it has not ended."""
        arguments = [self._name, str(self._fd), str(last), str(self._device), how]
        with subprocess.Popen(
            [sys.executable, "-m", transport_consumer.__name__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self._fd,),
        ) as process:
            try:
                self._introduce(process)
                yield process
            finally:
                process.kill()

    def _introduce(self, consumer: subprocess.Popen[bytes]) -> None:
        """What the launcher does: both speak in turns until neither has anything to say."""
        assert consumer.stdin is not None
        mine = self.medium.offers()
        while True:
            consumer.stdin.write(json.dumps(mine).encode() + b"\n")
            consumer.stdin.flush()
            theirs = _hear(consumer)
            if not mine and not theirs:
                return
            mine = answers(self.medium, theirs)

    def hand_over(self, gen: int, ids: NDArray[np.int32], *, stamped: bool = False) -> None:
        """As a worker does it; the first two ids of a stamped one are the time before the push."""
        slab, slot, hop = self._slab, gen % LAYOUT.slots, gen % 2**22
        length = START + len(ids)
        slab.gen[slot] = gen
        slab.prompt_len[slot] = START + 1  # a push begins with the token before
        row = slab.tokens[slot]
        row[START:length] = ids
        self._outbox.store_baton(slot, pack(length, 1, SlotState.LIVE, Finish.NONE, 0, hop))
        self._outbox.send(1, Descriptor(Kind.RUN, slot, gen, hop))
        if stamped:
            stamp = row[START : START + STAMP_TOKENS].data.cast("B").cast("q")
            stamp[0] = time.monotonic_ns()
        self._outbox.flush()

    def await_taken(self, gen: int, consumer: subprocess.Popen[bytes]) -> None:
        """Wait until worker 1 has closed it. TimeoutError if it does not."""
        closed, slot = self._slab.closed[1], gen % LAYOUT.slots
        deadline = time.monotonic() + _GIVE_UP_S
        while closed[slot] != gen:
            if time.monotonic() > deadline or consumer.poll() is not None:
                raise TimeoutError(f"{self._name}: handoff {gen} was not taken")
            time.sleep(50e-6)  # longer than what is measured, so that the consumer is waiting

    def soak(self, gens: range, consumer: subprocess.Popen[bytes]) -> None:
        """Hand over as many at once as there are slots, then wait for them."""
        for first in range(gens.start, gens.stop, LAYOUT.slots):
            some = range(first, min(first + LAYOUT.slots, gens.stop))
            for gen in some:
                self.hand_over(gen, tokens_of(gen, int(self._lengths[gen % 1024])))
            for gen in some:
                self.await_taken(gen, consumer)


def _hear(consumer: subprocess.Popen[bytes]) -> Any:
    assert consumer.stdout is not None
    if not wait_readable(consumer.stdout.fileno(), _GIVE_UP_S):
        raise TimeoutError(f"the consumer said nothing within {_GIVE_UP_S:g} s")
    line = consumer.stdout.readline()
    if not line:
        raise StartupError("the consumer ended; what it said stands above")
    return json.loads(line)
