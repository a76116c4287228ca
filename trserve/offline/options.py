"""From the arguments of a call to requests, as HTTP would have them.

So that both are checked by the same code: prompts and options become the body of a request.
Knows no tokens, models or threads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np
import orjson

from trserve.errors import RequestError
from trserve.gateway.request_body import ChatBody, CompletionBody
from trserve.gateway.requests import GenerationRequest, parse_chat, parse_completion
from trserve.offline.sampling_params import SamplingParams
from trserve.params import SamplingDefaults

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids that are used as they are, or chat messages."""

Params = SamplingParams | Sequence[SamplingParams] | None
"""For all prompts, or one for each."""

_JSON: Final = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
_FROM_ARGUMENTS: Final = {
    "prompt": "prompts are the first argument",
    "messages": "prompts are the first argument",
    "stream": "call generate for whole answers and stream for their parts",
    "stream_options": "the last part of a stream has its usage",
}
_BODIES: Final = {"chat messages": ChatBody, "text or token ids": CompletionBody}


class Requests(NamedTuple):
    """One request for each prompt; ``single`` where there was one prompt and not a list."""

    each: list[GenerationRequest]
    single: bool


def read_arguments(
    prompts: Prompt | Sequence[Prompt],
    params: Params,
    options: Mapping[str, Any],
    defaults: SamplingDefaults,
    *,
    records: bool,
) -> Requests:
    """The requests of one call; options win over ``params``.

    Args:
        records: whether the instance records.

    Raises:
        RequestError: ``param`` names what is wrong.
    """
    single = _is_single(prompts)
    each = [cast(Prompt, prompts)] if single else list(cast(Sequence[Prompt], prompts))
    own = _spread(params, len(each), single=single)
    record = _record(options.get("record"), records)
    given = {name: value for name, value in options.items() if name != "record"}
    requests = [_request(p, s, given, defaults) for p, s in zip(each, own, strict=True)]
    for request in requests:
        request.record = record
    return Requests(requests, single)


def _record(wanted: object, records: bool) -> bool:
    if wanted is None:
        return records
    if not isinstance(wanted, bool):
        raise RequestError("record must be True, False or None", param="record")
    if wanted and not records:
        raise RequestError(
            "record: the engine has no directory to record to; give Engine(record=DIR)",
            param="record",
        )
    return wanted


def _spread(params: Params, count: int, *, single: bool) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(
            "params must be a SamplingParams, or a list with one for each prompt", param="params"
        )
    if single or len(params) != count:
        prompts = "one prompt that is no list" if single else f"{count} prompts"
        raise RequestError(f"params: a list of {len(params)} for {prompts}", param="params")
    return params


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence | np.ndarray):
        raise RequestError(
            "prompts must be a text, token ids or chat messages, or a list of such", param="prompts"
        )
    return len(prompts) > 0 and isinstance(prompts[0], int | np.integer | Mapping)


def _request(
    prompt: Prompt,
    params: SamplingParams | None,
    options: Mapping[str, Any],
    defaults: SamplingDefaults,
) -> GenerationRequest:
    chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    given = {**(params.options(chat=chat) if params else {}), **options}
    for name in given:
        _check_name(name, "chat messages" if chat else "text or token ids")
    values = {"messages" if chat else "prompt": prompt, **given}
    body = orjson.dumps({name: orjson.Fragment(_json(name, v)) for name, v in values.items()})
    return parse_chat(body, defaults) if chat else parse_completion(body, defaults)


def _check_name(name: str, kind: str) -> None:
    if name in _FROM_ARGUMENTS:
        raise RequestError(f"{name} is no option: {_FROM_ARGUMENTS[name]}", param=name)
    if name in _BODIES[kind].__struct_fields__:
        return
    for other, body in _BODIES.items():
        if name in body.__struct_fields__:
            raise RequestError(f"{name} is an option for {other} only", param=name)
    raise RequestError(f"unknown option {name!r}", param=name)


def _json(name: str, value: Any) -> bytes:
    _check_finite(name, value)
    try:
        return orjson.dumps(value, option=_JSON)
    except orjson.JSONEncodeError as error:
        raise RequestError(f"{name} cannot be sent: {error}", param=name) from None


def _check_finite(name: str, value: Any) -> None:
    """JSON would say null for what is not finite, and null is the default."""
    if isinstance(value, Mapping):
        for member in value.values():
            _check_finite(name, member)
    elif isinstance(value, float | np.floating) and not math.isfinite(value):
        raise RequestError(f"{name} must be finite", param=name)
