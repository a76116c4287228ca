"""A real token from every model that can write, for those who ask whether the server works.

Goes the way of every request, from the queue to the last store of a worker. Where the requests of
others hold all slots, the steps that the models compute for these are proof enough. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from trserve.errors import RequestError
from trserve.gateway.answer import Delta
from trserve.gateway.dispatcher import Dispatcher
from trserve.gateway.generation import Generation
from trserve.gateway.health import Load
from trserve.gateway.requests import GenerationRequest
from trserve.gateway.service import Service

ANSWER_S: Final = 10.0
_LOOK_EVERY_S: Final = 0.02


class _Place:
    """Notes that the token came."""

    paused = False
    plain = None

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
    """Asks the models of one server.

    Args:
        loads: what each of them has done and has to do.
    """

    def __init__(
        self, service: Service, dispatcher: Dispatcher, loads: Callable[[], list[Load]]
    ) -> None:
        self._service = service
        self._dispatcher = dispatcher
        self._loads = loads

    async def ask(self) -> None:
        """Return once each model has written a token. Raises RequestError (503) if one has not."""
        states = self._service.states
        if states.unready is not None:
            raise self._unavailable(states.unready)
        names = self._service.model_names
        # Not those that are lost, out of reach where the server goes on, or at home with others.
        left = [model for model in range(len(names)) if states.status(model) == "up"]
        outcomes = await asyncio.gather(*map(self._ask, left), return_exceptions=True)
        for model, outcome in zip(left, outcomes, strict=True):
            name = names[model]
            if isinstance(outcome, TimeoutError):
                raise self._unavailable(f"{name} wrote no token within {ANSWER_S:g} s")
            if isinstance(outcome, RequestError):
                raise self._unavailable(f"{name} wrote no token: {outcome.message}")
            if isinstance(outcome, BaseException):
                raise outcome

    @staticmethod
    def _unavailable(message: str) -> RequestError:
        return RequestError(message, status=503, code="unavailable", retry_after=1)

    async def _ask(self, model: int) -> None:
        """Return at a token of the probe's own, or at proof that others get theirs."""
        before = self._loads()
        own = asyncio.create_task(self._own_token(self._service.model_names[model]))
        try:
            async with asyncio.timeout(ANSWER_S):
                while not own.done():
                    await asyncio.wait((own,), timeout=_LOOK_EVERY_S)
                    if self._dispatcher.num_waiting and self._works(model, before):
                        return
                while _is_refused(own) and not self._works(model, before):
                    await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            own.cancel()
        if not _is_refused(own):
            own.result()

    def _works(self, model: int, before: Sequence[Load]) -> bool:
        """Whether ``model`` computed a step since ``before``, or others did and it need not."""
        now = self._loads()
        has_stepped = [new.steps > old.steps for new, old in zip(now, before, strict=True)]
        return has_stepped[model] or (any(has_stepped) and not now[model].running)

    async def _own_token(self, name: str) -> None:
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
            (job,) = self._service.prepare_all(request, lambda index, prompt: place)
            generation = await self._dispatcher.submit(job)
            await place.ended
        finally:
            if generation is not None and not generation.ended:
                self._dispatcher.cancel(generation)


def _is_refused(own: asyncio.Task[None]) -> bool:
    """Whether too many requests wait already for the probe's own to join them."""
    error = None if own.cancelled() else own.exception()
    return isinstance(error, RequestError) and error.status == 429
