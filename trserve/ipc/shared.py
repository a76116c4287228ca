"""What all processes of an instance share: made once, by whoever owns the instance."""

from __future__ import annotations

from dataclasses import dataclass

from trserve.ipc.doorbell import create_doorbell
from trserve.ipc.layout import Layout
from trserve.ipc.slab import Slab, create_slab_file


@dataclass(frozen=True)
class Shared:
    """The slab's memory file, and the doorbells of all workers and the gateway, in this order."""

    slab_fd: int
    bells: tuple[int, ...]

    @classmethod
    def create(cls, layout: Layout) -> Shared:
        """Fresh ones. StartupError if the slab does not fit."""
        slab_fd = create_slab_file(layout)
        Slab(slab_fd, layout, create=True)
        return cls(slab_fd, tuple(create_doorbell() for _ in range(layout.workers + 1)))
