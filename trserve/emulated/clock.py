"""Waiting until a moment, to within microseconds. Knows no steps and no models.

A sleep alone ends late: by the kernel's timer slack (50 us unless told otherwise) and by the time
that waking takes. So the slack is set to its least, the sleep ends a little before the moment, and
the rest is spun.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Final

SPIN_NS: Final = 300_000
"""The end of each wait that is spun. Half of it is for waking: up to 0.1 ms after a long sleep on a
virtual core. The other half is for warming up: 0.07 ms with nothing in the caches."""

BEAT_EVERY_NS: Final = 250_000_000
"""A longer wait gives signs of life so often."""

_PR_SET_TIMERSLACK: Final = 29
_NS: Final = 1e-9
_libc = ctypes.CDLL(None, use_errno=True)


def set_timer_slack(slack_ns: int = 1) -> None:
    """How late the kernel may wake this thread. OSError where it cannot be told."""
    if _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(slack_ns), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_TIMERSLACK): {os.strerror(error)}")


def wait_until(
    deadline_ns: int, beat: Callable[[], None], warm_up: Callable[[], None] | None = None
) -> None:
    """Return at ``deadline_ns`` of ``time.monotonic_ns``, at once where it has passed.

    ``beat`` is called before each sleep, of which a long wait has several; ``warm_up`` once, when
    the last sleep is over: it must take less than what is spun.
    """
    now = time.monotonic_ns
    while (rest := deadline_ns - SPIN_NS - now()) > 0:
        beat()
        time.sleep(min(rest, BEAT_EVERY_NS) * _NS)
    if warm_up is not None and rest > -SPIN_NS // 2:
        warm_up()
    while now() < deadline_ns:
        pass
