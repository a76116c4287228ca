"""Where work for a request is done: on the event loop if it is short, beside it if it may be long.

How long it may be is told from the bytes of its body alone: text, tools, ids and the number of
messages all come out of these. Knows nothing of what the work is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

LONG_BODY_BYTES: Final = 10_000
_T = TypeVar("_T")


async def do(body_bytes: int, work: Callable[[], _T], *, long: bool = False) -> _T:
    """What ``work`` returns for a body of so many bytes; it may run on another thread.

    ``long``: it may take long whatever the body's length.
    """
    if long or body_bytes > LONG_BODY_BYTES:
        return await asyncio.to_thread(work)
    return work()
