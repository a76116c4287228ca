"""Work that something else may end before it is done, and a response that then ends as a whole one.

Knows no requests, no groups and no drains: who calls says what ends the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final

from trserve.errors import RequestError
from trserve.gateway.replies import Message, Receive, Send

LAST_WORD_S: Final = 1.0
"""How long a client may take to make room for the end of its response."""


async def unless(ended: Awaitable[object], work: Awaitable[None]) -> bool:
    """Do ``work`` unless ``ended`` is over before: then it is cancelled. Whether it was done."""
    task, other = asyncio.ensure_future(work), asyncio.ensure_future(ended)
    try:
        await asyncio.wait((task, other), return_when=asyncio.FIRST_COMPLETED)
        if is_done := task.done():
            task.result()
        return is_done
    finally:
        for each in (task, other):
            each.cancel()
        await asyncio.gather(task, other, return_exceptions=True)


async def left(receive: Receive) -> None:
    """Return once the client is gone. What is still to come of a body is thrown away."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Watched:
    """A response that may be ended between any two of its messages."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = self._ended = False

    async def send(self, message: Message) -> None:
        """The next message of it."""
        await self._send(message)
        self._begun = True
        is_body = message["type"] == "http.response.body"
        self._ended = is_body and not message.get("more_body", False)

    async def end(self) -> None:
        """End it where it is. RequestError (503) if it has not begun."""
        if not self._begun:
            raise RequestError("the server is shutting down", status=503, retry_after=1)
        if not self._ended:
            async with asyncio.timeout(LAST_WORD_S):
                await self._send({"type": "http.response.body", "body": b""})
