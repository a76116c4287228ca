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

from trserve.gateway.tool_calls import BEGIN, END

_PLAIN_NAME: Final = re.compile(r"[^<>\n]+")
_VALUE_END: Final = "</parameter>"
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
        elements: whether parameters are elements. Texts among them are then free, and a tool with
            a name that no element can have is called with JSON all the same.
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
        properties = json.loads(tool.schema).get("properties", {})
        if elements and all(map(_PLAIN_NAME.fullmatch, (tool.name, *properties))):
            _add_elements(calls, tool, number)
        else:
            _add_json(calls, tool, number)
    if elements:
        calls.rules.append(rf"text[lazy]: /(.|\n)*/ {_text(_VALUE_END)}")
    return calls


def _text(*parts: str) -> str:
    return json.dumps("".join(parts))


def _add_json(calls: CallRules, tool: Tool, number: int) -> None:
    head = _text('{"name": ', json.dumps(tool.name), ', "arguments": ')
    calls.rules.append(f'call{number}: {head} @arguments{number} "}}"')
    calls.schemas[f"arguments{number}"] = tool.schema, tool


def _add_elements(calls: CallRules, tool: Tool, number: int) -> None:
    """In the order of the schema's properties, those that are not required may be left out."""
    schema = json.loads(tool.schema)
    required, parts = schema.get("required", ()), []
    for at, (key, kind) in enumerate(schema.get("properties", {}).items()):
        rule = f"parameter{number}_{at}"
        parts.append(rule if key in required else f"{rule}?")
        value = _value(calls, tool, f"value{number}_{at}", kind, schema)
        head = _text("<parameter=", key, ">", _LINE)
        calls.rules.append(f"{rule}: {head} {value} {_text(_LINE)}")
    head, end = _text("<function=", tool.name, ">", _LINE), _text("</function>")
    calls.rules.append(f"call{number}: {' '.join([head, *parts, end])}")


def _value(calls: CallRules, tool: Tool, name: str, kind: Any, schema: dict[str, Any]) -> str:
    """A parameter's value up to the end of its element; what is called a string is bare text."""
    if not (isinstance(kind, dict) and kind.get("type") == "string"):
        if isinstance(kind, dict):
            kind = {key: schema[key] for key in _SHARED if key in schema} | kind
        calls.schemas[name] = json.dumps(kind, ensure_ascii=False), tool
        return f"@{name} {_text(_LINE, _VALUE_END)}"
    if "enum" not in kind and "const" not in kind:
        return "text"
    values = kind.get("enum", [kind.get("const")])
    choices = " | ".join(_text(each) for each in values if isinstance(each, str))
    return f"({choices}) {_text(_LINE, _VALUE_END)}" if choices else "text"
