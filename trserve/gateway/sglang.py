"""Bodies of SGLang's /generate to checked requests, the same that the OpenAI routes make.

Knows SGLang's names and defaults; nothing of tokenizers, slots or how answers look.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from trserve.errors import RequestError
from trserve.gateway.request_body import (
    CompletionBody,
    Extension,
    Grammar,
    Number,
    Regex,
    Schema,
    decode,
    refuse_unsupported,
)
from trserve.gateway.request_values import INT64_MAX, flag, integer, prompts, top_logprobs
from trserve.gateway.requests import PLAIN_DEFAULTS, GenerationRequest, check_consistent, common
from trserve.params import SamplingDefaults

DEFAULT_MAX_NEW_TOKENS: Final = 128
OUTPUT_ONLY: Final = -1
"""``logprob_start_len`` that asks for no log probabilities of the prompt."""


class SamplingBody(msgspec.Struct, kw_only=True):
    """The members of ``sampling_params``; one that is missing or null is the default."""

    max_new_tokens: Number = None
    min_new_tokens: Number = None
    sampling_seed: Number = None
    temperature: Number = None
    top_p: Number = None
    top_k: Number = None
    min_p: Number = None
    n: Number = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int | float] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    repetition_penalty: Number = None
    logit_bias: dict[str, Any] | None = None
    regex: Regex = None
    json_schema: Schema = None
    ebnf: Grammar = None
    structural_tag: Any = None
    stop_regex: Any = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """The members of a body of /generate; lists have one entry a prompt."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: SamplingBody | list[SamplingBody] | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    model: str | None = None
    trserve: Extension | None = None
    # Not supported: refused unless they change nothing.
    token_ids_logprob: Any = None
    return_hidden_states: Any = None
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    lora_path: Any = None
    session_params: Any = None


_REFUSED: Final = (
    "token_ids_logprob",
    "return_hidden_states",
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "lora_path",
    "session_params",
)
_RENAMED: Final = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
_decoder = msgspec.json.Decoder(GenerateBody)


class Ask(NamedTuple):
    """How one prompt's answers are to be shown.

    ``start`` is the prompt position from which on log probabilities are wanted, -1 for none of the
    prompt; ``tops`` how many of the most probable tokens beside each, None for no logprobs at all.
    """

    rid: str | None
    tops: int | None
    start: int
    texts: bool


class Generate(NamedTuple):
    """A body of /generate: its requests, how each of their prompts is shown, and whether the
    response is one object (else a list)."""

    requests: list[GenerationRequest]
    asks: list[Ask]
    single: bool


def parse_generate(body: bytes, defaults: SamplingDefaults = PLAIN_DEFAULTS) -> Generate:
    """What a body of /generate asks for; RequestError if it is not one."""
    fields = decode(_decoder, body)
    for name in _REFUSED:
        if getattr(fields, name) not in (None, False, [], {}):
            raise RequestError(f"{name} is not supported; leave it out", param=name)
    given, is_one = _prompts(fields)
    params = _each("sampling_params", fields.sampling_params, len(given))
    asks = _asks(fields, len(given))
    requests = [
        _request([prompt], each or SamplingBody(), ask, fields, defaults)
        for prompt, each, ask in zip(given, params, asks, strict=True)
    ]
    return Generate(requests, asks, is_one and requests[0].n == 1)


def _prompts(fields: GenerateBody) -> tuple[list[str | list[int]], bool]:
    """All prompts, and whether they were sent as one instead of a list."""
    if (fields.text is None) == (fields.input_ids is None):
        raise RequestError("send either text or input_ids", param="text")
    if fields.text is not None:
        return prompts(fields.text, "text"), isinstance(fields.text, str)
    ids = fields.input_ids or []
    if any(isinstance(each, str) for each in ids):
        raise RequestError("input_ids holds text; send it as text", param="input_ids")
    return prompts(ids, "input_ids"), not (ids and isinstance(ids[0], list))


_T = TypeVar("_T")


def _each(name: str, value: _T | list[_T] | None, count: int) -> Sequence[_T | None]:
    """``value`` for each of ``count`` prompts."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(
            f"{name} has {len(value)} entries for {count} prompts; send one for each, or one for "
            "all that is no list",
            param=name,
        )
    return value


def _asks(fields: GenerateBody, count: int) -> list[Ask]:
    wanted = _each("return_logprob", fields.return_logprob, count)
    starts = _each("logprob_start_len", fields.logprob_start_len, count)
    tops = _each("top_logprobs_num", fields.top_logprobs_num, count)
    asks = []
    for rid, asked, start, top in zip(_rids(fields, count), wanted, starts, tops, strict=True):
        top = top_logprobs("top_logprobs_num", top) or 0
        start = integer("logprob_start_len", start, OUTPUT_ONLY, INT64_MAX)
        start = OUTPUT_ONLY if start is None or not asked else start
        texts = flag(fields.return_text_in_logprobs)
        asks.append(Ask(rid, top if asked else None, start, texts))
    return asks


def _rids(fields: GenerateBody, count: int) -> Sequence[str | None]:
    """The names of the prompts' answers; a batch under one name numbers them."""
    if isinstance(fields.rid, str) and count > 1:
        return [f"{fields.rid}_{number}" for number in range(count)]
    return _each("rid", fields.rid, count)


def _request(
    prompt: list[str | list[int]],
    params: SamplingBody,
    ask: Ask,
    fields: GenerateBody,
    defaults: SamplingDefaults,
) -> GenerationRequest:
    try:
        shared = common(_as_completion(params, fields, ask), defaults)
        if shared["form"] is not None:  # what is found wrong later is named as here
            param = f"sampling_params.{shared['form'].param}"
            shared["form"] = msgspec.structs.replace(shared["form"], param=param)
        scores = ask.tops is not None and ask.start != OUTPUT_ONLY
        limit = integer("max_tokens", params.max_new_tokens, 0 if scores else 1, INT64_MAX)
        request = GenerationRequest(
            kind="completion",
            prompts=prompt,
            logprobs=ask.tops,
            echo=scores,
            max_tokens=DEFAULT_MAX_NEW_TOKENS if limit is None else limit,
            **shared,
        )
        return check_consistent(request)
    except RequestError as error:
        raise _renamed(error) from error


def _as_completion(params: SamplingBody, fields: GenerateBody, ask: Ask) -> CompletionBody:
    """The same wishes by OpenAI's names."""
    if params.stop_regex not in (None, [], ""):
        raise RequestError("stop_regex is not supported; leave it out", param="stop_regex")
    given = msgspec.structs.asdict(params)
    for theirs, ours in _RENAMED.items():
        given[ours] = given.pop(theirs)
    del given["stop_regex"]
    body = CompletionBody(
        **given, model=fields.model, stream=fields.stream, trserve=fields.trserve, rid=ask.rid
    )
    refuse_unsupported(body)
    return body


def _renamed(error: RequestError) -> RequestError:
    """``error`` by the names of ``sampling_params``, if it is about one of them."""
    param, message = error.param or "", error.message
    for theirs, ours in _RENAMED.items():
        message = message.replace(ours, theirs)
        param = theirs if param == ours else param
    if param.split("[")[0].split(".")[0] in SamplingBody.__struct_fields__:
        param = f"sampling_params.{param}"
    return RequestError(message, status=error.status, param=param or None, code=error.code)
