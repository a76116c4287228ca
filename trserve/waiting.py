"""Waiting for one descriptor. Knows nothing of what it is.

Not by ``select``, which fails for descriptors from 1024 on: a process that serves thousands of
connections, or embeds an engine, has those.
"""

from __future__ import annotations

import math
import select


def wait_readable(fd: int, timeout_s: float) -> bool:
    """Whether ``fd`` can be read, or its other side is gone, within ``timeout_s`` seconds."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(math.ceil(1e3 * max(0.0, timeout_s))))
