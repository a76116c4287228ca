"""A slab for tests, and what hangs on it: views, rings and doorbells, all in one process."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trserve.ipc.doorbell import create_doorbell
from trserve.ipc.layout import Layout
from trserve.ipc.links import LinkReceiver, Medium, ShmMedium, open_outbox, receivers
from trserve.ipc.publish import Outbox
from trserve.ipc.slab import Slab, create_slab_file

COLLECT_EVERY = 32
"""A view's mapping has a descriptor of its own, and goes with the worker that looks through it: at
the next collection, which beside torch may come after a thousand of them."""
_uses = itertools.count(1)


@dataclass
class Memory:
    """One slab and the doorbells of its workers and gateway."""

    layout: Layout
    fd: int
    bells: tuple[int, ...]

    def slab(self) -> Slab:
        return Slab(self.fd, self.layout)

    medium: Callable[[Slab], Medium] = ShmMedium

    def consumers(self, slab: Slab, worker: int) -> list[LinkReceiver]:
        return receivers(self.medium(slab), self.layout, worker)

    def outbox(self, slab: Slab, producer: int) -> Outbox:
        return open_outbox(slab, self.bells, producer, self.medium(slab))


@contextmanager
def memory(*, slots: int = 4, row_tokens: int = 64, workers: int = 2) -> Iterator[Memory]:
    layout = Layout(slots=slots, row_tokens=row_tokens, workers=workers)
    fd = create_slab_file(layout)
    Slab(fd, layout, create=True)
    bells = tuple(create_doorbell() for _ in range(workers + 1))
    try:
        yield Memory(layout, fd, bells)
    finally:
        for each in (fd, *bells):
            os.close(each)
        if next(_uses) % COLLECT_EVERY == 0:
            gc.collect()
