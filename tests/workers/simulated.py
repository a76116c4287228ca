"""Workers and a gateway over a simulated slab of one slot, for ``tests/ipc/interleaving``.

The product's table, outbox, rings, batons and slots. What a worker computes is a function of the
row, so that there is one right row for each request.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.ipc.interleaving import Process, Program, Words
from trserve.gateway.slots import SlotTable
from trserve.ipc.baton import Finish, SlotState, unpack
from trserve.ipc.layout import EPOCH_WORD, EXTRAS_BYTES, RING_HEADER_WORDS
from trserve.ipc.publish import Outbox
from trserve.ipc.rings import RingConsumer, RingProducer
from trserve.ipc.slab import Slab
from trserve.params import RequestParams, SamplingParams, encode_params
from trserve.workers.blocks import BlockPool
from trserve.workers.request import Request
from trserve.workers.table import RequestTable

WORKERS = 2
GATEWAY = WORKERS
ROW = 8
BLOB = encode_params(RequestParams(sampling=SamplingParams()))
TAIL = 8
"""Of a ring's words."""

HALF = 16
"""Of the bytes of extras: the runtime's are stored first, the router's then."""

Decide = Callable[[int, int], bool]


def leaves(model: int, length: int) -> bool:
    """Worker 1 writes one token at a time; worker 0 writes where the length is odd."""
    return model == 1 or length % 2 == 0


def token(model: int, row: Sequence[int]) -> int:
    return hash((model, *row)) % 97 + 1


def right_row(prompt: Sequence[int], limit: int, entry: int) -> list[int]:
    """What becomes of ``prompt``, by a plain loop."""
    row, model = list(prompt), entry
    while len(row) < limit:
        goes = leaves(model, len(row))
        if model == 1 or not goes:
            row.append(token(model, row))
        model = 1 - model if goes else model
    return row


class Bank:
    """A bank of extras, stored in two parts."""

    def __init__(self, process: Process, slot: int, bank: int) -> None:
        self._process = process
        self._keys = [("extras", slot, bank, part) for part in range(2)]

    def __getitem__(self, at: slice) -> bytes:
        empty = bytes(HALF), bytes(EXTRAS_BYTES - HALF)
        parts = [self._process.load(key) for key in self._keys]
        return b"".join(part or zeros for part, zeros in zip(parts, empty, strict=True))

    def __setitem__(self, at: slice, value: bytes) -> None:
        for key, part in zip(self._keys, (value[:HALF], value[HALF:]), strict=True):
            self._process.store(key, part)


