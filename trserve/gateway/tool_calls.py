"""Calls of tools in a model's text, in the formats of Hermes and Qwen.

A call stands between ``<tool_call>`` and ``</tool_call>``: a JSON object with ``name`` and
``arguments`` (Hermes, Qwen2.5, Qwen3), or ``<function=NAME>`` with ``<parameter=KEY>`` elements
(Qwen3-Coder). A call is shown when it is complete; what is none is text. Knows no reasoning and
nothing of responses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from trserve.gateway.markers import cut

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
_FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="
_PARAMETER_END: Final = "</parameter>"
VALUE_END: Final = f"{_PARAMETER_END}\n"
"""Closes a parameter as templates write it, behind a line break; no value holds it."""

# Where there are two functions in one call, the first counts.
_CUT: Final = re.compile(rf"{_FUNCTION_END}\s*(?={_FUNCTION}|\Z)")


class Call(NamedTuple):
    """One call; ``arguments`` is JSON text."""

    name: str
    arguments: str


def parse_call(text: str, tools: Sequence[Mapping[str, Any]]) -> Call | None:
    """The call that stands in ``text``; None if it is none, or none that a response can hold.

    JSON can escape half of a surrogate pair, which no UTF-8 text holds.
    """
    try:
        call = _read_call(text.strip(), tools)
        for part in call or ():
            part.encode()
    except (ValueError, RecursionError):
        return None
    return call


def _is_whole(text: str, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether ``text``, which follows a grammar, is a call to its end."""
    text = text.strip()
    if text.startswith(_FUNCTION):
        return _elements(text.partition(">")[2]) is not None
    return parse_call(text, tools) is not None


def _read_call(text: str, tools: Sequence[Mapping[str, Any]]) -> Call | None:
    if text.startswith(_FUNCTION):
        name, found, rest = text.removeprefix(_FUNCTION).partition(">")
        name = name.strip()
        if not (name and found):
            return None
        elements = _elements(rest)
        if elements is None:
            elements = _loose_elements(_CUT.split(rest, 1)[0])
        return Call(name, _arguments(elements, _properties(name, tools)))
    call = json.loads(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return Call(call["name"], arguments if isinstance(arguments, str) else _json_text(arguments))


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _elements(text: str) -> list[tuple[str, str]] | None:
    """Keys and values of ``<parameter=KEY>`` elements up to the function's end.

    None if ``text`` is not written as templates write it. A value may hold any mark but the one
    that closes it.
    """
    found = []
    text = text.removeprefix("\n")
    while text.startswith(_PARAMETER):
        key, _, rest = text.removeprefix(_PARAMETER).partition(">")
        value, end, text = rest.partition(VALUE_END)
        if not end:
            return None
        found.append((key, _unwrapped(value)))
    return found if text.strip() == _FUNCTION_END else None


def _loose_elements(text: str) -> list[tuple[str, str]]:
    """As far as there are any, from what a model wrote by no template."""
    found = []
    for element in text.split(_PARAMETER)[1:]:
        key, _, value = element.partition(">")
        found.append((key, _unwrapped(value.partition(_PARAMETER_END)[0])))
    return found


def _unwrapped(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


def _arguments(elements: Sequence[tuple[str, str]], properties: Mapping[str, Any]) -> str:
    """``elements`` as a JSON object; what the tool calls a string stays one."""
    found: dict[str, Any] = {}
    for key, value in elements:
        name = key if key in properties else key.strip()
        is_string = _is_string(properties.get(name, {}))
        found[name] = value if is_string else _json_or_text(value)
    return _json_text(found)


def _is_string(kind: Any) -> bool:
    return isinstance(kind, Mapping) and kind.get("type") == "string"


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _properties(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The parameters of the tool ``name``, as its JSON schema describes them."""
    for tool in tools:
        if tool["function"]["name"] == name:
            parameters = tool["function"].get("parameters") or {}
            properties = parameters.get("properties")
            return properties if isinstance(properties, Mapping) else {}
    return {}


class ToolCallSplitter:
    """Tells text and calls of one answer apart; the space around calls belongs to neither.

    Args:
        tools: those that may be called, as a request describes them.
        parallel: whether more than one call is shown.
        follows: whether calls follow a grammar, so that what looks like the end of one amid its
            JSON is a part of it.
    """

    def __init__(
        self, tools: Sequence[Mapping[str, Any]], *, parallel: bool = True, follows: bool = False
    ) -> None:
        self._tools = tools
        self._parallel = parallel
        self._follows = follows
        self._before_end = ""  # of a call: what stands before an end that was none
        self._held = ""
        self._inside = False
        self._after_call = False
        self._space = ""  # before what may be a call: text if it is none
        self.num_calls = 0

    def push(self, text: str) -> list[str | Call]:
        """What ``text`` makes certain."""
        found: list[str | Call] = []
        self._held += text
        while (piece := cut(self._held, END if self._inside else BEGIN)).found:
            self._held = piece.after
            if self._inside:
                call = self._before_end + piece.before
                self._before_end = ""
                if self._follows and not _is_whole(call, self._tools):
                    self._before_end = call + END
                    continue
                self._show_call(found, call, END)
            else:
                shown = piece.before.rstrip()
                self._show(found, shown)
                self._space = "" if self._after_call else piece.before[len(shown) :]
            self._inside = not self._inside
        if not self._inside:  # the space at the end waits: a call would swallow it
            shown = piece.before.rstrip()
            self._held = piece.before[len(shown) :] + piece.after
            self._show(found, shown)
        return found

    def _show(self, found: list[str | Call], text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            found.append(text)

    def _show_call(self, found: list[str | Call], text: str, end: str) -> None:
        """What stood within a call's markers."""
        call = parse_call(text, self._tools)
        if call is None:
            self._after_call = False
            found.append(self._space + BEGIN + text + end)
            return
        self._after_call = True
        if self._parallel or not self.num_calls:
            self.num_calls += 1
            found.append(call)

    def flush(self) -> list[str | Call]:
        """What was held back, at the end; a call that was not closed counts if it is whole."""
        found: list[str | Call] = []
        held, self._held = self._before_end + self._held, ""
        if self._inside:
            self._inside = False
            self._show_call(found, held, "")
        else:
            self._show(found, held)
        return found
