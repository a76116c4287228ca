"""How a process that uses a GPU ends when the launcher is gone: without work left on the device.

A process that is killed while its work is on the GPU can wedge an MPS server and everybody else on
it. So the kernel's word that the parent has died is a signal that can be handled: the main thread,
between two launches, waits for what it has launched and ends. A second thread sees to it that this
takes no longer than it may, should the device hang.

The handler runs between two byte codes of the main thread, so nothing is launched after it; calls
that wait for a device release the interpreter's lock, so that the second thread runs meanwhile.
Knows no device: how to wait for one is given. Imports no package for CUDA.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final

from trserve.ipc.process import die_with_parent

log = logging.getLogger(__name__)

EXIT_WITHIN_S: Final = 3.0
EXIT_ABANDONED: Final = 1


class DeviceExit:
    """Ends this process when its parent does.

    Args:
        parent: the launcher's pid.
        synchronize: returns once all work that was launched is done; may raise.
        within_s: the longest that may take.
    """

    def __init__(
        self, parent: int, synchronize: Callable[[], None], *, within_s: float = EXIT_WITHIN_S
    ) -> None:
        self._parent = parent
        self._synchronize = synchronize
        self._within_s = within_s
        self._woken = -1

    def install(self) -> None:
        """Take over from the plain kill that ``begin_child`` asked for.

        From the main thread, before the device is used. Ends the process at once if the parent has
        ended meanwhile.
        """
        self._woken, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(writing, False)
        threading.Thread(target=self._watch, name="device-exit", daemon=True).start()
        signal.signal(signal.SIGTERM, self._on_signal)
        # The interpreter writes here from its own C handler, also while Python code cannot run.
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        die_with_parent(self._parent, signal.SIGTERM)

    @property
    def is_abandoned(self) -> bool:
        """Whether the parent has ended.

        While it lives a SIGTERM means nothing: a service manager sends it to the whole group, and
        the launcher alone knows how to end. The kernel gives a process its new parent before it
        sends the signal.
        """
        return os.getppid() != self._parent

    def finish(self) -> None:
        """Wait for the device before this process ends by itself.

        Ends it at once if that takes longer than it may.
        """
        guard = threading.Timer(self._within_s, os._exit, (EXIT_ABANDONED,))
        guard.daemon = True
        guard.start()
        self._wait_for_device()
        guard.cancel()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_abandoned:
            self._end()

    def _end(self) -> None:
        self._wait_for_device()
        os._exit(EXIT_ABANDONED)

    def _wait_for_device(self) -> None:
        try:
            self._synchronize()
        except Exception:
            # A device in a fault answers so; the process ends all the same.
            log.exception("the device does not finish what was launched")

    def _watch(self) -> None:
        while os.read(self._woken, 1):
            if self.is_abandoned:
                threading.Event().wait(self._within_s)
                os._exit(EXIT_ABANDONED)
