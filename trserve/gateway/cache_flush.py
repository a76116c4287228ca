"""Empties the workers' prefix caches: asks through the launcher, and waits until all have done it.

Knows which models can write and whether requests are open; nothing of blocks and of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from trserve.errors import RequestError
from trserve.gateway.dispatcher import Dispatcher
from trserve.gateway.model_states import ModelStates
from trserve.ipc.control import Message

ANSWER_S: Final = 5.0
CLOSING_S: Final = 1.0
_LOOK_EVERY_S: Final = 0.005


def _nobody(message: Message) -> None:
    """There is no launcher."""


class CacheFlush:
    """One server's; whoever asks while a flush is under way waits for its own.

    Attributes:
        ask: sends a message to the launcher, which hands it to every worker.
    """

    def __init__(
        self,
        models: int,
        dispatcher: Dispatcher,
        states: ModelStates,
        ask: Callable[[Message], None] = _nobody,
    ) -> None:
        self._models = models
        self._dispatcher = dispatcher
        self._states = states
        self.ask = ask
        self._number = 0
        self._waits: dict[int, tuple[set[int], asyncio.Future[None]]] = {}

    async def flush(self) -> None:
        """Empty all caches.

        Raises:
            RequestError: 400, requests are open; 503, a worker did not do it in time.
        """
        self._check_idle()
        await self._until_closed()
        up = {n for n in range(self._models) if self._states.status(n) == "up"}
        if not up:
            return  # a worker that starts has nothing cached
        self._number += 1
        number, done = self._number, asyncio.get_running_loop().create_future()
        self._waits[number] = up, done
        self.ask({"type": "flush_cache", "number": number})
        try:
            async with asyncio.timeout(ANSWER_S):
                await done
        except TimeoutError:
            raise RequestError(
                f"a worker did not empty its cache within {ANSWER_S:g} s; try again",
                status=503,
                code="unavailable",
                retry_after=1,
            ) from None
        finally:
            del self._waits[number]

    def _check_idle(self) -> None:
        running = self._dispatcher.num_live + self._dispatcher.num_waiting
        if running:
            raise RequestError(
                f"{running} requests are running; the cache can be flushed when none is",
                code="requests_running",
            )

    async def _until_closed(self) -> None:
        """Answered requests may still hold blocks, which would be cached when they let go."""
        try:
            async with asyncio.timeout(CLOSING_S):
                while self._dispatcher.num_closing:
                    await asyncio.sleep(_LOOK_EVERY_S)
        except TimeoutError:
            self._check_idle()

    def on_message(self, message: Message) -> bool:
        """Take in a worker's answer; False if the message is about something else."""
        if message["type"] != "cache_flushed":
            return False
        left, done = self._waits.get(message["number"], (set(), None))
        left.discard(message["model"])
        if done is not None and not left and not done.done():
            done.set_result(None)
        return True
