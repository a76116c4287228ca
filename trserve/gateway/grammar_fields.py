"""What a body says about the form of its answer: a JSON schema, an expression, choices, a grammar.

OpenAI's, vLLM's and SGLang's members for it, read and checked for their types; two that ask for
different things are refused. Whether a schema or a grammar is sound is ``grammar_compiler``'s
matter. Knows no tools, no tokens and no library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final, Literal

import msgspec

from trserve.errors import RequestError
from trserve.gateway.request_body import Body

MAX_CHARS: Final = 32_768
"""Of a schema, an expression or a grammar; what reaches the workers has a limit of its own."""

MAX_LINES: Final = 1000
"""Of a grammar, one a rule: the library follows rules that name rules by recursion, and some
thousands of them are more than its stack holds."""

MAX_CHOICES: Final = 4096

Kind = Literal["json", "regex", "choice", "grammar"]
_ANY_OBJECT: Final = '{"type":"object"}'
_ANY_JSON: Final = "$$ANY$$"  # SGLang's word for it


class Form(msgspec.Struct, frozen=True):
    """What an answer must look like.

    ``source`` is the text of a JSON schema, an expression, a JSON list of choices, or a grammar
    (Lark's, or the EBNF of llama.cpp). ``param`` is the member that asked for it. ``lenient``: what
    of the schema cannot be held to is passed over, instead of refused.
    """

    kind: Kind
    source: str
    param: str
    lenient: bool = False


def form_of(fields: Body) -> Form | None:
    """The form that a body asks for; None for any. Raises RequestError."""
    if _forms(fields) == _NO_FORM:
        return None
    forms = [
        form
        for name, read in _READERS.items()
        if (value := getattr(fields, name)) is not None and (form := read(value, name)) is not None
    ]
    if len(forms) > 1:
        one, other = forms[0].param, forms[1].param
        raise RequestError(f"{one} and {other} exclude each other; send one", param=other)
    return forms[0] if forms else None


# ---- the members ----


def _is_nothing(value: Any) -> bool:
    """What clients send that mean nothing by it."""
    return value is False or value in ("", [], {})


def _response_format(value: Any, name: str) -> Form | None:
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be an object with a type", param=name)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Form("json", _ANY_OBJECT, name)
    if kind != "json_schema":
        raise RequestError(
            f"{name}.type must be text, json_object or json_schema", param=f"{name}.type"
        )
    where = f"{name}.json_schema"
    wrapper = value.get("json_schema")
    if not isinstance(wrapper, dict) or not isinstance(wrapper.get("schema"), dict):
        raise RequestError(f"{where} must be an object with a schema", param=where)
    lenient = wrapper.get("strict") is False
    return Form("json", checked_schema(wrapper["schema"], where), where, lenient)


def _schema(value: Any, name: str) -> Form | None:
    """A schema, or its text."""
    if _is_nothing(value):
        return None
    if value == _ANY_JSON:
        value = {}
    elif isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{name} is no JSON: {error}", param=name) from error
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be a JSON schema: an object, or its text", param=name)
    return Form("json", checked_schema(value, name), name)


def _regex(value: Any, name: str) -> Form | None:
    return _text_form("regex", value, name)


def _grammar(value: Any, name: str) -> Form | None:
    return _text_form("grammar", value, name)


def _text_form(kind: Kind, value: Any, name: str) -> Form | None:
    if _is_nothing(value):
        return None
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a string", param=name)
    _check_length(value, name)
    if kind == "grammar" and len(value.splitlines()) > MAX_LINES:
        raise RequestError(f"{name} may have at most {MAX_LINES} lines", param=name)
    return Form(kind, value, name)


def _choice(value: Any, name: str) -> Form | None:
    if _is_nothing(value):
        return None
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise RequestError(f"{name} must be a list of strings", param=name)
    if len(value) > MAX_CHOICES:
        raise RequestError(f"{name} may hold at most {MAX_CHOICES} strings", param=name)
    text = json.dumps(value)
    _check_length(text, name)
    return Form("choice", text, name)


_STRUCTURED: Final[dict[str, Callable[[Any, str], Form | None]]] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
_BLANKS: Final = ("whitespace_pattern", "disable_any_whitespace")
_REFUSED: Final = ("structural_tag", "disable_additional_properties", *_BLANKS)


def _structured_outputs(value: Any, name: str) -> Form | None:
    if _is_nothing(value):
        return None
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be an object", param=name)
    for member in _REFUSED:
        if not (value.get(member) is None or _is_nothing(value[member])):
            where = f"{name}.{member}"
            raise RequestError(f"{where} is not supported; leave it out", param=where)
    forms = [
        form
        for member, read in _STRUCTURED.items()
        if value.get(member) is not None
        and (form := read(value[member], f"{name}.{member}")) is not None
    ]
    if value.get("json_object"):
        forms.append(Form("json", _ANY_OBJECT, f"{name}.json_object"))
    if len(forms) > 1:
        raise RequestError(
            f"{forms[0].param} and {forms[1].param} exclude each other; send one", param=name
        )
    return forms[0] if forms else None


_READERS: Final[dict[str, Callable[[Any, str], Form | None]]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _grammar,
}
_forms: Final = attrgetter(*_READERS)
_NO_FORM: Final = (None,) * len(_READERS)


# ---- texts ----


def checked_schema(schema: Mapping[str, Any], name: str) -> str:
    """JSON of ``schema`` without what only describes: it allows the same, and takes less room.

    Raises RequestError, which names ``name``, if it is too long or too deep.
    """
    try:
        text = json.dumps(_bare(schema), ensure_ascii=False, separators=(",", ":"))
    except RecursionError as error:
        raise RequestError(f"{name} is nested too deeply", param=name) from error
    _check_length(text, name)
    return text


def _check_length(text: str, name: str) -> None:
    if len(text) > MAX_CHARS:
        raise RequestError(f"{name} may have at most {MAX_CHARS} characters", param=name)
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise RequestError(f"{name} holds half of a surrogate pair", param=name)


_DESCRIBES: Final = frozenset(
    (
        "title",
        "description",
        "default",
        "example",
        "examples",
        "deprecated",
        "discriminator",
        "readOnly",
        "writeOnly",
        "$comment",
    )
)
_BY_NAME: Final = frozenset(("properties", "patternProperties", "$defs", "definitions"))
"""Members whose own members are names, and no keywords."""

_VALUES: Final = frozenset(("const", "enum"))


def _bare(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in _VALUES:
            kept[key] = value
        elif key in _BY_NAME and isinstance(value, dict):
            kept[key] = {name: _bare(each) for name, each in value.items()}
        elif key not in _DESCRIBES:
            kept[key] = _bare(value)
    return kept
