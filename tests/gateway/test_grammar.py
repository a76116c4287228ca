"""What an answer must look like: read from a body, made a grammar, checked before it has a slot."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.gateway.small_tokenizers import CHATML, metaspace, save
from tests.gateway.stack import ListSink, new_plan
from tests.ipc.memory import memory
from trserve.edge.params_check import complaint
from trserve.errors import RequestError
from trserve.gateway.dispatcher import Job
from trserve.gateway.grammar_fields import MAX_CHARS, MAX_LINES
from trserve.gateway.requests import GenerationRequest, parse_chat, parse_completion
from trserve.gateway.service import Service
from trserve.gateway.sglang import parse_generate
from trserve.gateway.tool_calls import ToolCallSplitter
from trserve.grammar_limits import MAX_GRAMMAR_BYTES
from trserve.ipc.layout import PARAMS_BYTES
from trserve.params import decode_params, unpack_grammar

POINT: dict[str, Any] = {
    "title": "Point",
    "type": "object",
    "properties": {
        "x": {"type": "integer", "description": "how far"},
        "title": {"type": "string", "default": "none"},
    },
    "required": ["x"],
    "additionalProperties": False,
}
UNKNOWN = {"type": "object", "unevaluatedProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "move", "parameters": POINT}},
    {"type": "function", "function": {"name": 'say "hi"'}},
]
TOOL_TEMPLATE = CHATML + "{# tools #}"
MESSAGES = [{"role": "user", "content": "go"}]
BYTES = LLTokenizer("byte")


def new_service(folder: Path, template: str = TOOL_TEMPLATE, **changes: Any) -> Service:
    plan = new_plan(folder, **{"lengths": (512, 512)} | changes)
    endpoint = msgspec.structs.replace(plan.endpoint, chat_template=template)
    plan = msgspec.structs.replace(plan, endpoint=endpoint)
    with memory(slots=plan.slots, row_tokens=plan.row_tokens) as shared:
        return Service(plan, shared.slab())


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return new_service(tmp_path_factory.mktemp("model"))


def completion(**fields: Any) -> GenerationRequest:
    return parse_completion(json.dumps({"prompt": "x", **fields}).encode())


def chat(**fields: Any) -> GenerationRequest:
    return parse_chat(json.dumps({"messages": MESSAGES, **fields}).encode())


def jobs(service: Service, request: GenerationRequest) -> list[Job]:
    return service.prepare_all(request, lambda *_: ListSink())


def grammar(service: Service, request: GenerationRequest) -> str:
    packed = decode_params(jobs(service, request)[0].params).grammar
    return unpack_grammar(packed) if packed else ""


def refused(service: Service, request: GenerationRequest) -> RequestError:
    with pytest.raises(RequestError) as error:
        jobs(service, request)
    assert error.value.status == 400
    return error.value


def accepts(grammar: str, text: str) -> bool:
    """Whether ``text`` is a whole answer."""
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


OBJECT, NOT_OBJECT = '{"a": [1, "b"]}', "[1]"
DIGITS, LETTERS = "[0-9]{3}", "[a-z]+"
FORMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "json object": ({"response_format": {"type": "json_object"}}, OBJECT, NOT_OBJECT),
    "json schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}}},
        '{"x": 5}',
        '{"y": 5}',
    ),
    "guided json": ({"guided_json": POINT}, '{"x": 5, "title": "t"}', '{"title": "t"}'),
    "guided json as text": ({"guided_json": json.dumps(POINT)}, '{"x":5}', '{"x":true}'),
    "json schema as text": ({"json_schema": json.dumps(POINT)}, '{\n  "x": 5\n}', '{\n\n\n"x": 5}'),
    "any json": ({"json_schema": "$$ANY$$"}, NOT_OBJECT, "x"),
    "guided regex": ({"guided_regex": DIGITS}, "123", "1234"),
    "regex": ({"regex": LETTERS}, "abc", "Abc"),
    "choice": ({"guided_choice": ["yes", 'no\n"é"', "\x01\U0001f600"]}, 'no\n"é"', "ye"),
    "choice beyond": ({"guided_choice": ["\x01\U0001f600"]}, "\x01\U0001f600", "\x01"),
    "lark": ({"guided_grammar": f'start: "a" n\nn: /{DIGITS}/'}, "a123", "a12"),
    "ebnf": ({"ebnf": 'root ::= "a" n\nn ::= [0-9] | [0-9] n'}, "a12", "a"),
    "structured json": ({"structured_outputs": {"json": POINT}}, '{"x": 5}', "{}"),
    "structured regex": ({"structured_outputs": {"regex": DIGITS, "json": None}}, "123", "12"),
    "structured choice": ({"structured_outputs": {"choice": ["a", "b"]}}, "b", "c"),
    "structured grammar": ({"structured_outputs": {"grammar": 'start: "q"'}}, "q", "r"),
    "structured object": ({"structured_outputs": {"json_object": True}}, OBJECT, NOT_OBJECT),
}


@pytest.mark.parametrize(("fields", "right", "wrong"), FORMS.values(), ids=list(FORMS))
def test_a_form(service: Service, fields: dict[str, Any], right: str, wrong: str) -> None:
    for request in (completion(**fields), chat(**fields)):
        found = grammar(service, request)
        assert accepts(found, right)
        assert not accepts(found, wrong)


def test_a_form_of_sglang(service: Service) -> None:
    params = [{"regex": DIGITS}, {"json_schema": json.dumps(POINT)}, {"ebnf": 'root ::= "a"'}, {}]
    body = {"text": ["x"] * 4, "sampling_params": params}
    found = [grammar(service, each) for each in parse_generate(json.dumps(body).encode()).requests]
    assert accepts(found[0], "123") and accepts(found[1], '{"x": 1}') and accepts(found[2], "a")
    assert found[3] == ""
    bad = {"text": "x", "sampling_params": {"regex": "["}}
    (request,) = parse_generate(json.dumps(bad).encode()).requests
    assert refused(service, request).param == "sampling_params.regex"


NOTHING: list[dict[str, Any]] = [
    {},
    {"response_format": None},
    {"response_format": {"type": "text"}},
    {"guided_json": {}, "guided_regex": "", "guided_choice": [], "guided_grammar": None},
    {"structured_outputs": {}, "regex": "", "json_schema": "", "ebnf": ""},
    {"structured_outputs": {"json": None, "json_object": False, "disable_any_whitespace": False}},
]


@pytest.mark.parametrize("fields", NOTHING, ids=str)
def test_nothing_is_asked_for(service: Service, fields: dict[str, Any]) -> None:
    request = chat(**fields)
    assert not request.constrained
    assert grammar(service, request) == ""


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no object": ({"response_format": "json"}, "response_format"),
    "no type": ({"response_format": {}}, "response_format.type"),
    "no such type": ({"response_format": {"type": "xml"}}, "response_format.type"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    "no schema in it": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema",
    ),
    "number for a schema": ({"guided_json": 5}, "guided_json"),
    "no json": ({"guided_json": "{"}, "guided_json"),
    "list for a schema": ({"json_schema": "[1]"}, "json_schema"),
    "number for an expression": ({"guided_regex": 5}, "guided_regex"),
    "object for an expression": ({"regex": {"a": 1}}, "regex"),
    "text for choices": ({"guided_choice": "yes"}, "guided_choice"),
    "numbers for choices": ({"guided_choice": [1]}, "guided_choice"),
    "too many choices": ({"guided_choice": ["a"] * 5000}, "guided_choice"),
    "list for a grammar": ({"guided_grammar": ["x"]}, "guided_grammar"),
    "long expression": ({"regex": "a" * (MAX_CHARS + 1)}, "regex"),
    "long schema": ({"guided_json": {"enum": ["a" * MAX_CHARS]}}, "guided_json"),
    "long grammar": ({"ebnf": "\n" * (MAX_LINES + 1)}, "ebnf"),
    "text for several": ({"structured_outputs": "json"}, "structured_outputs"),
    "wrong in several": ({"structured_outputs": {"json": 1}}, "structured_outputs.json"),
    "tags": ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    "tags alone": ({"structural_tag": {"x": 1}}, "structural_tag"),
    "white space": (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
    ),
    "two in one": ({"structured_outputs": {"json": POINT, "regex": "a"}}, "structured_outputs"),
    "two": ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
}


@pytest.mark.parametrize(("fields", "param"), BAD.values(), ids=list(BAD))
def test_what_is_no_form_is_named(fields: dict[str, Any], param: str) -> None:
    for parse in (completion, chat):
        with pytest.raises(RequestError) as error:
            parse(**fields)
        assert (error.value.status, error.value.param) == (400, param)


def _format(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema, **more}}}


def _members(first: int) -> dict[str, Any]:
    names = [f"p{number}" for number in range(first, first + 20)]
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}}


FORMAT = "response_format.json_schema"
UNSOUND: dict[str, tuple[dict[str, Any], str, str]] = {
    "type": (_format({"type": 5}), FORMAT, "type must be"),
    "nothing satisfies it": (_format({"type": "integer", "minimum": 2, "maximum": 1}), FORMAT, ""),
    "reference": (_format({"$ref": "#/$defs/x"}), FORMAT, "does not exist"),
    "reference elsewhere": (_format({"$ref": "http://x/y"}), FORMAT, "not present"),
    "circle": (_format({"$ref": "#"}), FORMAT, ""),
    "complex": (_format({"anyOf": [_members(number) for number in range(45)]}), FORMAT, "items"),
    "long to look through": ({"regex": "(a{1000}){1000}b?" * 3}, "regex", ""),
    "keyword": (_format(UNKNOWN), FORMAT, "unevaluatedProperties"),
    "strict keyword": (_format(UNKNOWN, strict=True), FORMAT, "unevaluatedProperties"),
    "deep": (_format(json.loads('{"items":' * 200 + "{}" + "}" * 200)), FORMAT, "recursion"),
    "expression": ({"guided_regex": "["}, "guided_regex", "unclosed"),
    "lookahead": ({"regex": "(?=a)"}, "regex", "look-around"),
    "deep expression": ({"regex": "(" * 2000 + ")" * 2000}, "regex", "invalid regex"),
    "grammar": ({"guided_grammar": 'start: "a'}, "guided_grammar", "lexer error"),
    "no rule": ({"guided_grammar": "x"}, "guided_grammar", "Expected ::="),
    "no such rule": ({"ebnf": "root ::= x"}, "ebnf", "'x' not found"),
    "in several": (
        {"structured_outputs": {"regex": "["}},
        "structured_outputs.regex",
        "unclosed",
    ),
}


@pytest.mark.parametrize(("fields", "param", "reason"), UNSOUND.values(), ids=list(UNSOUND))
def test_what_cannot_be_followed_is_named(
    service: Service, fields: dict[str, Any], param: str, reason: str
) -> None:
    error = refused(service, chat(**fields))
    assert error.param == param
    assert error.message.startswith(f"{param} cannot be followed: ")
    assert reason in error.message
    assert len(error.message) < 400 and "\n" not in error.message


def test_what_is_not_strict_passes_over_what_cannot_be_held_to(service: Service) -> None:
    found = grammar(service, chat(**_format(UNKNOWN, strict=False)))
    assert accepts(found, '{"a": 1}')


def test_a_missing_extra_is_named(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    required = chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    for request, param in (
        (completion(guided_regex="never seen before"), "guided_regex"),
        (required, "tool_choice"),
    ):
        error = refused(service, request)
        assert error.param == param
        assert "pip install trserve[structured]" in error.message
    assert grammar(service, chat(tools=TOOLS)) == ""


def test_the_gateway_loads_it_for_nobody_else() -> None:
    assert "llguidance" not in _modules_after("import trserve.gateway.main, trserve.workers.main")


def _modules_after(code: str) -> Sequence[str]:
    code += "\nimport trserve.gateway.service, trserve.workers.grammar, sys\nprint(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ran.stdout.split()


def test_one_that_does_not_fit_is_refused(service: Service) -> None:
    drawn = random.Random("names")
    names = [f"{drawn.getrandbits(128):x}" for _ in range(200)]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
    error = refused(service, completion(guided_json=schema))
    assert error.param == "guided_json"
    assert "bytes, compressed; 39" in error.message
    plain = {f"a member named {n}": {"type": "string", "description": "x" * 60} for n in range(150)}
    found = grammar(service, completion(guided_json={"type": "object", "properties": plain}))
    assert len(found) > PARAMS_BYTES and '"description"' not in found


def test_tools_have_a_common_bound_before_compression(service: Service) -> None:
    """Another host looks at it too, and would count what is beyond it against this one."""
    schema = {"type": "object", "properties": {"a": {"const": " " * 32_000}}}

    def asks(count: int) -> GenerationRequest:
        names = [f"t{number}" for number in range(count)]
        made = [{"name": name, "parameters": schema, "strict": True} for name in names]
        tools = [{"type": "function", "function": each} for each in made]
        return chat(tools=tools, tool_choice="required")

    error = refused(service, asks(34))
    assert error.param == "tool_choice" and f"{MAX_GRAMMAR_BYTES} at most" in error.message
    (job,) = jobs(service, asks(30))
    assert complaint(decode_params(job.params), 10**6) is None


def test_descriptions_are_left_out_and_names_are_not(service: Service) -> None:
    schema = POINT | {"$defs": {"title": {"const": {"title": "kept"}}}}
    found = json.loads(grammar(service, completion(guided_json=schema)))
    (part,) = found["grammars"]
    assert set(part["json_schema"]["properties"]) == {"x", "title"}
    assert part["json_schema"]["properties"]["title"] == {"type": "string"}
    assert part["json_schema"]["$defs"]["title"] == {"const": {"title": "kept"}}
    assert "title" not in part["json_schema"]


def test_there_may_be_many_choices(service: Service) -> None:
    choices = [f"c{number}" for number in range(1000)]
    found = grammar(service, completion(guided_choice=[*choices, "", "c"]))
    assert all(accepts(found, choice) for choice in ("c7", "c77", "c777", "", "c"))
    assert not accepts(found, "c1000") and not accepts(found, "x")


def test_choices_share_it(service: Service) -> None:
    found = jobs(service, completion(guided_regex=DIGITS, n=3))
    assert len({decode_params(job.params).grammar for job in found}) == 1


def test_a_tokenizer_without_bytes_cannot_follow(tmp_path: Path) -> None:
    changed = new_service(tmp_path / "one")
    save(metaspace(), tmp_path / "two")
    plan = msgspec.structs.replace(changed.plan, tokenizer_path=str(tmp_path / "two"))
    with memory(slots=plan.slots, row_tokens=plan.row_tokens) as shared:
        other = Service(plan, shared.slab())
    assert refused(other, completion(prompt=[1], guided_regex="a")).param == "guided_regex"
    endless = new_service(tmp_path / "three", eos_token_ids=[])
    assert refused(endless, completion(prompt=[1], guided_regex="a")).param == "guided_regex"


# ---- calls of tools ----

MOVE = '<tool_call>\n{"name": "move", "arguments": {"x": 5}}\n</tool_call>'
SAY = '<tool_call>\n{"name": "say \\"hi\\"", "arguments": {}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "move"}}


def test_any_call_must_come(service: Service) -> None:
    found = grammar(service, chat(tools=TOOLS, tool_choice="required"))
    for right in (MOVE, SAY, f"{MOVE}\n{SAY}"):
        assert accepts(found, right)
        calls = ToolCallSplitter(TOOLS, follows=True).push(right)
        assert (
            [call.name for call in calls]
            == [  # type: ignore[union-attr]
                {"m": "move", "s": 'say "hi"'}[part[0]] for part in right.split('"name": "')[1:]
            ]
        )
    for wrong in ("", "5", f"{MOVE} {MOVE}", MOVE.replace("move", "run"), MOVE.replace("5", '"5"')):
        assert not accepts(found, wrong)
    one = grammar(service, chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False))
    assert accepts(one, SAY) and not accepts(one, f"{MOVE}\n{SAY}")


def test_one_call_must_come(service: Service) -> None:
    found = grammar(service, chat(tools=TOOLS, tool_choice=NAMED))
    assert accepts(found, MOVE)
    assert not accepts(found, SAY) and not accepts(found, f"{MOVE}\n{MOVE}")
    form = {"response_format": {"type": "json_object"}}
    assert grammar(service, chat(tools=TOOLS, tool_choice=NAMED, **form)) == found


def test_a_call_may_come_instead_of_the_form(service: Service) -> None:
    found = grammar(service, chat(tools=TOOLS, guided_regex=DIGITS))
    assert accepts(found, MOVE) and accepts(found, f"{MOVE}\n{SAY}") and accepts(found, "123")
    assert not accepts(found, "12") and not accepts(found, f"{MOVE}123")
    none = grammar(service, chat(tools=TOOLS, tool_choice="none", guided_regex=DIGITS))
    assert accepts(none, "123") and not accepts(none, MOVE)


def test_parameters_that_cannot_be_held_to_are_named_if_they_are_strict(service: Service) -> None:
    def tools(**more: Any) -> list[dict[str, Any]]:
        function = {"name": "f", "parameters": UNKNOWN, **more}
        return [TOOLS[0], {"type": "function", "function": function}]

    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert accepts(grammar(service, chat(tools=tools(), tool_choice="required")), call)
    error = refused(service, chat(tools=tools(strict=True), tool_choice="required"))
    assert error.param == "tools[1].function.parameters"


def test_what_looks_like_the_end_of_a_call_may_stand_in_one() -> None:
    text = MOVE.replace('"x": 5', '"x": 5, "title": "a</tool_call>b"')
    for size in (1, 7, len(text)):
        splitter = ToolCallSplitter(TOOLS, follows=True)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        found = [part for piece in pieces for part in splitter.push(piece)] + splitter.flush()
        (call,) = found
        assert json.loads(call.arguments)["title"] == "a</tool_call>b"  # type: ignore[union-attr]
    # One that is cut off is text, all of it.
    splitter = ToolCallSplitter(TOOLS, follows=True)
    found = splitter.push(text[:-20]) + splitter.flush()
    assert "".join(map(str, found)) == text[:-20]


ELEMENTS = TOOL_TEMPLATE + "{# <function= <parameter= #}"
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"$ref": "#/$defs/few"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "where": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["city", "unit"],
    "$defs": {"few": {"type": "integer", "minimum": 1, "maximum": 9}},
}
ELEMENT_TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop"}},
    {"type": "function", "function": {"name": "a>b"}},
]


def element_call(name: str, **parameters: str) -> str:
    parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"


def test_calls_have_elements_where_the_template_has(tmp_path: Path) -> None:
    service = new_service(tmp_path, ELEMENTS)
    found = grammar(service, chat(tools=ELEMENT_TOOLS, tool_choice="required"))
    city = "two\nlines, <b> and </tool_call>"
    whole = element_call("weather", city=city, days="3", unit="C", where="[1, 2]")
    least = element_call("weather", city="Ulm", unit="F")
    other = '<tool_call>\n{"name": "a>b", "arguments": {}}\n</tool_call>'
    for right in (whole, least, element_call("stop"), other, f"{whole}\n{least}"):
        assert accepts(found, right)
    for wrong in (
        element_call("weather", city="Ulm"),
        element_call("weather", city="Ulm", days="10", unit="C"),
        element_call("weather", city="Ulm", unit="K"),
        element_call("stop", x="1"),
        element_call("a>b"),
    ):
        assert not accepts(found, wrong)
    for size in (3, len(whole)):
        splitter = ToolCallSplitter(ELEMENT_TOOLS, follows=True)
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
        (call,) = [part for piece in pieces for part in splitter.push(piece)] + splitter.flush()
        arguments = json.loads(call.arguments)  # type: ignore[union-attr]
        assert arguments == {"city": city, "days": 3, "unit": "C", "where": [1, 2]}


# ---- reasoning ----

THINKING = TOOL_TEMPLATE + "{# </think> #}"
OPENED = THINKING + "<think>\n"
CLOSED = THINKING + "<think>\n\n</think>\n\n"
THOUGHT = "hm, <b>3</b>\nor so</think>\n\n"


def test_reasoning_may_come_first(tmp_path: Path) -> None:
    service = new_service(tmp_path, THINKING)
    for fields, right in (({"guided_regex": DIGITS}, "123"), ({"tool_choice": NAMED}, MOVE)):
        found = grammar(service, chat(tools=TOOLS, **fields))
        assert accepts(found, right) and accepts(found, f"<think>\n{THOUGHT}{right}")
        assert not accepts(found, f"{THOUGHT}{right}") and not accepts(found, f"<think>{THOUGHT}x")
    within = grammar(service, chat(guided_regex=DIGITS, separate_reasoning=False))
    assert accepts(within, "123") and not accepts(within, f"<think>{THOUGHT}123")
    text = grammar(service, completion(guided_regex=DIGITS))
    assert not accepts(text, f"<think>{THOUGHT}123")


def test_reasoning_that_the_template_began_goes_on(tmp_path: Path) -> None:
    found = grammar(new_service(tmp_path, OPENED), chat(guided_regex=DIGITS))
    assert accepts(found, f"{THOUGHT}123")
    assert not accepts(found, "123")
    closed = grammar(new_service(tmp_path, CLOSED), chat(guided_regex=DIGITS))
    assert accepts(closed, "123") and not accepts(closed, f"<think>{THOUGHT}123")
