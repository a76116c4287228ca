"""One worker between a start and the reap of its last process. Starts nothing; knows no slab."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from trserve.children import Child
from trserve.restarts import WorkerDeaths

REAPED_AFTER_S: Final = 10.0


@dataclass
class Worker:
    """One model's processes, or the lack of any.

    The loss of one of them is the loss of the worker: the others are killed, and only when all are
    reaped does anything follow.

    Attributes:
        indices: the models that it stands for in the slab; the first is its own.
        crew: its processes that are not reaped, rank 0 first; none between two lives.
        in_slab: whether rank 0 may write to the slab; else we do.
        start_at: when the next ones are to be started.
        killed_at: when the crew was killed, because it hung, has lost one of them, or shares a GPU
            with a worker that died.
        hung: whether it was because it hung.
        shared_with: the worker that it was killed for; empty if its own death began it.
        end: how the first of them ended, once one has.
    """

    indices: tuple[int, ...]
    title: str
    deaths: WorkerDeaths
    crew: list[Child] = field(default_factory=list)
    in_slab: bool = False
    start_at: float | None = None
    killed_at: float | None = None
    hung: bool = False
    shared_with: str = ""
    end: str = ""

    @property
    def index(self) -> int:
        """The worker's number."""
        return self.indices[0]

    @property
    def ready(self) -> bool:
        """Whether all of it can serve."""
        return bool(self.crew) and all(child.ready for child in self.crew)

    def overdue(self, now: float) -> bool:
        """Whether it was killed, and is still not reaped."""
        return self.killed_at is not None and now - self.killed_at >= REAPED_AFTER_S

    def kill(self, now: float) -> None:
        """End what is left of it."""
        self.killed_at = now
        for child in self.crew:
            child.process.kill()

    def is_over(self) -> None:
        """All of it was reaped."""
        self.in_slab, self.killed_at, self.hung = False, None, False
        self.shared_with = self.end = ""
