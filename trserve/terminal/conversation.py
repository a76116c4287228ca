"""A conversation with a server: what is sent, and which model wrote which piece of an answer.

Knows the chat API; no terminal.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from trserve.terminal.client import Client, ServerError

CHAT: Final = "/v1/chat/completions"
_SILENCE_S: Final = 600.0
"""A first token may wait in a queue for long; past this the server is taken for dead."""


class Piece(NamedTuple):
    """Text of one model's, in the order in which it was written.

    ``model`` is an index among the server's, None where the server does not say; ``score`` and
    ``handoff_us`` are those of its first token; ``thought`` is text before the answer itself.
    """

    text: str
    model: int | None
    score: float | None = None
    handoff_us: int | None = None
    thought: bool = False


@dataclass
class Settings:
    """What a chat's requests have in common; None and nothing stand for the server's defaults."""

    model: str | None = None
    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    only: str | None = None
    router: dict[str, float] = field(default_factory=dict)


@dataclass
class Answer:
    """One answer as it came.

    Attributes:
        usage: the server's, None until the end; ``finish_reason`` likewise.
        first_s, total_s: seconds from the question to the first piece and to the end.
        stopped: whether the user wanted no more of it.
    """

    question: str
    router: dict[str, float]
    pieces: list[Piece] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    finish_reason: str | None = None
    first_s: float | None = None
    total_s: float = 0.0
    stopped: bool = False

    @property
    def text(self) -> str:
        """The answer itself, without thoughts."""
        return "".join(piece.text for piece in self.pieces if not piece.thought)


class Conversation:
    """Questions and answers, the ones before sent with each.

    Args:
        about: what the server says of its models and its router.
    """

    def __init__(self, client: Client, about: dict[str, Any], settings: Settings) -> None:
        self._client = client
        self.about = about
        self.settings = settings
        self.answers: list[Answer] = []
        self._messages: list[dict[str, str]] = []

    @property
    def models(self) -> list[str]:
        """Their names, the first one first."""
        return [model["name"] for model in self.about["models"]]

    @property
    def parameters(self) -> list[dict[str, Any]]:
        """The router's that a request may set."""
        found: list[dict[str, Any]] = self.about["router"]["parameters"]
        return found

    def clear(self) -> None:
        """Begin again; what was said stays in ``answers``."""
        self._messages.clear()

    def ask(self, question: str) -> Generator[Piece, None, None]:
        """The pieces of an answer as they come. Raises ServerError; closing it stops the answer.

        Only an answer that has something in it is remembered, with its question.
        """
        answer = Answer(question, dict(self.settings.router))
        began = time.monotonic()
        stream = self._client.events("POST", CHAT, self._body(question), _SILENCE_S)
        try:
            with closing(stream):
                for event in stream:
                    for piece in _take(event, answer):
                        if answer.first_s is None:
                            answer.first_s = time.monotonic() - began
                        answer.pieces.append(piece)
                        yield piece
        finally:
            answer.total_s = time.monotonic() - began
            answer.stopped = answer.finish_reason is None
            self._remember(answer)

    def _remember(self, answer: Answer) -> None:
        if not answer.pieces:
            return
        self.answers.append(answer)
        self._messages += [
            {"role": "user", "content": answer.question},
            {"role": "assistant", "content": answer.text},
        ]

    def _body(self, question: str) -> dict[str, Any]:
        settings = self.settings
        system = [{"role": "system", "content": settings.system}] if settings.system else []
        own: dict[str, Any] = {"trace": True}
        if settings.router:
            own["router"] = settings.router
        if settings.only:
            own["only"] = settings.only
        body: dict[str, Any] = {
            "model": settings.model or self.about["served_models"][0],
            "messages": [*system, *self._messages, {"role": "user", "content": question}],
            "stream": True,
            "stream_options": {"include_usage": True},
            # The texts of single tokens, to tell who wrote which where a chunk has several.
            "logprobs": True,
            "trserve": own,
        }
        given = {"max_tokens": settings.max_tokens, "temperature": settings.temperature}
        return body | {name: value for name, value in given.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        """Everything that was said, with who wrote it."""
        return {
            "schema_version": 1,
            "url": self._client.url,
            "models": self.models,
            "router": self.about["router"]["name"],
            "system": self.settings.system,
            "answers": [
                {
                    "question": answer.question,
                    "answer": answer.text,
                    "router": answer.router,
                    "finish_reason": answer.finish_reason,
                    "stopped": answer.stopped,
                    "first_s": answer.first_s,
                    "total_s": answer.total_s,
                    "usage": answer.usage,
                    "pieces": [piece._asdict() for piece in answer.pieces],
                }
                for answer in self.answers
            ],
        }


def _take(event: dict[str, Any], answer: Answer) -> list[Piece]:
    """The pieces of one event; what it says of the whole goes to ``answer``."""
    answer.usage = event.get("usage") or answer.usage
    if not event.get("choices"):
        return []
    choice = event["choices"][0]
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    delta, trace = choice["delta"], choice.get("trserve") or {}
    thought = delta.get("reasoning_content") or delta.get("reasoning")
    text = thought or delta.get("content") or ""
    if not text:
        return []
    tokens = [each["token"] for each in (choice.get("logprobs") or {}).get("content") or ()]
    last = answer.pieces[-1].model if answer.pieces else None
    return split(text, trace, tokens, last, thought=bool(thought))


def split(
    text: str,
    trace: dict[str, Sequence[Any]],
    tokens: Sequence[str],
    last: int | None,
    *,
    thought: bool = False,
) -> list[Piece]:
    """``text`` of one event by who wrote it.

    Args:
        trace: the event's member ``trserve``: ``source``, ``score``, ``handoff_us`` by token.
        tokens: the texts of these tokens, where they are known.
        last: whose the text before was: a text that was held back has no token of its own here.
    """
    sources = trace.get("source") or ()
    if len(set(sources)) < 2:
        sources, tokens = sources[:1], [text]
    pieces: list[Piece] = []
    rest = text
    for index, (source, token) in enumerate(zip(sources, tokens, strict=False)):
        if not token or not rest.startswith(token):
            break
        score, handoff_us = _at(trace, "score", index), _at(trace, "handoff_us", index)
        pieces.append(Piece(token, source, score, handoff_us, thought))
        rest = rest[len(token) :]
    if rest:
        # Halves of characters, or text that waited: the last writer's, as near as one can tell.
        pieces.append(Piece(rest, sources[-1] if sources else last, thought=thought))
    return pieces


def _at(trace: dict[str, Sequence[Any]], name: str, index: int) -> Any:
    values = trace.get(name) or ()
    return values[index] if index < len(values) else None


def require_model(conversation: Conversation, name: str) -> str:
    """``name``, if the server has such a model. Raises ServerError, which lists them."""
    if name not in conversation.models:
        raise ServerError(f"no model {name}; there are: {', '.join(conversation.models)}")
    return name
