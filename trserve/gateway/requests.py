"""Bodies of /v1/chat/completions and /v1/completions to one checked request.

Takes what the load tools and SDKs really send: unknown members are ignored, a null is the default,
vLLM's and SGLang's extensions are understood. Knows no tokenizer, no model names and no HTTP
framework, so it does not judge lengths in tokens or whether a model exists.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Any, Final, Literal

import msgspec

from trserve.errors import RequestError
from trserve.gateway.chat_template import normalize_messages
from trserve.gateway.grammar_fields import Form, form_of
from trserve.gateway.request_body import (
    MAX_NAME,
    Body,
    ChatBody,
    read_chat_body,
    read_completion_body,
)
from trserve.gateway.request_values import (
    INT64_MAX,
    Readers,
    as_it_is,
    called_tools,
    chat_logprobs,
    check_best_of,
    check_name,
    checked_name,
    flag,
    integer,
    prompts,
    sampling,
    time_limit,
    tools,
    top_logprobs,
)
from trserve.params import SamplingDefaults

MAX_ROUTER_PARAMS = 64
PLAIN_DEFAULTS = SamplingDefaults()
COMPLETION_MAX_TOKENS = 16
"""``max_tokens`` of /v1/completions where the client gave none, as OpenAI documents it."""

_FLOAT64_MAX = sys.float_info.max

Kind = Literal["chat", "completion"]
Reasoning = Literal["apart", "within", "dropped"]
"""What becomes of a model's reasoning: a member of its own, a part of the content, or nothing."""


class GenerationRequest(msgspec.Struct, kw_only=True):
    """A request whose every field is resolved and in range; what is None is explained below.

    ``prompts`` holds texts and lists of ids, or is empty and ``messages`` is set; ids are used as
    they are, without a BOS. Each prompt gets ``n`` choices. ``model`` is the name alone and
    ``model_as_sent`` what the response echoes; both None when the client named none.
    ``max_tokens`` None means the rest of the context; ``seed`` None, that the gateway draws one.
    ``logprobs`` is how many of the most probable tokens are wanted beside each token's own log
    probability, None for none of it; ``echo`` that the answer begins with the prompt.
    ``router_params`` joins the parameters of ``NAME:threshold=0.3`` and of ``trserve.router``, of
    which the latter win. ``timeout_s``: how many seconds the answer may take, None for any number.
    ``tools`` are those that may be called; the template shows them to the model. One of
    ``called_tools`` must be, once or, with ``calls_any``, as often as the model likes; ``form`` is
    what the answer must look like otherwise, None for anything.
    ``record`` is no member of a body: what an instance that records keeps. ``rid`` is the client's
    own name of the request, by which it can be aborted.
    """

    kind: Kind
    model: str | None = None
    model_as_sent: str | None = None
    prompts: list[str | list[int]] = []
    messages: list[dict[str, Any]] | None = None
    n: int = 1
    logprobs: int | None = None
    echo: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] = []
    parallel_tool_calls: bool = True
    called_tools: list[str] = []
    calls_any: bool = False
    form: Form | None = None
    reasoning: Reasoning = "apart"
    add_special_tokens: bool = True
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    include_usage: bool = False
    continuous_usage_stats: bool = False
    return_token_ids: bool = False
    trace: bool = False
    router_params: dict[str, float] = {}
    entry_model: str | None = None
    only: str | None = None
    timeout_s: float | None = None
    record: bool = True
    rid: str | None = None

    @property
    def num_choices(self) -> int:
        """Answers that are wanted: ``n`` for each prompt, those of a prompt side by side."""
        return self.n * (len(self.prompts) or 1)

    @property
    def constrained(self) -> bool:
        """Whether its answers follow a grammar."""
        return self.form is not None or bool(self.called_tools)


def parse_chat(body: bytes, defaults: SamplingDefaults = PLAIN_DEFAULTS) -> GenerationRequest:
    """The request in a body of /v1/chat/completions; RequestError if it is not one."""
    fields = read_chat_body(body)
    request = GenerationRequest(
        kind="chat",
        messages=normalize_messages(fields.messages or []),
        chat_template_kwargs=_template_kwargs(fields),
        **_calls(fields),
        reasoning=_reasoning(fields),
        **_ending(fields),
        max_tokens=_chat_max_tokens(fields),
        logprobs=chat_logprobs(fields),
        **common(fields, defaults),
        add_special_tokens=fields.add_special_tokens is True,
    )
    return check_consistent(request)


def parse_completion(body: bytes, defaults: SamplingDefaults = PLAIN_DEFAULTS) -> GenerationRequest:
    """The request in a body of /v1/completions; RequestError if it is not one."""
    fields = read_completion_body(body)
    echo = flag(fields.echo)
    # An answer may be the prompt alone.
    max_tokens = integer("max_tokens", fields.max_tokens, 0 if echo else 1, INT64_MAX)
    request = GenerationRequest(
        kind="completion",
        prompts=prompts(fields.prompt, "prompt"),
        logprobs=top_logprobs("logprobs", fields.logprobs),
        echo=echo,
        add_special_tokens=flag(fields.add_special_tokens, default=True),
        max_tokens=COMPLETION_MAX_TOKENS if max_tokens is None else max_tokens,
        **common(fields, defaults),
    )
    return check_consistent(request)


