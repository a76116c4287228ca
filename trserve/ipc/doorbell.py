"""Doorbells: one eventfd per consumer. Knows nothing of what a ring of the bell means.

The bell is written always. A flag "the consumer is asleep" would be a store–load race: both sides
can miss each other even on x86-64. A write costs less than half a microsecond.
"""

from __future__ import annotations

import os


def create_doorbell() -> int:
    """A fresh doorbell; returns its descriptor."""
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def ring(fd: int) -> None:
    """Wake the consumer, or keep it from falling asleep."""
    os.eventfd_write(fd, 1)


def silence(fd: int) -> bool:
    """Take back all rings so far; True if there were any.

    To be called *before* the rings are drained: what is published after the call rings again.
    """
    try:
        os.eventfd_read(fd)
    except BlockingIOError:
        return False
    return True
