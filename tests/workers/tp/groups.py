"""Ranks for tests: threads of this process, each with a view of its own of the group's memory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from trserve.ipc.doorbell import create_doorbell
from trserve.workers.tp.memory import GroupLayout, GroupMemory, create_group_file
from trserve.workers.tp.plan_ring import PlanReader, PlanWriter
from trserve.workers.tp.shared_sum import SharedMemoryGroup

WAIT_S = 20.0


class Group:
    """The memory and the doorbells of some ranks, all of which are in this process.

    Nobody spins: threads of one interpreter take turns anyway.
    """

    def __init__(self, ranks: int, max_tokens: int = 64, max_rows: int = 8, width: int = 16):
        self.layout = GroupLayout(ranks, max_tokens, max_rows, width)
        self.fd = create_group_file(self.layout)
        self.bells = [create_doorbell() for _ in range(1, ranks)]
        self.memories = [GroupMemory(self.fd, self.layout, rank) for rank in range(ranks)]

    def sums(self, rank: int, timeout_s: float = WAIT_S) -> SharedMemoryGroup:
        return SharedMemoryGroup(self.memories[rank], spin=0, timeout_s=timeout_s)

    def writer(self, timeout_s: float = WAIT_S) -> PlanWriter:
        return PlanWriter(self.memories[0], self.bells, spin=0, timeout_s=timeout_s)

    def reader(self, rank: int = 1, block_size: int = 8) -> PlanReader:
        return PlanReader(self.memories[rank], self.bells[rank - 1], block_size, {}, spin=0)

    def close(self) -> None:
        for fd in (self.fd, *self.bells):
            os.close(fd)


@contextlib.contextmanager
def grouped(ranks: int, **sizes: int) -> Iterator[Group]:
    group = Group(ranks, **sizes)
    try:
        yield group
    finally:
        group.close()


def together(functions: list[Callable[[], object]]) -> list[object]:
    """Each in a thread of its own; what they return. The first error of any is raised."""
    results: list[object] = [None] * len(functions)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return results
