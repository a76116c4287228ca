"""The grammar of a request's answers, and whether the server can follow it.

Puts together what the request's parts ask for: its form, its tools, the reasoning that may come
first. What a grammar looks like is ``grammar_compiler``'s matter. Knows no slab and no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trserve.errors import RequestError
from trserve.gateway.grammar_calls import Tool
from trserve.gateway.grammar_compiler import Wanted, compiled
from trserve.gateway.grammar_fields import checked_schema
from trserve.gateway.message_parts import reasons_first
from trserve.gateway.prompts import Prompt
from trserve.gateway.requests import GenerationRequest
from trserve.gateway.tokenizer import Tokenizer
from trserve.ipc.layout import PARAMS_BYTES


def grammar_of(
    request: GenerationRequest,
    prompt: Prompt,
    tokenizer: Tokenizer,
    eos_token_ids: Sequence[int],
    *,
    reasons: bool,
) -> bytes:
    """The packed grammar of answers to ``prompt``; empty where they are free.

    Args:
        reasons: whether reasoning is told apart in them.

    Raises:
        RequestError: there is no such grammar, or nothing to follow it with.
    """
    if not request.constrained:
        return b""
    _check_vocabulary(tokenizer, eos_token_ids, request)
    forced = bool(request.called_tools)
    return compiled(
        Wanted(
            form=None if forced else request.form,
            tools=_tools(request),
            repeats=request.parallel_tool_calls and (request.calls_any or not forced),
            elements=bool(request.tools) and tokenizer.has_elements,
            reasons=reasons_first(request, prompt.text, reasons=reasons),
        )
    )


def check_room(blob: bytes, grammar: bytes, request: GenerationRequest) -> None:
    """RequestError if the parameters ``blob`` is too long because of ``grammar``."""
    if grammar and len(blob) > PARAMS_BYTES:
        room, param = PARAMS_BYTES - len(blob) + len(grammar), _param(request)
        raise RequestError(
            f"{param}: the grammar takes {len(grammar)} bytes, compressed; {max(room, 0)} at most "
            "in this request: send a smaller schema, or fewer tools",
            param=param,
        )


def _param(request: GenerationRequest) -> str:
    """The parameter that made the grammar of ``request``."""
    if request.called_tools or request.form is None:
        return "tool_choice"
    return request.form.param


def _check_vocabulary(
    tokenizer: Tokenizer, eos_token_ids: Sequence[int], request: GenerationRequest
) -> None:
    if tokenizer.token_bytes() is None or not any(t < tokenizer.size for t in eos_token_ids):
        param = _param(request)
        raise RequestError(
            f"{param}: the model's tokenizer does not say what each id stands for, or which one "
            "ends an answer; constrained decoding needs both",
            param=param,
        )


def _tools(request: GenerationRequest) -> tuple[Tool, ...]:
    """Those that an answer may call: the forced ones, else all beside an answer in its form."""
    functions = [tool["function"] for tool in request.tools]
    return tuple(
        _tool(function, f"tools[{index}].function.parameters")
        for index, function in enumerate(functions)
        if not request.called_tools or function["name"] in request.called_tools
    )


def _tool(function: dict[str, Any], param: str) -> Tool:
    """One without parameters takes an object without members."""
    schema = function.get("parameters") or {"properties": {}, "additionalProperties": False}
    text = checked_schema({"type": "object"} | schema, param)
    return Tool(function["name"], text, param, function.get("strict") is not True)
