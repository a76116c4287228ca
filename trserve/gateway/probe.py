"""A real token from every model that is not lost, for those who ask whether the server works.

Goes the way of every request, from the queue to the last store of a worker. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from trserve.errors import RequestError
from trserve.gateway.answer import Delta
from trserve.gateway.dispatcher import Dispatcher
from trserve.gateway.generation import Generation
from trserve.gateway.requests import GenerationRequest
from trserve.gateway.service import Service

ANSWER_S: Final = 10.0


class _Place:
    """Notes that the token came."""

    paused = False

    def __init__(self) -> None:
        self.usage: Callable[[], dict[str, Any]] = dict
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, delta: Delta) -> None:
        if delta.finish_reason is not None and not self.ended.done():
            self.ended.set_result(None)

    def fail(self, error: RequestError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


class Probe:
    """Asks the models of one server."""

    def __init__(self, service: Service, dispatcher: Dispatcher) -> None:
        self._service = service
        self._dispatcher = dispatcher

    async def ask(self) -> None:
        """Return once each model has written a token. Raises RequestError (503) if one has not."""
        states = self._service.states
        if states.unready is not None:
            raise self._unavailable(states.unready)
        names = self._service.model_names
        left = [name for model, name in enumerate(names) if model not in states.lost]
        for name, outcome in zip(
            left,
            await asyncio.gather(*map(self._ask, left), return_exceptions=True),
            strict=True,
        ):
            if isinstance(outcome, TimeoutError):
                raise self._unavailable(f"{name} wrote no token within {ANSWER_S:g} s")
            if isinstance(outcome, RequestError):
                raise self._unavailable(f"{name} wrote no token: {outcome.message}")
            if isinstance(outcome, BaseException):
                raise outcome

    @staticmethod
    def _unavailable(message: str) -> RequestError:
        return RequestError(message, status=503, code="unavailable", retry_after=1)

    async def _ask(self, name: str) -> None:
        request = GenerationRequest(
            kind="completion",
            prompts=[[0]],
            only=name,
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            record=False,
        )
        place = _Place()
        generation: Generation | None = None
        try:
            async with asyncio.timeout(ANSWER_S):
                (job,) = self._service.prepare_all(request, lambda index, prompt: place)
                generation = await self._dispatcher.submit(job)
                await place.ended
        finally:
            if generation is not None and not generation.ended:
                self._dispatcher.cancel(generation)
