"""Log probabilities as OpenAI's two routes show them.

Knows annotations, the text of tokens and the shapes of JSON; nothing of slots or sockets. Values
are those of the raw distribution over the tokenizer's ids, always finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, Final

import orjson

from trserve.gateway.detokenizer import Detokenizer
from trserve.gateway.tokenizer import Tokenizer
from trserve.ipc.annotations import Annotation

_COLUMNS: Final = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class TokenNames:
    """What a token is called: its text, or its bytes where they are no whole text.

    Two tokens of different bytes never share a name, so that they can be keys of one object.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._table = tokenizer.token_bytes()

    def bytes_of(self, token: int) -> bytes:
        """The token's bytes; those of its text where a token has no bytes of its own."""
        if self._table is not None and token < len(self._table):
            return self._table[token]
        return self._tokenizer.decode([token], skip_special_tokens=False).encode()

    def name(self, token: int) -> str:
        """The token's text; ``bytes:\\xe2\\x80`` for a part of a character, as OpenAI writes it."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatLogprobs:
    """The entries of one choice of a chat, collected until they are sent."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._content: list[dict[str, Any]] = []

    def add(self, tokens: Iterable[int], annotations: Iterable[Annotation]) -> None:
        """Take in what was committed."""
        for token, annotation in zip(tokens, annotations, strict=True):
            tops = zip(annotation.top_ids, annotation.top_logprobs, strict=True)
            entry = self._entry(token, annotation.logprob)
            entry["top_logprobs"] = [self._entry(*top) for top in tops]
            self._content.append(entry)

    def add_prompt(self, annotations: Sequence[Annotation], *, last: bool) -> None:
        """A chat never repeats its prompt."""
        raise AssertionError("echo is no parameter of a chat")

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._names.bytes_of(token)
        return {"token": self._names.name(token), "logprob": logprob, "bytes": list(raw)}

    def take(self) -> bytes:
        """JSON of what was collected since the last call."""
        content, self._content = self._content, []
        return orjson.dumps({"content": content, "refusal": None})


class CompletionLogprobs:
    """The parallel arrays of one choice of a completion, collected until they are sent.

    ``text_offset`` counts characters from the start of the choice's text; a token that begins
    within a character has the offset of that character.

    Args:
        detokenizer: a fresh one, for the text of the same choice.
        echoed: the prompt's ids, if the text begins with the prompt.
    """

    def __init__(
        self, names: TokenNames, detokenizer: Detokenizer, echoed: Sequence[int] = ()
    ) -> None:
        self._names = names
        self._echoed = echoed
        self._num_echoed = 0
        self._detokenizer = detokenizer
        self._offset = 0
        self._encoded: tuple[list[bytes], ...] = ()
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, tokens: Sequence[int], annotations: Iterable[Annotation]) -> None:
        """Take in what was committed."""
        for token, annotation in zip(tokens, annotations, strict=True):
            self._add(token, annotation.logprob, self._top(token, annotation))

    def add_prompt(self, annotations: Sequence[Annotation], *, last: bool) -> None:
        """Take in the prompt's tokens, as many as have ``annotations``, or all that are left.

        The first of them follows nothing and has no value.
        """
        values = annotations if self._num_echoed else [None, *annotations]
        end = None if last else self._num_echoed + len(values)
        tokens = self._echoed[self._num_echoed : end]
        self._num_echoed += len(tokens)
        for token, annotation in zip_longest(tokens, values):
            if annotation is None:
                self._add(token, None, None)
            else:
                self._add(token, annotation.logprob, self._top(token, annotation))
        if not last:
            self._encode()

    def _add(self, token: int, logprob: float | None, tops: dict[str, float] | None) -> None:
        self._tokens.append(self._names.name(token))
        self._logprobs.append(logprob)
        self._tops.append(tops)
        self._offsets.append(self._offset)
        self._offset += len(self._detokenizer.push(token))

    def _top(self, token: int, annotation: Annotation) -> dict[str, float]:
        """By name, the chosen token included; of two ids with one name the more probable counts."""
        found: dict[str, float] = {}
        for top, logprob in zip(annotation.top_ids, annotation.top_logprobs, strict=True):
            found.setdefault(self._names.name(top), logprob)
        name = self._names.name(token)
        found[name] = max(annotation.logprob, found.get(name, annotation.logprob))
        return found

    @property
    def _columns(self) -> tuple[Sequence[Any], ...]:
        return self._tokens, self._logprobs, self._tops, self._offsets

    def _encode(self) -> None:
        """Make bytes of what was collected, so that all of it need not be encoded at once."""
        self._encoded = self._encoded or ([], [], [], [])
        for parts, column in zip(self._encoded, self._columns, strict=True):
            parts.append(orjson.dumps(column)[1:-1])
        self._clear()

    def take(self) -> bytes:
        """JSON of what was collected since the last call."""
        columns: Sequence[Any] = self._columns
        if self._encoded:
            if self._tokens:
                self._encode()
            columns = [orjson.Fragment(b"[%b]" % b",".join(parts)) for parts in self._encoded]
            self._encoded = ()
        self._clear()
        return orjson.dumps(dict(zip(_COLUMNS, columns, strict=True)))


Logprobs = ChatLogprobs | CompletionLogprobs
