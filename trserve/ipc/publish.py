"""One step's results, made visible in phases. Knows no router, no model and no HTTP.

The order is the protocol: (1) tokens, sources, ``sent`` and the inactive ``extras`` bank are
written by the caller; fence; (2) all baton words, then ``closed`` words; fence; (3) each ring's
tail, once; (4) each consumer's doorbell, once. A reader that saw a baton word therefore sees all
that it covers, and one that saw a descriptor sees at least the baton word that it hints at.

To ring a consumer that sleeps takes longer than all the stores. Whoever only streams what was
committed may be rung a little later, once this worker's next step is under way; a consumer that
has something to do is not kept waiting, and neither is a request that is over.

After the store of a word that names another owner, this process touches nothing of the slot until
the word names it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from trserve.ipc.doorbell import ring
from trserve.ipc.fence import store_fence
from trserve.ipc.rings import Descriptor
from trserve.ipc.slab import Slab


class LinkSender(Protocol):
    """The producing end of a link; ``links`` says what is asked of it."""

    def push(self, descriptors: Sequence[Descriptor]) -> bool:
        """Publish all of ``descriptors``; False if there is no room, and the consumer will know."""


class Outbox:
    """Collects the batons and descriptors of a step and publishes them at once.

    Args:
        slab: the shared table.
        rings: the producing ends of links, by worker index; never one to this process itself.
        doorbells: the descriptor of every consumer's bell, by index, the gateway's last.
        worker: the index of this worker, whose ``closed`` words are its own; None in the gateway.
    """

    def __init__(
        self,
        slab: Slab,
        rings: Mapping[int, LinkSender],
        doorbells: Sequence[int],
        worker: int | None = None,
    ) -> None:
        self._baton = slab.baton
        self._gateway = slab.layout.gateway
        self._rings = rings
        self._doorbells = doorbells
        self._closed = None if worker is None else slab.closed[worker]
        self._closing: list[tuple[int, int]] = []
        self._batons: list[tuple[int, int]] = []
        self._descriptors: dict[int, list[Descriptor]] = {worker: [] for worker in rings}
        self._bells: set[int] = set()
        self._held: set[int] = set()  # of those that stream
        self._first_edge = slab.layout.slots
        self._port = -1

    def also_ring(self, port: int, first_slot: int) -> None:
        """Have the worker ``port`` rung too, for batons of slots from ``first_slot`` on.

        These requests' clients are at another host, and the edge port streams to them.
        """
        self._port, self._first_edge = port, first_slot

    def store_baton(self, slot: int, word: int) -> None:
        """Have ``word`` stored with the others of this step, and the gateway rung once, if this is
        not its own."""
        self._batons.append((slot, word))

    def store_batons(self, slots: Sequence[int], words: Sequence[int]) -> None:
        """:meth:`store_baton` for many slots."""
        self._batons += zip(slots, words, strict=True)

    def close(self, slot: int, gen: int) -> None:
        """Have this worker's ``closed`` word stored: it holds nothing of ``gen`` any more.

        After the batons: a worker that ended in between must still find its own DONE to do.
        Before the bells: the gateway, woken, finds the slot free at once.
        """
        self._closing.append((slot, gen))

    def send(self, worker: int, descriptor: Descriptor) -> None:
        """Have ``descriptor`` pushed to ``worker``, and its bell rung once."""
        self._descriptors[worker].append(descriptor)

    def flush(self, *, hold: bool = False) -> None:
        """Publish what was collected, in the order of the protocol.

        With ``hold`` whoever streams is rung by :meth:`ring_held`, which is to be called soon.
        """
        if self._batons:
            store_fence()
            baton = self._baton
            for slot, word in self._batons:
                baton[slot] = word
            if self._port >= 0 and max(self._batons)[0] >= self._first_edge:
                self._held.add(self._port)
            self._batons.clear()
            if self._closed is not None:  # the gateway looks at what it stored itself
                self._held.add(self._gateway)
        if self._closing:
            self._store_closed()
        store_fence()
        for worker, descriptors in self._descriptors.items():
            if descriptors:
                self._rings[worker].push(descriptors)
                descriptors.clear()
                self._bells.add(worker)
        for consumer in self._bells:
            ring(self._doorbells[consumer])
        self._held -= self._bells
        self._bells.clear()
        if not hold:
            self.ring_held()

    def ring_held(self) -> None:
        """Ring whoever streams and was not rung yet."""
        if self._held:
            for consumer in self._held:
                ring(self._doorbells[consumer])
            self._held.clear()

    def _store_closed(self) -> None:
        if self._closed is not None:
            for slot, gen in self._closing:
                self._closed[slot] = gen
            if self._port >= 0 and max(self._closing)[0] >= self._first_edge:
                self._bells.add(self._port)
        self._closing.clear()
        self._bells |= self._held
        self._held.clear()
        self._bells.add(self._gateway)
