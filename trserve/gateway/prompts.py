"""From what a request says to the token ids of its prompts. Knows no limits, slots or sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trserve.errors import RequestError
from trserve.gateway.requests import GenerationRequest
from trserve.gateway.tokenizer import Tokenizer


class Prompt(NamedTuple):
    """One prompt: its ids, and its text where the response repeats it (else empty)."""

    ids: list[int]
    text: str = ""


def read_prompts(
    request: GenerationRequest, tokenizer: Tokenizer, tokenizer_size: int
) -> list[Prompt]:
    """All prompts of ``request``; ids are used as they are. Raises RequestError."""
    if request.messages is None:
        return [_read(each, request, tokenizer, tokenizer_size) for each in request.prompts]
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
    return [_read(text, request, tokenizer, tokenizer_size)]


def _read(
    prompt: str | list[int], request: GenerationRequest, tokenizer: Tokenizer, tokenizer_size: int
) -> Prompt:
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens)
        if not ids:
            raise RequestError("the prompt is empty", param="prompt")
        return Prompt(ids, prompt)
    _check_ids(prompt, tokenizer_size)
    if not request.echo:
        return Prompt(prompt)
    skip = request.skip_special_tokens
    return Prompt(prompt, tokenizer.decode(prompt, skip_special_tokens=skip))


def _check_ids(ids: Sequence[int], size: int) -> None:
    wrong = next((token for token in ids if not 0 <= token < size), None)
    if wrong is not None:
        raise RequestError(f"prompt: token id {wrong} is outside 0 to {size - 1}", param="prompt")
