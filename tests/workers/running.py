"""The real loops of a world's workers, each in a thread; pipes stand for control and launcher."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

from tests.workers.fakes import Slot, World
from trserve.ipc.baton import SlotState
from trserve.ipc.doorbell import silence
from trserve.workers.loop import WorkerLoop

LONG_S = 20.0


class Running:
    """The loops of a world's workers, each in a thread; pipes stand for control and launcher."""

    def __init__(self, w: World) -> None:
        self.world = w
        self.control, self.say = os.pipe2(os.O_NONBLOCK)
        self.launcher, self.launcher_end = os.pipe()
        self.loops = [self._loop(index) for index in range(len(w.workers))]
        self.threads = [threading.Thread(target=loop.run, daemon=True) for loop in self.loops]

    def _loop(self, index: int) -> WorkerLoop:
        worker = self.world.workers[index]
        return WorkerLoop(
            bell=self.world.memory.bells[index],
            rings=worker.consumers,
            control_fd=self.control,
            on_control=self._on_control,
            launcher_fd=self.launcher,
            table=worker.table,
            tally=worker.tally,
            cycle=worker.cycle,
            gate=worker.gate,
            outbox=worker.outbox,
            strict=True,
        )

    def _on_control(self) -> bool:
        return not select.select([self.control], [], [], 0)[0]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait on the gateway's bell."""
        bell, deadline = self.world.memory.bells[-1], time.monotonic() + LONG_S
        while True:
            silence(bell)
            if condition():
                return
            assert time.monotonic() < deadline, "it never came to that"
            select.select([bell], [], [], 1.0)

    def done(self, *slots: Slot) -> bool:
        return all(self.world.baton(slot).state is SlotState.DONE for slot in slots)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(LONG_S)
            assert not thread.is_alive()

    def close(self) -> None:
        os.write(self.say, b"stop")
        self.join()
        for fd in (self.control, self.say, self.launcher, self.launcher_end):
            os.close(fd)
