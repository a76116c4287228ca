"""What carries descriptors from one process to another, whatever it is made of.

A **medium** joins a producer (a worker, or the gateway) and a consuming worker by a link with two
ends. The protocol asks this much of it, and no more, because a descriptor is a hint and the slab
the truth:

* what one ``push`` is given arrives as a whole or not at all, and in order;
* what was in the slab before a ``push`` is seen by whoever drains its descriptors;
* a ``push`` that finds no room says so, and the other end then reports an overflow once (or once
  for several), upon which it rescans; nothing waits and nothing queues privately;
* either end may be created anew by a successor of the process that had it. What was under way may
  be lost then, which the new epoch's rescan makes good, but nothing may arrive torn.

Wakes are not a link's: the doorbell rings after the push. Tokens are not, either: they lie in the
row. A medium that moves them too (into a GPU's memory, to another host) reads them there, by slot
and committed length. ``shm``, the one here, is a ring in the slab's memory file; the media of
``device`` keep its rings and move suffixes beside them.

Knows no batons and no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trserve.ipc.layout import Layout
from trserve.ipc.publish import LinkSender, Outbox
from trserve.ipc.rings import Descriptor, RingConsumer, RingProducer
from trserve.ipc.slab import Slab


class LinkReceiver(Protocol):
    """The reading end of a link."""

    def overflowed(self) -> bool:
        """Whether the producer found no room since the last call."""

    def drain(self) -> Sequence[Descriptor]:
        """Everything that was published and not drained yet, oldest first."""


class Medium(Protocol):
    """Makes the ends of links."""

    def sender(self, producer: int, consumer: int) -> LinkSender:
        """The end of ``producer`` towards the worker ``consumer``."""

    def receiver(self, producer: int, consumer: int) -> LinkReceiver:
        """The other end of it."""


class ShmMedium:
    """Rings in the slab."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab

    def sender(self, producer: int, consumer: int) -> RingProducer:
        """The producing end of a ring."""
        return RingProducer(self._slab.ring_words(producer, consumer))

    def receiver(self, producer: int, consumer: int) -> RingConsumer:
        """The consuming end of a ring."""
        return RingConsumer(self._slab.ring_words(producer, consumer))


def open_outbox(
    slab: Slab, doorbells: Sequence[int], producer: int, medium: Medium | None = None
) -> Outbox:
    """What ``producer`` publishes through, over rings in the slab if no other medium is given."""
    layout = slab.layout
    ends = senders(medium or ShmMedium(slab), layout, producer)
    worker = producer if producer < layout.workers else None
    return Outbox(slab, ends, doorbells, worker=worker)


def senders(medium: Medium, layout: Layout, producer: int) -> dict[int, LinkSender]:
    """The ends of ``producer`` towards every worker but itself, by worker."""
    workers = (worker for worker in range(layout.workers) if worker != producer)
    return {worker: medium.sender(producer, worker) for worker in workers}


def receivers(medium: Medium, layout: Layout, consumer: int) -> list[LinkReceiver]:
    """The ends of ``consumer`` from every other worker and the gateway."""
    producers = (p for p in range(layout.workers + 1) if p != consumer)
    return [medium.receiver(producer, consumer) for producer in producers]
