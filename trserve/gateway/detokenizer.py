"""Token ids to text, one token at a time, for one stream.

Emits exactly the text of the tokens pushed, never a part of a character. Knows nothing of stop
strings, HTTP or models.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trserve.gateway.token_bytes import strip_leading

if TYPE_CHECKING:
    from trserve.gateway.tokenizer import Tokenizer

_CONTEXT_TOKENS = 8
"""Prompt tokens that a context dependent decoder sees before the first token of the output."""
_MAX_PENDING = 4
"""Tokens held back at most: a UTF-8 character has four bytes, so more cannot complete one."""
_REPLACEMENT = "\ufffd"

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one stream, token by token; O(1) a token whatever the length.

    With a table of bytes the text is the UTF-8 of the pushed tokens' bytes: each push returns what
    became complete, an incomplete character waits, invalid bytes become U+FFFD as in a decoding of
    the whole. Without one, the text is how a window of tokens decodes, less its context.

    Nothing of the prompt is ever returned, not even a character that it left unfinished.

    Args:
        tokenizer: of the model whose ids are pushed.
        prompt_ids: the prompt; only its end is looked at.
        skip_special_tokens: leave special tokens out of the text.
    """

    __slots__ = ("_hidden", "_impl", "_pieces", "_waiting")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        pieces = tokenizer.token_texts
        self._pieces: Sequence[str | bytes] = pieces or ()
        self._impl: _ByteTail | _Window
        if pieces is None:
            context = [int(i) for i in prompt_ids[-_CONTEXT_TOKENS:] if i not in self._hidden]
            self._impl = _Window(tokenizer, context)
        else:
            strip = tokenizer.leading_strip
            if strip and any(i not in self._hidden for i in reversed(prompt_ids)):
                strip = 0  # the answer follows text
            self._impl = _ByteTail(pieces, strip)
        # While True, a push may not take the short way: bytes or the first text are pending.
        self._waiting = self._impl.waiting

    def push(self, token_id: int) -> str:
        """Text that ``token_id`` completes; often empty. Ids past the vocabulary have no text."""
        if token_id in self._hidden:
            return ""
        if not self._waiting and token_id < len(self._pieces):
            piece = self._pieces[token_id]
            if type(piece) is str:
                return piece
        text = self._impl.push(token_id)
        self._waiting = self._impl.waiting
        return text

    def flush(self) -> str:
        """What was held back, at the end of the stream; an unfinished character is U+FFFD."""
        return self._impl.flush()


class _ByteTail:
    """Bytes of which the last may be an unfinished character; the slow path of the table."""

    __slots__ = ("_decoder", "_leading_strip", "_pieces", "waiting")

    def __init__(self, pieces: Sequence[str | bytes], leading_strip: int) -> None:
        self._pieces = pieces
        # Made for the first token that is no whole text: few streams have one.
        self._decoder: codecs.IncrementalDecoder | None = None
        self._leading_strip = leading_strip
        self.waiting = leading_strip > 0

    def push(self, token_id: int) -> str:
        if self._decoder is None:
            self._decoder = _new_utf8_decoder("replace")
        piece = self._pieces[token_id] if token_id < len(self._pieces) else b""
        text = self._decoder.decode(piece.encode() if isinstance(piece, str) else piece)
        if self._leading_strip and text:
            text = self._strip(text)
        self.waiting = self._leading_strip > 0 or bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        return "" if self._decoder is None else self._decoder.decode(b"", final=True)

    def _strip(self, text: str) -> str:
        """Counts down over pushes, as the spaces may come as a token each."""
        stripped = strip_leading(text, self._leading_strip)
        self._leading_strip = 0 if stripped else self._leading_strip - len(text)
        return stripped


class _Window:
    """Decodes a few tokens behind a few already shown ones, and returns what came after those.

    ``_context`` begins at a character's first byte and, but for the prompt's tokens, is what the
    previous text was emitted from, so that joining rules at the seam (a space, a dropped prefix)
    are applied as in the whole text.
    """

    __slots__ = ("_context", "_pending", "_shown", "_tokenizer")

    waiting = True  # there is no shorter way

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []
        self._context = context
        self._shown = self._decode(context)
        while self._shown.startswith(_REPLACEMENT):
            self._context = self._context[1:]
            self._shown = self._decode(self._context)

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._new_text()
        grows = bool(text) and not text.endswith(_REPLACEMENT)
        if not grows and len(self._pending) < _MAX_PENDING:
            return ""
        if text:
            self._context = self._pending
            self._shown = self._decode(self._context)
        self._pending = []
        return text

    def flush(self) -> str:
        text, self._pending = self._new_text(), []
        return text

    def _new_text(self) -> str:
        return self._decode(self._context + self._pending)[len(self._shown) :]

    def _decode(self, ids: list[int]) -> str:
        # Hidden tokens never get here, and whatever does is shown.
        return self._tokenizer.decode(ids, skip_special_tokens=False)
