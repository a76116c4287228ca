"""Waiting for a word that another process sets: a moment awake, then in the kernel (futex).

A sum of the ranks comes a hundred times in a step and is over in microseconds, so that going to
sleep for it at once would cost more than the sum; but a rank whose core is taken by another process
must not keep the core from the one it waits for. Every wait is bounded and has a reason; meanwhile
it is looked, twenty times a second, whether another rank has stopped the group.

Memory order. Who sets: what the word covers, ``store_fence``, the word, ``wake``. Who waits: the
word, then ``load_fence``. The kernel compares the word again before it puts anybody to sleep, with
the order that a wake-up needs, so that none is lost; the lower half of the word is what it looks
at, which is the first one on the machines that are supported (little endian).

Knows words; nothing of sums or plans.
"""

from __future__ import annotations

import ctypes
import platform
from time import monotonic
from typing import Final

from trserve.errors import StartupError
from trserve.ipc.fence import load_fence
from trserve.workers.tp.memory import GroupLostError, GroupMemory, Trouble

SHORT_SPIN: Final = 100
LONG_SPIN: Final = 1000
"""Rounds awake, some 50 ns each: where cores are short, and where every process has its own."""
WAIT_S: Final = 60.0
"""How long a rank waits for another in a step. A process that is merely slow keeps pace."""
_LOOK_NS: Final = 50_000_000
_FUTEX: Final = {"x86_64": 202, "AMD64": 202, "aarch64": 98}
_WAIT, _WAKE, _ALL = 0, 1, 0x7FFFFFFF
_HALF: Final = 0xFFFFFFFF
_FOR: Final = {
    Trouble.LATE_TO_JOIN: "to load their shares",
    Trouble.LATE_FOR_PLAN: "to come to a step",
    Trouble.LATE_FOR_SUM: "to come to a sum",
}
_libc: Final = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _futex_number() -> int:
    try:
        return _FUTEX[platform.machine()]
    except KeyError:
        raise StartupError(
            f"tensor parallelism knows no futex on {platform.machine()}; use --tp 1"
        ) from None


class Wakeup:
    """Lets others know of a word of ``memory`` that this process has set."""

    def __init__(self, memory: GroupMemory, word: int) -> None:
        # Whole arguments, made once: a call is then half as long.
        self._call = _libc.syscall
        self._arguments = (
            ctypes.c_long(_futex_number()),
            ctypes.c_void_p(memory.address(word)),
            ctypes.c_int(_WAKE),
            ctypes.c_int(_ALL),
        )

    def wake(self) -> None:
        """To be called after every change: there is no way to know who sleeps."""
        self._call(*self._arguments)


class Waiter:
    """Waits for a word of ``memory`` to reach a number.

    Args:
        spin: rounds awake before it sleeps.
        trouble: what to tell the group if it waits in vain: one of the late ones.
        timeout_s: for how long.
    """

    def __init__(
        self,
        memory: GroupMemory,
        word: int,
        *,
        spin: int,
        trouble: Trouble,
        timeout_s: float = WAIT_S,
    ) -> None:
        self._memory, self._word = memory, word
        self._rounds = range(spin)
        self._trouble, self._timeout_s = trouble, timeout_s
        self._address = ctypes.c_void_p(memory.address(word))
        self._number = ctypes.c_long(_futex_number())
        self._look = _Timespec(0, _LOOK_NS)

    def reach(self, value: int) -> None:
        """Return once the word is at least ``value``; what it covers may be read then.

        Raises:
            GroupLostError: the time is over, or another rank has stopped the group.
        """
        words, word = self._memory.words, self._word
        for _ in self._rounds:
            if words[word] >= value:
                load_fence()
                return
        self._sleep(value)
        load_fence()

    def _sleep(self, value: int) -> None:
        words, word = self._memory.words, self._word
        deadline = monotonic() + self._timeout_s
        while (seen := words[word]) < value:
            _libc.syscall(
                self._number,
                self._address,
                ctypes.c_int(_WAIT),
                ctypes.c_uint(seen & _HALF),
                ctypes.byref(self._look),
                None,
                ctypes.c_int(0),
            )
            if words[word] >= value:
                return
            self._memory.check()
            if monotonic() >= deadline:
                self._give_up()

    def _give_up(self) -> None:
        self._memory.stop(self._trouble)
        raise GroupLostError(
            f"rank {self._memory.rank} waited {self._timeout_s:g} s for the other ranks "
            f"{_FOR[self._trouble]}; one of them hangs, or the machine is far too busy"
        )