def check_consistent(request: GenerationRequest) -> GenerationRequest:
    """``request``; RequestError if two of its values contradict each other."""
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        raise RequestError(
            f"min_tokens is greater than max_tokens, which is {request.max_tokens}",
            param="min_tokens",
        )
    return request


# ---- values in range ----


def common(fields: Body, defaults: SamplingDefaults) -> dict[str, Any]:
    """The members that both routes share, by the names of :class:`GenerationRequest`.

    ``form`` is always among them; others that are left out may not be.
    """
    if fields.stream_options is not None and not fields.stream:
        raise RequestError(
            "stream_options needs stream: true; leave it out otherwise", param="stream_options"
        )
    found = sampling(fields, defaults)
    found.update(_COMMON.given(fields))
    found["form"] = form_of(fields)
    if fields.best_of is not None:
        check_best_of(fields, found.get("n", 1))
    if fields.stream_options is not None:
        found.update(_STREAM_OPTIONS.given(fields.stream_options))
    params: dict[str, Any] = {}
    if fields.model is not None:
        check_name("model", fields.model)
        found["model"], params = _split_model(fields.model)
        found["model_as_sent"] = fields.model
    if fields.trserve is not None:
        found.update(_EXTENSION.given(fields.trserve))
        params = {**params, **(fields.trserve.router or {})}
    if params:
        found["router_params"] = _router_params(params)
    return found


_COMMON: Final = Readers(
    {
        "n": lambda name, value: integer(name, value, 1, INT64_MAX),
        "rid": checked_name,
        "stream": as_it_is,
        "return_token_ids": as_it_is,
    }
)
_STREAM_OPTIONS: Final = Readers(
    {
        "include_usage": as_it_is,
        "continuous_usage_stats": as_it_is,
    }
)
_EXTENSION: Final = Readers(
    {
        "trace": as_it_is,
        "entry_model": as_it_is,
        "only": as_it_is,
        "timeout_s": lambda _, value: time_limit("trserve.timeout_s", value),
    }
)


def _chat_max_tokens(fields: ChatBody) -> int | None:
    """The new name wins; both are checked."""
    old = integer("max_tokens", fields.max_tokens, 1, INT64_MAX)
    if fields.max_completion_tokens is None:
        return old
    return integer("max_completion_tokens", fields.max_completion_tokens, 1, INT64_MAX)


def _reasoning(fields: ChatBody) -> Reasoning:
    """SGLang's switch leaves it where it is, vLLM's drops it."""
    if fields.include_reasoning is False:
        return "dropped"
    return "within" if fields.separate_reasoning is False else "apart"


def _calls(fields: ChatBody) -> dict[str, Any]:
    """Which tools may be called, and which must be."""
    if fields.tools is None and fields.tool_choice is None and fields.parallel_tool_calls is None:
        return {}
    return {
        "tools": tools(fields),
        "parallel_tool_calls": flag(fields.parallel_tool_calls, default=True),
        "called_tools": called_tools(fields),
        "calls_any": fields.tool_choice == "required",
    }


def _ending(fields: ChatBody) -> dict[str, Any]:
    """How the prompt ends: with the header of a new turn, or within the last message."""
    if fields.continue_final_message is None and fields.add_generation_prompt is None:
        return {}
    continues = flag(fields.continue_final_message)
    if continues and fields.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other; send one",
            param="continue_final_message",
        )
    begins = flag(fields.add_generation_prompt, default=not continues)
    return {"add_generation_prompt": begins, "continue_final_message": continues}


def _template_kwargs(fields: ChatBody) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if fields.documents is not None:
        found["documents"] = fields.documents
    if fields.tools and (shown := tools(fields)):
        found["tools"] = shown
    return {**found, **(fields.chat_template_kwargs or {})}


# ---- model names, router parameters, prompts ----

_MODEL_PARAMS = re.compile(r"(?P<name>.+):(?P<params>[A-Za-z_]\w*=[^:/]*)", re.DOTALL)


def _split_model(model: str | None) -> tuple[str | None, dict[str, float]]:
    """``NAME:threshold=0.3`` to the name and the parameters; more of them are split by commas.

    A name may itself hold colons and slashes: only a last part of the form ``key=...`` counts.
    """
    found = _MODEL_PARAMS.fullmatch(model) if model is not None else None
    if found is None:
        return model, {}
    pairs = [item.partition("=") for item in found["params"].split(",")]
    try:
        params = {key.strip(): float(value) for key, _, value in pairs}
    except ValueError as error:
        raise RequestError(
            "the part of model behind the colon must be NAME=NUMBER, as in trserve:threshold=0.3",
            param="model",
        ) from error
    if not all(map(math.isfinite, params.values())):
        raise RequestError("a router parameter in model must be finite", param="model")
    return found["name"], params


def _router_params(params: dict[str, Any]) -> dict[str, float]:
    if len(params) > MAX_ROUTER_PARAMS:
        raise RequestError(
            f"trserve.router may hold at most {MAX_ROUTER_PARAMS} parameters",
            param="trserve.router",
        )
    for name, value in params.items():
        if type(value) not in (int, float) or not -_FLOAT64_MAX <= value <= _FLOAT64_MAX:
            where = f"trserve.router.{name[:MAX_NAME]}"
            raise RequestError(f"{where} must be a finite number", param=where)
    return {name: float(value) for name, value in params.items()}
