"""One call to an engine: all of its requests, and what comes of them, for the thread that waits.

Knows no options and no event loop.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from types import TracebackType

from trserve.gateway.answer import Delta
from trserve.gateway.generation import Generation
from trserve.gateway.prompts import Prompt
from trserve.gateway.requests import GenerationRequest
from trserve.offline.answers import Choice, Completion, Part
from trserve.offline.session import LIVENESS_S, Session


class Call:
    """A context in which requests are answered; leaving it ends those that still go on.

    Args:
        run: the name under which the instance records, if it does.
    """

    def __init__(self, session: Session, run: str | None) -> None:
        self._session = session
        self._run = run
        self._inbox: queue.SimpleQueue[tuple[Choice, Delta | Exception]] = queue.SimpleQueue()
        self._choices: list[Choice] = []
        self._generations: list[Generation] = []

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestError as :meth:`begin` would; nothing is sent or kept."""
        service = self._session.service
        service.prepare_all(
            request,
            lambda index, prompt: Choice(index, prompt, request, service.token_names, _nobody),
        )

    def begin(self, request: GenerationRequest) -> None:
        """Send one more request; waits while there are too few slots.

        Raises RequestError, EngineError.
        """
        service, first = self._session.service, len(self._choices)

        def choice(index: int, prompt: Prompt) -> Choice:
            made = Choice(first + index, prompt, request, service.token_names, self._give)
            self._choices.append(made)
            return made

        generations = self._session.submit(service.prepare_all(request, choice))
        for made, generation in zip(self._choices[first:], generations, strict=True):
            made.record_id = generation.slot.gen
        self._generations += generations

    def _give(self, choice: Choice, what: Delta | Exception) -> None:
        self._inbox.put((choice, what))

    def parts(self) -> Iterator[Part]:
        """The parts of all answers as they come, until each has ended. Raises as ``begin``."""
        left = len(self._choices)
        while left:
            choice, found = self._next()
            if isinstance(found, Exception):
                raise self._session.translated(found)
            part = choice.part(found)
            if choice.ended:
                left -= 1
                self._note_end(choice, part.finish_reason or "left")
            yield part

    def _next(self) -> tuple[Choice, Delta | Exception]:
        while True:
            try:
                return self._inbox.get(timeout=LIVENESS_S)
            except queue.Empty:
                self._session.check()

    def wholes(self) -> list[Completion]:
        """All answers, once every one has ended. Raises as ``begin``."""
        for _ in self.parts():
            pass
        return [choice.whole(self._request_id(choice)) for choice in self._choices]

    def _request_id(self, choice: Choice) -> str | None:
        return f"{self._run}:{choice.record_id}" if self._recorded(choice) else None

    def _recorded(self, choice: Choice) -> bool:
        return self._run is not None and choice.request.record

    def _note_end(self, choice: Choice, finish: str) -> None:
        ends = self._session.ends
        if ends is not None and self._recorded(choice):
            ends.add(choice.record_id, choice.num_tokens, finish)

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End what is not over; what was given of it until now is what its record keeps."""
        left: Sequence[Choice] = [choice for choice in self._choices if not choice.ended]
        if not left:
            return
        self._session.cancel(self._generations)
        for choice in left:
            if choice.record_id:
                self._note_end(choice, "left")


def _nobody(choice: Choice, what: Delta | Exception) -> None:
    """There is no answer to a request that is only checked."""
