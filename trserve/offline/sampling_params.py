"""How answers are made, as a program says it: the fields of a request, once for many prompts.

Knows names only; what their values may be is checked where requests over HTTP are. What workers
get of them is ``trserve.params.SamplingParams``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Options for :meth:`trserve.Engine.generate`; None is the same default as over HTTP.

    Attributes:
        n: answers to each prompt.
        temperature, top_p, top_k, min_p, repetition_penalty: by default what the checkpoint
            suggests, else 1, 1, off, 0 and 1.
        seed: a 64-bit integer; by default one is drawn, and ``usage`` says which.
        max_tokens: by default 16 after a text or token ids, the rest of the context after a chat.
        stop: strings that end an answer and are not part of it; see
            ``include_stop_str_in_output``.
        stop_token_ids: ids that do.
        logit_bias: what is added to the logits of these ids.
        logprobs: how many of the most probable tokens are wanted beside each token's own log
            probability.
        echo: the answer's text begins with the prompt; not for a chat.
        response_format, guided_json, guided_regex, guided_choice, guided_grammar: what the answer
            must look like, one of them; needs ``pip install trserve[structured]``.
    """

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    echo: bool | None = None
    response_format: Mapping[str, Any] | None = None
    guided_json: Mapping[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Sequence[str] | None = None
    guided_grammar: str | None = None

    def options(self, *, chat: bool) -> dict[str, Any]:
        """The fields that are given, by their names in a request of this kind."""
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        given = {name: value for name, value in given.items() if value is not None}
        if chat and "logprobs" in given:
            given["top_logprobs"] = given["logprobs"]
            given["logprobs"] = True
        return given
