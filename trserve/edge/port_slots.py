"""The slots of an edge port: other hosts' requests in this host's slab, under the usual protocol.

The port is to them what the gateway is to its own (it fills and frees them) and, for the models
that are elsewhere, their worker as well: while a request is at home, the port has its baton. Knows
no sessions and no frames.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trserve.edge.frames import last_hop
from trserve.gateway.slots import Slot, SlotTable
from trserve.ipc.baton import Finish, SlotState, pack, unpack
from trserve.ipc.extras import write_extras
from trserve.ipc.fence import load_fence
from trserve.ipc.publish import Outbox
from trserve.ipc.rings import Descriptor, Kind
from trserve.ipc.slab import Slab

_FILLING = pack(0, 0, SlotState.FILLING, Finish.NONE, 0, 0)


class Opening(NamedTuple):
    """A request that gets a slot.

    Attributes:
        row: int32, all of it so far; ``left`` as in ``cloud.Visit``.
        pages: annotation pages that it needs.
        owner, hop: of its first baton word.
        early: the model that may compute its prompt while the port has the baton; None for none.
        scored: whether its prompt's records are made elsewhere.
    """

    row: NDArray[np.int32]
    prompt_len: int
    limit: int
    blob: bytes
    pages: int
    left: tuple[int, ...]
    owner: int
    hop: int
    extras: bytes = b""
    empty: bool = False
    early: int | None = None
    scored: bool = False


class PortSlots(SlotTable):
    """The slots ``share``; ``mine`` are the models that the port stands for.

    Attributes:
        host: the one of ``mine`` that has the baton of requests that are at home from the start.
        most_pages: annotation pages that one request may have.
    """

    def __init__(self, slab: Slab, outbox: Outbox, share: range, mine: Collection[int]) -> None:
        self._mine = frozenset(mine)
        self.host = min(mine)
        self._others = [w for w in range(slab.layout.workers) if w not in self._mine]
        super().__init__(slab, outbox, share)
        pages = len(self._free_pages) + sum(map(len, self._pages.values()))
        self.most_pages = min(pages, slab.layout.pages_per_request)
        for index, (gen, _) in tuple(self._closing.items()):
            self.end(Slot(index, gen))  # a predecessor's: nobody is at home with it any more

    def open(self, opening: Opening) -> Slot | None:
        """Fill a slot and store its first baton word; None if no slot, or too few pages are free.

        The caller flushes the outbox.
        """
        if not self._free or opening.pages > min(len(self._free_pages), self.most_pages):
            return None
        slab, slot, gen = self._slab, self._free.pop(), next(self._generations)
        length = len(opening.row)
        slab.baton[slot] = _FILLING
        slab.gen[slot] = gen
        slab.cancel[slot] = 0
        slab.prompt_len[slot] = opening.prompt_len
        slab.limit[slot] = opening.limit
        slab.cached[slot] = -1
        slab.sent[slot] = 1 << opening.owner
        slab.tokens[slot, :length] = opening.row
        slab.write_params(slot, opening.blob)
        self._set_left(slot, opening.left)
        if opening.pages:
            held = self._pages[slot] = [self._free_pages.pop() for _ in range(opening.pages)]
            slab.page_table[slot, : opening.pages] = held
            slab.pages[held[0], 0] = opening.prompt_len if opening.scored else 0
        now = time.monotonic_ns()
        write_extras(slab.extras(slot, 0), now, 0, opening.empty, length, opening.extras)
        word = pack(length, opening.owner, SlotState.LIVE, Finish.NONE, 0, opening.hop)
        self._outbox.store_baton(slot, word)
        if opening.owner not in self._mine:
            self._outbox.send(opening.owner, Descriptor(Kind.RUN, slot, gen, opening.hop))
        if opening.early is not None:
            slab.sent[slot] |= 1 << opening.early
            descriptor = Descriptor(Kind.PREFILL, slot, gen, opening.hop)
            self._outbox.send(opening.early, descriptor)
        return Slot(slot, gen)

    def hand_over(
        self,
        slot: Slot,
        ids: NDArray[np.int32],
        *,
        owner: int,
        hop: int,
        left: tuple[int, ...] = (),
        extras: bytes = b"",
        empty: bool = False,
    ) -> None:
        """Append ``ids`` to a row whose baton the port has, and give that to ``owner``."""
        slab, index = self._slab, slot.index
        baton = unpack(slab.baton[index])
        length, bank = baton.length + len(ids), baton.bank ^ 1
        slab.tokens[index, baton.length : length] = ids
        self._set_left(index, left)
        now = time.monotonic_ns()
        write_extras(slab.extras(index, bank), now, 0, empty, length, extras)
        slab.sent[index] |= 1 << owner
        word = pack(length, owner, SlotState.LIVE, Finish.NONE, bank, max(hop, baton.hop + 1))
        self._outbox.store_baton(index, word)
        self._outbox.send(owner, Descriptor(Kind.RUN, index, slot.gen, unpack(word).hop))

    def flush(self) -> None:
        """Publish what was stored and sent so far."""
        self._outbox.flush()

    def _set_left(self, slot: int, left: tuple[int, ...]) -> None:
        for words, length in zip(self._slab.left, left, strict=False):
            words[slot] = length

    def is_mine(self, word: int) -> bool:
        """Whether the port has the baton ``word``, of a request that is not over."""
        baton = unpack(word)
        return baton.state is SlotState.LIVE and baton.owner in self._mine

    def is_home(self, slot: Slot) -> bool:
        """Whether the port has the request's baton, and its word has room for another visit."""
        word = self._slab.baton[slot.index]
        return self.is_mine(word) and unpack(word).hop < last_hop(self._slab.layout.row_tokens)

    def is_lent(self, slot: Slot) -> bool:
        """Whether a model here has the request's baton."""
        word = self._slab.baton[slot.index]
        return unpack(word).state is SlotState.LIVE and not self.is_mine(word)

    def row(self, slot: Slot) -> NDArray[np.int32]:
        """The request's committed tokens."""
        length = unpack(self._slab.baton[slot.index]).length
        load_fence()
        return self._slab.tokens[slot.index, :length]

    def end(self, slot: Slot) -> None:
        """Nobody wants the request any more; its slot comes back once everybody has closed it."""
        slab, index = self._slab, slot.index
        word = slab.baton[index]
        load_fence()
        if self.is_mine(word):
            self.finish(slot, Finish.ABORT)
        elif unpack(word).state is SlotState.LIVE:
            slab.cancel[index] = slot.gen
            self._tell(slot, Kind.CANCEL)
        self.release(slot)

    def finish(self, slot: Slot, reason: Finish) -> None:
        """End a request whose baton the port has."""
        baton = unpack(self._slab.baton[slot.index])
        word = baton._replace(state=SlotState.DONE, finish=reason).pack()
        self._outbox.store_baton(slot.index, word)
        self._tell(slot, Kind.DONE)

    def _tell(self, slot: Slot, kind: Kind) -> None:
        sent = self._slab.sent[slot.index]
        for worker in self._others:
            if sent >> worker & 1:
                self._outbox.send(worker, Descriptor(kind, slot.index, slot.gen, 0))

    def collect(self) -> bool:
        """Take back what can be; True if there was anything.

        A request that came back in the moment in which it was cancelled is ended first.
        """
        for index, (gen, _) in self._closing.items():
            if self.is_mine(self._slab.baton[index]):
                load_fence()
                self.finish(Slot(index, gen), Finish.ABORT)
        return super().collect()

    def _is_closed(self, index: int, gen: int) -> bool:
        """As the gateway's, but for those workers that are the port itself: it holds nothing."""
        slab = self._slab
        if unpack(slab.baton[index]).state is not SlotState.DONE:
            return False
        load_fence()
        sent = slab.sent[index]
        return all(slab.closed[w][index] == gen for w in self._others if sent >> w & 1)
