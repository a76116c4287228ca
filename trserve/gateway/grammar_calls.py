"""Calls of tools, as models write them, in the syntax of grammars.

In the formats that ``tool_calls`` reads: JSON, as Hermes and Qwen have it, or elements, as
Qwen3-Coder has it. Knows no library and no requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from trserve.errors import RequestError
from trserve.gateway.tool_calls import BEGIN, END, VALUE_END

_PLAIN_NAME: Final = re.compile(r"[^<>\n]+")
_LINE: Final = "\n"
_SHARED: Final = ("$defs", "definitions")


class Tool(msgspec.Struct, frozen=True):
    """One that may be called.

    ``schema`` is the text of its parameters' schema, which has the type ``object``; ``param`` names
    the schema in a message. ``lenient``: what of it cannot be held to is passed over.
    """

    name: str
    schema: str
    param: str
    lenient: bool


class CallRules(msgspec.Struct):
    """``rules`` define ``calls``; each of ``schemas`` is named by them, with the tool it is of."""

    rules: list[str]
    schemas: dict[str, tuple[str, Tool]]


def call_rules(tools: Sequence[Tool], *, repeats: bool, elements: bool) -> CallRules:
    """The rules of calls of ``tools``: of one, or with ``repeats`` of one or more.

    Args:
        elements: whether parameters are elements. Texts among them are then free but for what
            closes an element, and a tool with a name that no element can have is called with JSON
            all the same.

    Raises:
        RequestError: a schema is none; the library has not seen it yet.
    """
    names = " | ".join(f"call{number}" for number in range(len(tools)))
    calls = CallRules(
        [
            'calls: call ("\\n" call)*' if repeats else "calls: call",
            f"call: {_text(BEGIN, _LINE)} ({names}) {_text(_LINE, END)}",
        ],
        {},
    )
    for number, tool in enumerate(tools):
        if elements and all(map(_PLAIN_NAME.fullmatch, (tool.name, *_members(tool)[0]))):
            _add_elements(calls, tool, number)
        else:
            _add_json(calls, tool, number)
    if elements:
        calls.rules.append(rf"text[lazy]: /(.|\n)*/ {_text(VALUE_END)}")
    return calls


def _text(*parts: str) -> str:
    return json.dumps("".join(parts))


def _add_json(calls: CallRules, tool: Tool, number: int) -> None:
    head = _text('{"name": ', json.dumps(tool.name), ', "arguments": ')
    calls.rules.append(f'call{number}: {head} @arguments{number} "}}"')
    calls.schemas[f"arguments{number}"] = tool.schema, tool


def _members(tool: Tool) -> tuple[dict[str, Any], Sequence[Any]]:
    """The properties of its schema, and which are required."""
    schema = json.loads(tool.schema)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict):
        raise RequestError(f"{tool.param}: properties must be an object", param=tool.param)
    if not isinstance(required, list):
        raise RequestError(f"{tool.param}: required must be a list of names", param=tool.param)
    return properties, required


def _add_elements(calls: CallRules, tool: Tool, number: int) -> None:
    """In the order of the schema's properties, those that are not required may be left out."""
    (properties, required), parts = _members(tool), []
    for at, (key, kind) in enumerate(properties.items()):
        rule = f"parameter{number}_{at}"
        parts.append(rule if key in required else f"{rule}?")
        value = _value(calls, tool, f"value{number}_{at}", key, kind)
        calls.rules.append(f"{rule}: {_text('<parameter=', key, '>', _LINE)} {value}")
    head, end = _text("<function=", tool.name, ">", _LINE), _text("</function>")
    calls.rules.append(f"call{number}: {' '.join([head, *parts, end])}")


def _value(calls: CallRules, tool: Tool, rule: str, key: str, kind: Any) -> str:
    """A parameter's value and the end of its element; what is called a string is bare text."""
    if isinstance(kind, dict) and kind.get("type") == "string":
        return _string(tool, key, kind)
    if kind is True:
        kind = {}
    if isinstance(kind, dict):
        schema = json.loads(tool.schema)
        kind = {name: schema[name] for name in _SHARED if name in schema} | kind
    calls.schemas[rule] = json.dumps(kind, ensure_ascii=False), tool
    return f"@{rule} {_text(_LINE, VALUE_END)}"


def _string(tool: Tool, key: str, kind: dict[str, Any]) -> str:
    """One of the texts that ``kind`` names, or any."""
    if "enum" not in kind and "const" not in kind:
        return "text"
    values = kind.get("enum", [kind.get("const")])
    if not isinstance(values, list):
        raise RequestError(f"{tool.param}: enum of {key!r} must be a list", param=tool.param)
    texts = [each for each in values if isinstance(each, str)]
    closed = [f"{each}{_LINE}{VALUE_END}" for each in texts]
    choices = [each for each in closed if each.find(VALUE_END) + len(VALUE_END) == len(each)]
    if texts and not choices:
        raise RequestError(
            f"{tool.param}: every value of {key!r} holds {VALUE_END!r}, which would end it",
            param=tool.param,
        )
    return f"({' | '.join(map(_text, choices))})" if choices else "text"
