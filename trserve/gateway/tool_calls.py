"""Calls of tools in a model's text, in the formats of Hermes and Qwen.

A call stands between ``<tool_call>`` and ``</tool_call>``: a JSON object with ``name`` and
``arguments`` (Hermes, Qwen2.5, Qwen3), or ``<function=NAME>`` with ``<parameter=KEY>`` elements
(Qwen3-Coder). A call is shown when it is complete; what is none is text. Knows no reasoning and
nothing of responses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from trserve.gateway.markers import cut

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
_FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="


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
    """Whether ``text`` is a call to its end; elements are read as far as there are any."""
    if text.lstrip().startswith(_FUNCTION):
        return text.rstrip().endswith(_FUNCTION_END)
    return parse_call(text, tools) is not None


def _read_call(text: str, tools: Sequence[Mapping[str, Any]]) -> Call | None:
    if text.startswith(_FUNCTION):
        name, found, rest = text.removeprefix(_FUNCTION).partition(">")
        name = name.strip()
        if not (name and found):
            return None
        return Call(name, _arguments(rest.partition(_FUNCTION_END)[0], _properties(name, tools)))
    call = json.loads(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return Call(call["name"], arguments if isinstance(arguments, str) else _json_text(arguments))


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _arguments(text: str, properties: Mapping[str, Any]) -> str:
    """``<parameter=KEY>`` elements as a JSON object; what the tool calls a string stays one."""
    found: dict[str, Any] = {}
    for element in text.split(_PARAMETER)[1:]:
        key, _, value = element.partition(">")
        value = value.partition("</parameter>")[0].removeprefix("\n").removesuffix("\n")
        is_string = _is_string(properties.get(key.strip(), {}))
        found[key.strip()] = value if is_string else _json_or_text(value)
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
