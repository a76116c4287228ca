"""What an answer has beside its text: ids, where tokens came from, log probabilities.

Collected as the answer grows and encoded when a piece of it is sent. Knows no responses and no
connections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from trserve.gateway.answer import Delta
from trserve.gateway.logprobs import Logprobs
from trserve.gateway.prompts import Prompt
from trserve.gateway.requests import GenerationRequest
from trserve.ipc.annotations import Annotation


class Extras:
    """The members that a request asked for beside its text.

    Args:
        logprobs: makes the collector of one choice, if they are wanted.
    """

    def __init__(
        self,
        request: GenerationRequest,
        model_names: Sequence[str],
        logprobs: Callable[[Prompt], Logprobs] | None = None,
    ) -> None:
        self._ids = request.return_token_ids
        self._trace = request.trace
        self._models = list(model_names)
        self._logprobs = logprobs

    def collect(self, prompt: Prompt) -> Members | None:
        """What collects them for one choice; None if nothing was asked for."""
        if not (self._ids or self._trace or self._logprobs):
            return None
        return Members(self, self._logprobs and self._logprobs(prompt))

    def encode(
        self, token_ids: list[int], sources: list[int], annotations: Sequence[Annotation]
    ) -> bytes | None:
        """JSON members of a choice, without a leading comma; None if there are none."""
        members: dict[str, Any] = {}
        if self._ids:
            members["token_ids"] = token_ids
        if self._trace:
            trace: dict[str, Any] = {"models": self._models, "source": sources}
            trace["alone"] = [annotation.alone for annotation in annotations]
            trace["handoff_us"] = [annotation.handoff_us for annotation in annotations]
            scores = [annotation.score for annotation in annotations]
            if any(score is not None for score in scores):  # else the router has none
                trace["score"] = scores
            members["trserve"] = trace
        return orjson.dumps(members)[1:-1] if members else None


class Members:
    """What one choice has beside its text, collected until it is sent."""

    def __init__(self, extras: Extras, logprobs: Logprobs | None) -> None:
        self._extras = extras
        self._logprobs = logprobs
        self._token_ids: list[int] = []
        self._sources: list[int] = []
        self._annotations: list[Annotation] = []

    def add(self, delta: Delta) -> None:
        """Take in what the answer gained."""
        self._token_ids += delta.token_ids
        self._sources += delta.sources
        self._annotations += delta.annotations
        if self._logprobs is not None:
            if delta.prompt_annotations is not None:
                self._logprobs.add_prompt(delta.prompt_annotations, last=not delta.is_of_prompt)
            self._logprobs.add(delta.token_ids, delta.annotations)

    def take(self) -> tuple[bytes | None, bytes]:
        """Extra members and the value of ``logprobs``, of what was added since the last call."""
        extra = self._extras.encode(self._token_ids, self._sources, self._annotations)
        self._token_ids, self._sources, self._annotations = [], [], []
        return extra, b"null" if self._logprobs is None else self._logprobs.take()
