"""From the form that a request wants to the grammar that workers follow, checked.

A grammar covers a whole answer: reasoning that may come first, calls of tools, and what the form
says. It is checked here, before a slot is taken, with the library that follows it later, over
single bytes instead of a tokenizer's ids. The library is loaded for the first request that needs
it. Knows no requests, no tokens and no slab.
"""

from __future__ import annotations

import json
import re
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final

import msgspec

from trserve.errors import RequestError
from trserve.gateway.grammar_calls import CallRules, Tool, call_rules
from trserve.gateway.grammar_fields import Form
from trserve.gateway.reasoning import Reasons
from trserve.grammar_limits import MAX_GRAMMAR_BYTES, WRITTEN, new_matcher
from trserve.params import pack_grammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer

INSTALL: Final = "pip install trserve[structured]"
BLANKS: Final = r"[ ]{1,2}|\r?\n[ \t]{0,24}"
"""White space between two tokens of JSON: without a bound, a model may write it for ever."""

_KEPT: Final = 64
_MAX_MESSAGE: Final = 300
_THINK_END: Final = "</think>"

_LARK_PARTS: Final = re.compile(
    r'"(?:\\.|[^"\\])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\])+/|(?P<token><[^<>\s]+>)', re.DOTALL
)
"""Texts, comments, expressions and tokens of a grammar."""


class Wanted(msgspec.Struct, frozen=True):
    """All that decides a grammar.

    ``tools``: those that may be called instead of an answer in ``form``, or must be where there is
    none; ``repeats``: one call may follow the other; ``elements``: parameters are elements.
    """

    form: Form | None
    tools: tuple[Tool, ...]
    repeats: bool
    elements: bool
    reasons: Reasons


@lru_cache(_KEPT)
def compiled(wanted: Wanted) -> bytes:
    """The grammar of the answers that are ``wanted``, packed.

    Raises:
        RequestError: the library is missing, or the grammar is none; ``param`` names whose fault.
    """
    param = "tool_choice" if wanted.form is None else wanted.form.param
    _require_library(param)
    parts: dict[str, dict[str, Any]] = {}
    calls = None
    if wanted.tools:
        calls = call_rules(wanted.tools, repeats=wanted.repeats, elements=wanted.elements)
        for name, (schema, tool) in calls.schemas.items():
            parts[name] = _json_part(schema, tool.param, lenient=tool.lenient)
    if wanted.form is not None:
        parts[_name(wanted.form)] = _form_part(wanted.form)
    entries = [{"name": name, **part} for name, part in parts.items()]
    if calls is not None or wanted.reasons != "never":
        whole = _whole(calls, wanted.reasons, form=wanted.form)
        entries.insert(0, {"name": "whole", "lark_grammar": whole})
    text = json.dumps({"grammars": entries}, ensure_ascii=False)
    _check_length(text, param)
    _check(text, param)
    return pack_grammar(text)


def _require_library(param: str) -> None:
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"{param} needs constrained decoding, which is not installed; on the server: {INSTALL}",
            param=param,
        ) from error


def _form_part(form: Form) -> dict[str, Any]:
    if form.kind == "json":
        return _json_part(form.source, form.param, lenient=form.lenient)
    part = {"lark_grammar": _lark(form)}
    if form.kind == "grammar":
        _check_names_no_token(part["lark_grammar"], form.param)
    _check(json.dumps({"grammars": [{"name": _name(form), **part}]}), form.param)
    return part


def _name(form: Form) -> str:
    """Of its part: it tells workers too whose rules they are."""
    return WRITTEN if form.kind == "grammar" else "answer"


def _lark(form: Form) -> str:
    if form.kind == "choice":
        # A terminal: of rules there may not be as many.
        return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, json.loads(form.source)))
    from llguidance import LLMatcher, grammar_from

    if form.kind == "regex":
        made = json.loads(LLMatcher.grammar_from_regex(form.source))
        return str(made["grammars"][0]["lark_grammar"])
    try:
        return grammar_from("grammar", form.source)
    except ValueError as error:
        raise _refusal(str(error), form.param) from error


def _json_part(schema: str, param: str, *, lenient: bool) -> dict[str, Any]:
    from llguidance import LLMatcher

    options: Any = {"whitespace_pattern": BLANKS, "lenient": lenient}
    try:
        made = json.loads(LLMatcher.grammar_from_json_schema(schema, overrides=options))
    except ValueError as error:
        raise _refusal(str(error), param) from error
    part = {"json_schema": made["grammars"][0]["json_schema"]}
    _check(json.dumps({"grammars": [part]}), param)
    return part


def _whole(calls: CallRules | None, reasons: Reasons, *, form: Form | None) -> str:
    """The answer's parts, in Lark's syntax."""
    bodies = [f"@{_name(form)}"] if form is not None else []
    rules = []
    if calls is not None:
        bodies.append("calls")
        rules += calls.rules
    start = "(" + " | ".join(bodies) + ")"
    if reasons != "never":
        begin = "" if reasons == "already" else '"<think>" '
        rules += [f'reasoning[lazy]: {begin}/(.|\\n)*/ "{_THINK_END}"', "BLANKS: /[ \\n]{0,4}/"]
        thought = "reasoning BLANKS"
        start = f"{thought} {start}" if reasons == "already" else f"({thought})? {start}"
    return "\n".join(["%llguidance {}", f"start: {start}", *rules]) + "\n"


# ---- checks ----


@cache
def _bytes_for_ids() -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _check(grammar: str, param: str) -> None:
    """RequestError if ``grammar`` is none, or nothing can be written by it.

    What an answer must begin with is written, so that the first choice shows whether it keeps
    within the limits.
    """
    matcher = new_matcher(_bytes_for_ids(), grammar)
    if not matcher.is_error():
        matcher.consume_tokens(_bytes_for_ids().tokenize_bytes(matcher.compute_ff_bytes()))
        matcher.compute_bitmask()
    if matcher.is_error():
        raise _refusal(matcher.get_error(), param)


def _check_length(grammar: str, param: str) -> None:
    """RequestError for one that another host would refuse, which looks at the same bound."""
    size = len(grammar.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise RequestError(
            f"{param}: the grammar takes {size} bytes; {MAX_GRAMMAR_BYTES} at most: send smaller "
            "schemas, or fewer tools",
            param=param,
        )


def _check_names_no_token(lark: str, param: str) -> None:
    """Grammars are checked over bytes, whose numbers and special tokens are not a model's."""
    for part in _LARK_PARTS.finditer(lark):
        if part["token"]:
            raise RequestError(
                f"{param}: {part.group()[:40]} is a token by its name or number, which is not "
                'supported; write its text, as in "ab"',
                param=param,
            )


def _refusal(reason: str, param: str) -> RequestError:
    reason = " ".join(reason.partition("<state>")[0].split())[:_MAX_MESSAGE]
    return RequestError(f"{param} cannot be followed: {reason}", param=param)
