"""Requests of this host's own gateway that come to a model which is elsewhere. Knows no sessions.

The gateway sends none there, and its requests stay with the model that they are for; should one
come nevertheless (a router of one's own, more models than two), it ends with a clear error instead
of waiting for ever. Also takes in what the rings towards the edge port say: the bell alone counts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trserve.ipc.baton import Finish, SlotState, unpack
from trserve.ipc.fence import load_fence
from trserve.ipc.links import LinkReceiver
from trserve.ipc.publish import Outbox
from trserve.ipc.rings import Descriptor, Kind
from trserve.ipc.slab import Slab
from trserve.workers.news import News

log = logging.getLogger(__name__)


class Strays:
    """``rings`` lead to the models ``mine``; ``share`` are the slots that are not the gateway's."""

    def __init__(
        self,
        slab: Slab,
        outbox: Outbox,
        rings: Sequence[LinkReceiver],
        mine: Sequence[int],
        share: range,
    ) -> None:
        self._slab = slab
        self._outbox = outbox
        self._rings = rings
        self._mine = mine
        self._share = share
        self._news = News(slab)

    def take_in(self) -> None:
        """Drain the rings; the caller flushes."""
        missed = self._news.any
        for ring in self._rings:
            missed = ring.overflowed() or missed
            for descriptor in ring.drain():
                if descriptor.slot not in self._share:
                    self._look(descriptor.slot)
        if missed:
            self.rescan()

    def rescan(self) -> None:
        """Look at all slots of the gateway that concern these models."""
        self._news.note()
        for slot in range(self._share.start):
            if any(self._slab.sent[slot] >> model & 1 for model in self._mine):
                self._look(slot)

    def _look(self, slot: int) -> None:
        slab, gen = self._slab, self._slab.gen[slot]
        baton = unpack(slab.baton[slot])
        load_fence()
        if baton.state is SlotState.LIVE and baton.owner in self._mine:
            log.error("a request of this server came to a model that is elsewhere, and ends")
            word = baton._replace(state=SlotState.DONE, finish=Finish.WORKER_LOST).pack()
            self._outbox.store_baton(slot, word)
            sent = slab.sent[slot]
            for worker in range(slab.layout.workers):
                if sent >> worker & 1 and worker not in self._mine:
                    self._outbox.send(worker, Descriptor(Kind.DONE, slot, gen, baton.hop))
            self._outbox.flush()
            baton = unpack(slab.baton[slot])
        if baton.state is SlotState.DONE:
            for model in self._mine:
                if slab.sent[slot] >> model & 1:
                    slab.closed[model][slot] = gen
            self._outbox.close(slot, gen)
