"""Calls whose parameters are elements: what their grammar enforces is what the client gets."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from tests.gateway.test_grammar import (
    BYTES,
    ELEMENTS,
    accepts,
    chat,
    element_call,
    grammar,
    new_service,
    refused,
)
from trserve.gateway.service import Service
from trserve.gateway.tool_calls import Call, ToolCallSplitter, parse_call

NOTE = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "kind": {"type": "string", "enum": ["a\nb", "</function>", "x</parameter>\ny", " c "]},
    },
    "required": ["text", "count", "kind"],
}


def tools_of(parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "note", "parameters": parameters}}]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return new_service(tmp_path_factory.mktemp("elements"), ELEMENTS)


@pytest.fixture(scope="module")
def note_grammar(service: Service) -> str:
    tools = tools_of(NOTE)
    return grammar(service, chat(tools=tools, tool_choice="required", parallel_tool_calls=False))


def read(text: str, size: int, parameters: Any = NOTE) -> list[Any]:
    """What a client gets of ``text``: the arguments of calls, and text that is none."""
    splitter = ToolCallSplitter(tools_of(parameters), follows=True)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    found = [part for piece in pieces for part in splitter.push(piece)] + splitter.flush()
    return [json.loads(part.arguments) if isinstance(part, Call) else part for part in found]


MARKS = [
    "</function>",
    "</tool_call>",
    "<parameter=count>",
    "</parameter>",
    "<tool_call>",
    "<function=note>",
    "\n",
    " ",
    "7",
    "\u00e9",
]


def test_what_stands_in_a_text_ends_no_call_and_makes_no_argument(note_grammar: str) -> None:
    draw = random.Random(5)
    texts = ["".join(draw.choices(MARKS, k=draw.randrange(9))) for _ in range(300)]
    followed = 0
    for text in [*texts, "</function>\n</tool_call>", "\nq\n<parameter=count>\n7\n"]:
        call = element_call("note", text=text, count="5", kind="</function>")
        if "</parameter>\n" in text + "\n":
            assert not accepts(note_grammar, call)
            continue
        assert accepts(note_grammar, call)
        expected = {"text": text, "count": 5, "kind": "</function>"}
        assert read(call, 1 + followed % 40) == [expected]
        followed += 1
    assert 100 < followed < 300


def test_every_call_that_the_grammar_lets_be_written_is_read_whole(note_grammar: str) -> None:
    """Written mark by mark, whatever the grammar lets follow."""
    draw, written = random.Random(3), 0
    for _ in range(40):
        matcher, text = LLMatcher(BYTES, note_grammar, log_level=0), ""
        while not text.endswith("</function>\n</tool_call>") or not matcher.is_accepting():
            close = [] if len(text) < 120 else ["\n</parameter>\n", "\n"]
            order = [*close, *draw.sample(MARKS, len(MARKS)), *map(chr, range(32, 127))]
            text += next(piece for piece in order if _consume(matcher, piece))
            if len(text) > 500:
                break
        else:
            (arguments,) = read(text, 11)
            assert list(arguments) == ["text", "count", "kind"]
            assert type(arguments["count"]) is int
            assert arguments["kind"] in ("a\nb", "</function>", " c ")
            written += 1
    assert written > 20


def _consume(matcher: LLMatcher, piece: str) -> bool:
    """Write ``piece`` if it may follow."""
    tokens = BYTES.tokenize_str(piece)
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens)


def test_choices_are_those_that_can_be_written(service: Service, note_grammar: str) -> None:
    for kind in ("a\nb", "</function>", " c "):
        call = element_call("note", text="", count="5", kind=kind)
        assert accepts(note_grammar, call)
        assert read(call, 9) == [{"text": "", "count": 5, "kind": kind}]
    assert not accepts(note_grammar, element_call("note", text="", count="5", kind="d"))
    never = {"properties": {"kind": {"type": "string", "const": "x</parameter>\n"}}}
    error = refused(service, chat(tools=tools_of(never), tool_choice="required"))
    assert error.param == "tools[0].function.parameters" and "kind" in str(error)


def test_anything_may_be_a_parameter(service: Service) -> None:
    parameters = {"properties": {"x": True, "y": {}}, "required": ["x"]}
    found = grammar(service, chat(tools=tools_of(parameters), tool_choice="required"))
    call = element_call("note", x='{"a": [1]}', y="null")
    assert accepts(found, call)
    assert read(call, 9, parameters) == [{"x": {"a": [1]}, "y": None}]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 5},
        {"properties": None},
        {"properties": ["a"]},
        {"properties": {"a": {"type": "string"}}, "required": 5},
        {"properties": {"a": {"type": "string", "enum": 5}}},
        {"properties": {"a": {"type": "string", "enum": None}}},
        {"properties": {"a": 5}},
    ],
)
def test_a_schema_that_is_none_is_named(service: Service, schema: Any, strict: bool) -> None:
    tools = tools_of(schema)
    tools[0]["function"]["strict"] = strict
    error = refused(service, chat(tools=tools, tool_choice="required"))
    assert error.param == "tools[0].function.parameters"
    assert error.param in str(error)


FREE = {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<parameter=a>x</parameter><parameter=b>5</parameter></function>", {"a": "x", "b": 5}),
        ("<parameter=a>x</parameter>\n<parameter=b>5</parameter></function>", {"a": "x", "b": 5}),
        ("<parameter=a>\nx\n<parameter=b>\n5\n</parameter></function>", {"a": "x", "b": 5}),
        ("\n<parameter= a >\nx</function>\n</parameter>\n</function>\n", {"a": "x</function>"}),
        (
            "<parameter=a>x</parameter></function>\n<function=g><parameter=b>5</parameter>",
            {"a": "x"},
        ),
        ("<parameter=a>\nx", {"a": "x"}),
        ("</function>", {}),
        ("", {}),
    ],
)
def test_what_no_grammar_held_to_a_form_is_read_as_far_as_it_goes(
    text: str, expected: dict[str, Any]
) -> None:
    call = parse_call(f"<function=note>{text}", tools_of(FREE))
    assert call is not None
    assert json.loads(call.arguments) == expected


def test_tokens_by_number_or_name_are_refused(tmp_path: Path) -> None:
    service = new_service(tmp_path)
    for rules in (
        "start: <[1-2]>",
        'start: "a" x\nx: /b/ | <[^7]>',
        "start: <|system|>",
        'start: "\\"" <[*]> "\\""',
        "start: /\\// <[1]> /b/",
    ):
        error = refused(service, chat(guided_grammar=rules))
        assert error.param == "guided_grammar" and "by its name or number" in str(error)
    for rules, right in (
        ('start: "<[1-2]>" // <[1]>\n', "<[1-2]>"),
        ("# <[1]>\nstart: /<[a-z]+>/ A\nA: /\\/<|b/", "<a>/<"),
        ('start: "\\"<[1]>" %json {"const": "\\\\<[1]>"}', '"<[1]>"\\\\<[1]>"'),
    ):
        assert accepts(grammar(service, chat(guided_grammar=rules)), right)
    assert accepts(grammar(service, chat(ebnf='root ::= [<>] "<a>"')), "<<a>")
