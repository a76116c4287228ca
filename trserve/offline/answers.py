"""Answers as a program gets them: whole, or in parts. Knows no slab, threads or HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trserve.gateway.answer import Delta
from trserve.gateway.logprobs import TokenNames
from trserve.gateway.prompts import Prompt
from trserve.gateway.requests import GenerationRequest
from trserve.ipc.annotations import Annotation


class TokenLogprob(NamedTuple):
    """A token's log probability, before temperature, penalties and biases.

    Attributes:
        token: the token's text, or ``bytes:\\xe2...`` where it is a part of a character.
        top: the most probable ids with theirs, falling; as many as were asked for.
    """

    token_id: int
    token: str
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True, slots=True)
class Part:
    """What an answer gained, once its tokens were final.

    Attributes:
        sources: index of the model that wrote each of ``token_ids``.
        finish_reason: ``stop``, ``length`` or ``abort`` in the last part of the answer, else None.
        stop_reason: the stop string or id that ended it.
        index: of the answer, as in :class:`Completion`.
        logprobs, prompt_logprobs, scores: as in :class:`Completion`, of these tokens; the
            prompt's come with the first part.
        usage: in the last part.
    """

    text: str
    token_ids: list[int]
    sources: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    index: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    scores: list[float | None] | None = None
    usage: dict[str, Any] | None = None


@dataclass(frozen=True)
class Completion:
    """A whole answer.

    Attributes:
        text: with ``echo``, it begins with the prompt's.
        token_ids: [N], without the prompt's.
        sources: [N], index of the model that wrote each token.
        finish_reason: ``stop``, ``length`` or ``abort``.
        stop_reason: the stop string or id that ended it, or None.
        usage: what the HTTP response calls usage, of this answer.
        index: the answer's place in the call: those of a prompt stand side by side, in the order
            of the prompts; with ``n`` answers each, ``index // n`` is the prompt.
        prompt_token_ids: [P].
        logprobs: [N] with ``logprobs``, else None; the same for texts and chats.
        prompt_logprobs: [P] with ``logprobs`` and ``echo``, else None; the first is None, because
            it follows nothing.
        scores: [N] with ``trserve={"trace": True}``, else None; what the router decided on, None
            where it had nothing to decide.
        request_id: the key of its record; None where it is not recorded.
    """

    text: str
    token_ids: list[int]
    sources: list[int]
    finish_reason: str
    stop_reason: str | int | None
    usage: dict[str, Any]
    index: int = 0
    prompt_token_ids: Sequence[int] = ()
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    scores: list[float | None] | None = None
    request_id: str | None = None


class Choice:
    """The sink of one answer; keeps what is needed to make its parts, and the whole of them.

    Args:
        give: called with this and what came, in the gateway's thread.

    Attributes:
        record_id: the request's number within the run, once it has a slot.
        ended: the last part was made.
    """

    paused = False
    plain = None
    """The queue behind ``give`` is unbounded; the row that it mirrors is not."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        request: GenerationRequest,
        names: TokenNames,
        give: Callable[[Choice, Delta | Exception], None],
    ) -> None:
        self.usage: Callable[[], dict[str, Any]] = dict
        self.request = request
        self.record_id = 0
        self.ended = False
        self._index = index
        self._prompt = prompt
        self._names = names
        self._give = give
        self._parts: list[Part] = []
        self._scores: list[Annotation] = []

    def take(self, delta: Delta) -> None:
        """Pass on what came, all of the prompt's annotations with the first tokens."""
        if delta.prompt_annotations is not None:
            self._scores += delta.prompt_annotations
            if delta.is_of_prompt:
                return
            delta = delta._replace(prompt_annotations=self._scores)
        self._give(self, delta)

    def fail(self, error: Exception) -> None:
        """Pass on that nothing more will come."""
        self._give(self, error)

    @property
    def num_tokens(self) -> int:
        """Tokens in the parts so far."""
        return sum(len(part.token_ids) for part in self._parts)

    def part(self, delta: Delta) -> Part:
        """What the program gets of ``delta``."""
        request = self.request
        echo = request.echo and not self._parts
        self.ended = delta.finish_reason is not None
        wants = request.logprobs is not None
        part = Part(
            self._prompt.text + delta.text if echo else delta.text,
            delta.token_ids,
            delta.sources,
            delta.finish_reason,
            delta.stop_reason,
            self._index,
            self._logprobs(delta.token_ids, delta.annotations) if wants else None,
            self._prompt_logprobs(delta.prompt_annotations) if wants else None,
            [annotation.score for annotation in delta.annotations] if request.trace else None,
            self.usage() if self.ended else None,
        )
        self._parts.append(part)
        return part

    def _logprobs(
        self, tokens: Sequence[int], annotations: Sequence[Annotation]
    ) -> list[TokenLogprob]:
        return [
            TokenLogprob(
                token,
                self._names.name(token),
                annotation.logprob,
                dict(zip(annotation.top_ids, annotation.top_logprobs, strict=True)),
            )
            for token, annotation in zip(tokens, annotations, strict=True)
        ]

    def _prompt_logprobs(
        self, annotations: Sequence[Annotation] | None
    ) -> list[TokenLogprob | None] | None:
        if annotations is None:
            return None
        return [None, *self._logprobs(self._prompt.ids[1 : 1 + len(annotations)], annotations)]

    def whole(self, request_id: str | None) -> Completion:
        """The answer, once it has ended."""
        last = self._parts[-1]
        assert last.finish_reason is not None and last.usage is not None
        return Completion(
            text="".join(part.text for part in self._parts),
            token_ids=[token for part in self._parts for token in part.token_ids],
            sources=[source for part in self._parts for source in part.sources],
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            usage=last.usage,
            index=self._index,
            prompt_token_ids=self._prompt.ids,
            logprobs=_joined([part.logprobs for part in self._parts]),
            prompt_logprobs=_joined([part.prompt_logprobs for part in self._parts]),
            scores=_joined([part.scores for part in self._parts]),
            request_id=request_id,
        )


def _joined(parts: Sequence[list[Any] | None]) -> list[Any] | None:
    given = [part for part in parts if part is not None]
    return [each for part in given for each in part] if given else None