class Rows:
    """The slab's ``tokens``, of one slot."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def reshape(self, _: int) -> Words:
        return self._words

    def view(self) -> Any:
        return np.zeros((1, ROW), np.int32)  # for routers, which there are none of

    def __setitem__(self, at: tuple[int, slice], values: Any) -> None:
        for index, value in zip(range(*at[1].indices(ROW)), values.tolist(), strict=True):
            self._words[index] = value


class Simulated:
    """The slab of one slot as process ``index`` sees it; see ``Words`` for what is private.

    What no interleaving depends on stays in a real slab: parameters, lengths, cancel words.
    """

    def __init__(self, real: Slab, process: Process, index: int) -> None:
        slab = self.slab = copy.copy(real)
        one = range(1)
        slab.header = Words(process, "header", EPOCH_WORD + 1)  # type: ignore[assignment]
        slab.baton = Words(process, "baton", 1)  # type: ignore[assignment]
        slab.sent = Words(process, "sent", 1)  # type: ignore[assignment]
        slab.closed = [
            Words(process, ("closed", w), 1, one if w == index else ())  # type: ignore[misc]
            for w in range(WORKERS)
        ]
        # Only the holder of the baton reads the row, and it alone writes it.
        self.row = Words(process, "tokens", ROW, range(ROW))
        slab.tokens = Rows(self.row)  # type: ignore[assignment]
        slab.source = np.zeros((1, ROW), np.uint8)
        slab.extras = lambda slot, bank: Bank(process, slot, bank)  # type: ignore[assignment, method-assign, return-value]
        slab.write_params = lambda slot, blob: None  # type: ignore[method-assign]
        size = RING_HEADER_WORDS + 2 * real.layout.ring_capacity

        def ring_words(producer: int, consumer: int) -> Any:
            heads, others = range(8), range(8, RING_HEADER_WORDS)
            own = others if index == producer else heads
            return Words(process, ("ring", producer, consumer), size, own)

        slab.ring_words = ring_words  # type: ignore[method-assign]
        self.bells = [(process, ("bell", each)) for each in range(WORKERS + 1)]

    def outbox(self, index: int) -> Outbox:
        rings = {w: RingProducer(self.slab.ring_words(index, w)) for w in range(2) if w != index}
        worker = index if index < WORKERS else None
        return Outbox(self.slab, rings, self.bells, worker=worker)  # type: ignore[arg-type]


class Worker:
    """One life of worker ``index``; its turns are those of ``workers/loop.py``."""

    def __init__(self, real: Slab, process: Process, index: int, producers: Sequence[int]) -> None:
        simulated = Simulated(real, process, index)
        slab = simulated.slab
        self.index, self.row = index, simulated.row
        self.outbox = simulated.outbox(index)
        self.table = RequestTable(slab, self.outbox, BlockPool(4, 4), index)
        # RequestTable keeps a numpy view of what it is made with.
        slab.gen = Words(process, "gen", 1)  # type: ignore[assignment]
        self.rings = [RingConsumer(slab.ring_words(p, index)) for p in producers]

    def take_in(self) -> bool:
        """Whether there was anything."""
        found = self.table.outdated
        if found:
            self.table.rescan()
        for ring in self.rings:
            if ring.overflowed():
                found = True
                ring.drain()
                self.table.rescan()
            for descriptor in ring.drain():
                found = True
                self.table.sync(descriptor.slot, descriptor.gen)
        return found

    def step(self) -> None:
        for request in list(self.table.runnable.values()):
            self._write(request)
        self.outbox.flush()

    def _write(self, request: Request) -> None:
        row = [self.row[at] for at in range(request.length)]
        rows = self.table.rows
        rows.show([request], np.array([token(self.index, row)]), rows.places([request]))
        goes = leaves(self.index, request.length)
        keeps = self.index == 1 or not goes
        if keeps:
            self.table.commit(request)
        if request.full:
            self.table.finish(request, Finish.LENGTH)
        elif goes:
            self.table.hand_off(request, 1 - self.index, empty=not keeps)
        else:
            self.table.stay(request)


def worker(real: Slab, index: int, producers: Sequence[int]) -> Program:
    def program(process: Process) -> None:
        life = Worker(real, process, index, producers)
        life.table.rescan()
        while True:
            life.step()
            asleep, mark = not life.table.runnable, process.mark()
            if asleep:
                process.wait(("bell", index))
            if not life.take_in() and asleep:
                process.rewind(mark)

    return program


def gateway(real: Slab, prompts: Sequence[Sequence[int]], limit: int) -> Program:
    """Publishes one prompt after the other in the same slot."""

    def program(process: Process) -> None:
        simulated = Simulated(real, process, GATEWAY)
        slab = simulated.slab
        slots = SlotTable(slab, simulated.outbox(GATEWAY))
        slab.gen = Words(process, "gen", 1, range(1))  # type: ignore[assignment]
        for number, prompt in enumerate(prompts, 1):
            slot = slots.publish(prompt, BLOB, limit=limit, entry=0)
            sleep_until(process, lambda: unpack(slab.baton[0]).state is SlotState.DONE)
            slots.release(slot)
            sleep_until(process, slots.collect)
            process.store("answered", number)
        sleep_until(process, lambda: False)

    return program


def sleep_until(process: Process, good: Callable[[], bool]) -> None:
    """As a gateway does, which looks whenever its bell has rung."""
    mark = process.mark()
    while not good():
        process.wait(("bell", GATEWAY))
        process.rewind(mark)
