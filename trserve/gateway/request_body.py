"""The members of a request body as they stand on the wire, and what is refused among them.

Knows types and which parameters are not supported; what values mean and which are in range is
``requests``' matter. A member that is missing or null is None; an unknown one is ignored.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from operator import attrgetter
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec

from trserve.errors import RequestError

MAX_NAME = 64
"""Characters of a client's own words that a message repeats."""

Number = int | float | None
"""5.0 may stand for 5; a bool or a string may not."""


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Extension(msgspec.Struct, forbid_unknown_fields=True):
    trace: bool | None = None
    router: dict[str, Any] | None = None  # `requests` names the member whose value is no number
    entry_model: str | None = None
    only: str | None = None
    timeout_s: Number = None


ResponseFormat: TypeAlias = Annotated[
    Any,
    msgspec.Meta(
        description='{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
        '"json_schema": {"name": ..., "schema": {...}, "strict": true}}.'
    ),
]
StructuredOutputs: TypeAlias = Annotated[
    Any, msgspec.Meta(description="vLLM: an object with one of json, regex, choice, grammar.")
]
Schema: TypeAlias = Annotated[
    Any, msgspec.Meta(description="The JSON schema of the answer: an object, or its text.")
]
Regex: TypeAlias = Annotated[
    Any, msgspec.Meta(description="A regular expression that the whole answer matches.")
]
Choices: TypeAlias = Annotated[
    Any, msgspec.Meta(description="A list of texts; the answer is one of them.")
]
Grammar: TypeAlias = Annotated[
    Any, msgspec.Meta(description="The answer's grammar, in Lark's syntax or llama.cpp's EBNF.")
]
ToolChoice: TypeAlias = Annotated[
    Any,
    msgspec.Meta(
        description='"auto", "none", "required" or {"type": "function", "function": {"name": ...}}.'
    ),
]


class Body(msgspec.Struct, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Number = None
    top_p: Number = None
    top_k: Number = None
    min_p: Number = None
    seed: Number = None
    max_tokens: Number = None
    min_tokens: Number = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int | float] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    repetition_penalty: Number = None
    logit_bias: dict[str, Any] | None = None  # as for `Extension.router`
    trserve: Extension | None = None
    n: Number = None
    best_of: Number = None
    rid: str | None = None
    # The form of the answer: `grammar_fields` reads them.
    response_format: ResponseFormat = None
    structured_outputs: StructuredOutputs = None
    guided_json: Schema = None
    guided_regex: Regex = None
    guided_choice: Choices = None
    guided_grammar: Grammar = None
    regex: Regex = None
    json_schema: Schema = None
    ebnf: Grammar = None
    # Not supported: any value is read, and all but the ones that change nothing are refused.
    use_beam_search: Any = None
    prompt_logprobs: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    structural_tag: Any = None


class ChatBody(Body, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: Number = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    functions: list[Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Number = None
    continue_final_message: bool | None = None
    # Not supported, as above.
    echo: Any = None
    chat_template: Any = None


class CompletionBody(Body, kw_only=True):
    prompt: Any = None
    logprobs: Number = None
    echo: bool | None = None


_S = TypeVar("_S", bound=msgspec.Struct)
_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)


def read_chat_body(body: bytes) -> ChatBody:
    """The members of a body of /v1/chat/completions.

    Raises:
        RequestError: not JSON, a wrong type, or something asked for that is not supported.
    """
    fields = decode(_chat_decoder, body)
    if _unsupported_of(fields) != _NONE_SENT:
        _refuse(fields, _UNSUPPORTED_CHAT)
    if fields.functions:
        raise _unsupported("functions", "leave it out")
    return fields


def read_completion_body(body: bytes) -> CompletionBody:
    """The members of a body of /v1/completions; raises as :func:`read_chat_body`."""
    fields = decode(_completion_decoder, body)
    refuse_unsupported(fields)
    return fields


def refuse_unsupported(fields: CompletionBody) -> None:
    """Raise RequestError if something is asked for that is not supported."""
    _refuse(fields, _UNSUPPORTED)


def decode(decoder: msgspec.json.Decoder[_S], body: bytes) -> _S:
    """The members of ``body``. Raises RequestError if it is no JSON, or has a wrong type."""
    body = body.removeprefix(codecs.BOM_UTF8)
    if not body.strip():
        raise RequestError("the body is empty; send a JSON object")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise type_error(error) from error
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply; send flatter JSON") from error


_PLACE = " - at `$"
_UNKNOWN_MEMBER = "Object contains unknown field `"


def type_error(error: msgspec.ValidationError, prefix: str = "") -> RequestError:
    """msgspec's finding, with the member that it is about moved from the end to the front.

    Args:
        error: its text is like: Expected `int`, got `str` - at `$.top_k`.
        prefix: where the value that was checked stands in the body, if it is not all of it.
    """
    what, _, path = str(error).rpartition(_PLACE)
    if not what:  # nothing was found in front: the finding is about the value as a whole
        what, path = path, ""
    where = prefix + path.removesuffix("`").removeprefix(".")
    if what.startswith(_UNKNOWN_MEMBER):
        name = what.removeprefix(_UNKNOWN_MEMBER).removesuffix("`")[:MAX_NAME]
        where = f"{where}.{name}"
        return RequestError(f"{where} is not a parameter; check its spelling", param=where)
    what = what[:1].lower() + what[1:]
    if not where:
        return RequestError(f"the body is not a request: {what}")
    return RequestError(f"{where} has the wrong type or value: {what}", param=where)


# ---- what changes nothing, for each parameter that is not supported ----


def _is_empty(value: Any) -> bool:
    return value is False or value == "" or value == [] or value == {}


_UNSUPPORTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "use_beam_search": (_is_empty, "false"),
    "prompt_logprobs": (_is_empty, "null"),
    "bad_words": (_is_empty, "null"),
    "allowed_token_ids": (_is_empty, "null"),
    "structural_tag": (_is_empty, "null"),
}
_UNSUPPORTED_CHAT = _UNSUPPORTED | {
    "echo": (_is_empty, "false"),
    "chat_template": (_is_empty, "null"),
}
_unsupported_of: Final = attrgetter(*_UNSUPPORTED_CHAT)
_NONE_SENT: Final = (None,) * len(_UNSUPPORTED_CHAT)


def _refuse(fields: Body, table: dict[str, tuple[Callable[[Any], bool], str]]) -> None:
    for name, (changes_nothing, default) in table.items():
        value = getattr(fields, name)
        if value is not None and not changes_nothing(value):
            raise _unsupported(name, f"leave it out or send {default}")


def _unsupported(name: str, remedy: str) -> RequestError:
    return RequestError(f"this value of {name} is not supported yet; {remedy}", param=name)
