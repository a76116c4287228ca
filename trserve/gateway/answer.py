"""One answer as it grows: committed tokens in, text out, until it ends.

Knows no slab, no HTTP and no JSON. Stop strings are found here, in token order: the first match
fixes the answer, and whatever was committed beyond it is overshoot that nobody sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from trserve.errors import RequestError
from trserve.gateway.detokenizer import Detokenizer
from trserve.gateway.stop_strings import StopMatcher
from trserve.ipc.annotations import Annotation
from trserve.ipc.baton import Finish

TIMED_OUT: Final = "timeout"
"""The ``stop_reason`` of an answer that took longer than its request allows."""

ABORTED: Final = "abort_request"
"""The ``stop_reason`` of an answer that somebody asked to end."""

_FAILURES = {
    Finish.ROUTER_ERROR: ("the router failed for this request", "router_error", 500),
    Finish.NUMERIC_ERROR: ("a model's logits were not finite", "numeric_error", 500),
    Finish.WORKER_LOST: ("the process of a model ended", "worker_lost", 503),
    Finish.WORKER_CRASHED: (
        "this request ended the process of a model twice; it is not tried again",
        "worker_crashed",
        500,
    ),
}


_BARRED = (
    "the answer cannot go on in the form that the request asks for: no token may follow by its "
    "schema, expression or grammar, or following that takes too long; ask for a simpler form, and "
    "make rules of a grammar that repeat themselves unambiguous"
)


def failure(finish: Finish, *, barred: bool = False) -> RequestError | None:
    """The error that ``finish`` means for the client, or None.

    ``barred``: what looks like a numeric error is the doing of the request's own grammar.
    """
    if finish not in _FAILURES:
        return None
    if barred:
        return RequestError(_BARRED, code="grammar_failed")
    message, code, status = _FAILURES[finish]
    return RequestError(message, status=status, code=code)


class Delta(NamedTuple):
    """What an answer gained: its text, its token ids, and the model that wrote each.

    ``annotations`` has one entry a token where they were asked for, and ``prompt_annotations`` one
    for each token of the prompt but the first. Of a long prompt they come in several parts, the
    last of them with the answer's first tokens, or its end.
    """

    text: str
    token_ids: list[int]
    sources: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    annotations: Sequence[Annotation] = ()
    prompt_annotations: Sequence[Annotation] | None = None

    @property
    def is_of_prompt(self) -> bool:
        """Whether it is a part of the prompt's annotations, and not the last."""
        return not self.token_ids and self.finish_reason is None


class Answer:
    """Text, counts and the end of one choice.

    Args:
        min_tokens: a stop string that ends in the text of the first so many ends nothing.
        shows_end: the token that ends the request has a text as any other.

    Attributes:
        num_tokens: completion tokens so far; after the end, those that count.
        counts: completion tokens by model.
        finish_reason: ``stop``, ``length`` or ``abort``; None while it grows.
        abort_reason: the ``stop_reason`` of an abort that its client sees.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopMatcher,
        stop_token_ids: Sequence[int],
        num_models: int,
        *,
        min_tokens: int = 0,
        shows_end: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._is_plain = not stops.searches
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._shows_end = shows_end
        self.num_tokens = 0
        self.counts = [0] * num_models
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.abort_reason = TIMED_OUT

    @property
    def is_plain(self) -> bool:
        """Whether no text can end it, so that :meth:`push_one` will do for most tokens."""
        return self._is_plain

    def push_one(self, token: int, source: int) -> str:
        """:meth:`push` of one token that is not the last; its text. For a plain answer."""
        self.num_tokens += 1
        self.counts[source] += 1
        return self._detokenizer.push(token)

    def push(self, tokens: Sequence[int], sources: Sequence[int], finish: Finish) -> Delta:
        """Take in newly committed tokens; ``finish`` is not NONE if they are the last."""
        texts: list[str] = []
        taken = 0
        for token, source in zip(tokens, sources, strict=True):
            taken += 1
            self.num_tokens += 1
            self.counts[source] += 1
            if finish is Finish.STOP and taken == len(tokens) and not self._shows_end:
                break  # the token that ends the request counts, and has no text
            if self._emit(self._detokenizer.push(token), texts):
                break
        if finish is not Finish.NONE and self.finish_reason is None:
            self._end(finish, tokens, texts)
        return Delta(
            "".join(texts),
            list(tokens[:taken]),
            list(sources[:taken]),
            self.finish_reason,
            self.stop_reason,
        )

    def _emit(self, text: str, texts: list[str]) -> bool:
        """Show ``text`` as far as stop strings allow; True if one of them matched."""
        if self._is_plain:
            texts.append(text)
            return False
        shown, matched = self._stops.push(text, may_end=self.num_tokens > self._min_tokens)
        texts.append(shown)
        if matched is None:
            return False
        self.finish_reason, self.stop_reason = "stop", matched
        return True

    def _end(self, finish: Finish, tokens: Sequence[int], texts: list[str]) -> None:
        if self._emit(self._detokenizer.flush(), texts):
            return
        texts.append(self._stops.flush())
        if finish is Finish.STOP:
            self.finish_reason = "stop"
            last = tokens[-1] if tokens else None
            self.stop_reason = last if last in self._stop_token_ids else None
        elif finish is Finish.LENGTH:
            self.finish_reason = "length"
        else:  # whoever left is told nothing: this is the time limit's, or was asked for
            self.finish_reason, self.stop_reason = "abort", self.abort_reason
