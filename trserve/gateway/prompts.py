"""From what a request says to the token ids of its prompts, as long as a context has room for.

Knows no slots and no sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from trserve.errors import RequestError
from trserve.gateway.requests import GenerationRequest
from trserve.gateway.tokenizer import Tokenizer

_USUAL_CHARS: Final = 4
"""Of a token: a text that is shorter than the context by this count is encoded at once."""

_PIECE_CHARS: Final = 32 * 1024


class Prompt(NamedTuple):
    """One prompt: its ids, and its text where the response repeats it (else empty)."""

    ids: list[int]
    text: str = ""


def read_prompts(
    request: GenerationRequest, tokenizer: Tokenizer, tokenizer_size: int, context: int
) -> list[Prompt]:
    """All prompts of ``request``, each shorter than ``context`` tokens; ids are used as they are.

    Raises RequestError.
    """
    reader = _Reader(request, tokenizer, tokenizer_size, context)
    if request.messages is None:
        return [reader.read(each) for each in request.prompts]
    if request.tools and not tokenizer.takes_tools:
        raise RequestError(
            "the model's chat template shows it no tools; leave them out, or send "
            '"tool_choice": "none"',
            param="tools",
        )
    text = tokenizer.render_chat(
        request.messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        kwargs=request.chat_template_kwargs,
    )
    return [reader.read(text)]


class _Reader:
    """Reads the prompts of one request."""

    def __init__(
        self, request: GenerationRequest, tokenizer: Tokenizer, tokenizer_size: int, context: int
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._size = tokenizer_size
        self._context = context

    def read(self, prompt: str | list[int]) -> Prompt:
        """One of them."""
        if isinstance(prompt, str):
            return self._encoded(prompt)
        self._check_length(len(prompt))
        _check_ids(prompt, self._size)
        if not self._request.echo:
            return Prompt(prompt)
        skip = self._request.skip_special_tokens
        return Prompt(prompt, self._tokenizer.decode(prompt, skip_special_tokens=skip))

    def _encoded(self, text: str) -> Prompt:
        if len(text) > _USUAL_CHARS * self._context:
            self._check_text(text)
        special = self._request.add_special_tokens
        ids = self._tokenizer.encode(text, add_special_tokens=special)
        if not ids:
            raise RequestError("the prompt is empty", param="prompt")
        self._check_length(len(ids))
        return Prompt(ids, text)

    def _check_text(self, text: str) -> None:
        """Refuse a text that has no room by far, before all of it is encoded.

        To encode takes some 200 bytes a character at once. A piece has a few tokens more than its
        part in the whole text, so only twice the context is too much for certain.
        """
        count = 0
        for start in range(0, len(text), _PIECE_CHARS):
            piece = text[start : start + _PIECE_CHARS]
            count += len(self._tokenizer.encode(piece, add_special_tokens=False))
            if count > 2 * self._context:
                raise self._too_long(f"more than {self._context}")

    def _check_length(self, tokens: int) -> None:
        if tokens >= self._context:
            raise self._too_long(str(tokens))

    def _too_long(self, tokens: str) -> RequestError:
        return RequestError(
            f"the prompt has {tokens} tokens; the context length is {self._context} tokens, "
            "prompt and answer together: shorten the prompt",
            param="messages" if self._request.kind == "chat" else "prompt",
            code="context_length_exceeded",
        )


def _check_ids(ids: Sequence[int], size: int) -> None:
    wrong = next((token for token in ids if not 0 <= token < size), None)
    if wrong is not None:
        raise RequestError(f"prompt: token id {wrong} is outside 0 to {size - 1}", param="prompt")
