"""Reasoning and calls of tools in a model's text: the same parts however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trserve.gateway.markers import cut
from trserve.gateway.message_parts import PartSplitter, part_splitter, whole_message
from trserve.gateway.reasoning import ReasoningSplitter
from trserve.gateway.requests import GenerationRequest
from trserve.gateway.tool_calls import Call, ToolCallSplitter, parse_call

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)


def splitter(prompt: str = "", *, show: bool = True, parallel: bool = True) -> PartSplitter:
    tools = ToolCallSplitter(TOOLS, parallel=parallel)
    return PartSplitter(ReasoningSplitter(prompt), tools, show_reasoning=show)


def message(text: str, prompt: str = "", cuts: tuple[int, ...] = (), **how: bool) -> dict[str, Any]:
    """The message that ``text``, cut at ``cuts``, adds up to, without the ids of its calls."""
    parts = splitter(prompt, **how)
    ends = [*sorted(cut for cut in set(cuts) if cut < len(text)), len(text)]
    deltas, start = [], 0
    for end in ends:
        deltas += parts.push(text[start:end], last=end == len(text))
        start = end
    found = whole_message(deltas)
    ids = [call.pop("id") for call in found.get("tool_calls", ())]
    assert len(set(ids)) == len(ids)
    return found


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("text", "prompt", "reasoning", "content"),
    [
        ("<think>\nhm\n\n</think>\n\nyes", "", "hm", "yes"),
        ("\n<think>a</think>b", "", "a", "b"),
        ("hm\n</think>\n\nyes", "...<think>\n", "hm", "yes"),
        ("yes", "", None, "yes"),
        ("yes <think>no</think>", "", None, "yes <think>no</think>"),
        ("<think>never ends ", "", "never ends", ""),
        ("<think>a</think>", "", "a", ""),
        ("<think></think>b", "", None, "b"),
        ("<thi", "", None, "<thi"),
        ("<think>a < b </thin</think>c", "", "a < b </thin", "c"),
        ("  two  ", "", None, "  two  "),
    ],
)
def test_reasoning_and_answer(text: str, prompt: str, reasoning: str | None, content: str) -> None:
    found = message(text, prompt)
    assert (found.get("reasoning_content"), found["content"]) == (reasoning, content)


def test_reasoning_that_is_not_wanted_is_left_out() -> None:
    found = message("<think>a</think>b", show=False)
    assert found == {"role": "assistant", "content": "b", "refusal": None}


@pytest.mark.parametrize(
    ("text", "arguments"),
    [(HERMES, '{"city": "Köln", "days": 2}'), (CODER, '{"city": "12", "days": 2}')],
)
def test_a_call(text: str, arguments: str) -> None:
    found = message(text)
    assert found["content"] is None
    assert found["tool_calls"] == [call("weather", arguments)]
    assert message(text.removesuffix("</tool_call>")) == found  # the end of turn closes it as well


def test_calls_among_text_and_reasoning() -> None:
    found = message(f"<think>\nhm\n</think>\n\nLet me see.\n{HERMES}\n{CODER}\nDone. ")
    assert found["reasoning_content"] == "hm"
    assert found["content"] == "Let me see.Done. "
    assert [each["function"]["name"] for each in found["tool_calls"]] == ["weather", "weather"]


def test_one_call_where_they_may_not_be_parallel() -> None:
    assert len(message(HERMES + HERMES, parallel=False)["tool_calls"]) == 1


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nnothing\n</tool_call>",
        '<tool_call>{"name": 1}</tool_call>',
        "<tool_call>[1]</tool_call>",
        "<tool_call><function=></function></tool_call>",
        "<tool_call>" + "[" * 100_000,
        "a <tool_cal",
        "a \n\n<tool_call>b</tool_call> \n<tool_call>c</tool_call>\n d",
        " <tool_call>b",
        '<tool_call>{"name": "weather", "arguments": {"city": "\\ud83d"}}</tool_call>',
        '<tool_call>{"name": "\\ud83d"}</tool_call>',
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    found = message(text)
    assert found["content"] == text
    assert "tool_calls" not in found


def test_arguments_of_other_shapes() -> None:
    assert parse_call('{"name": "f", "arguments": "{}"}', []) == Call("f", "{}")
    assert parse_call('{"name": "f", "parameters": {"x": 1}}', []) == Call("f", '{"x": 1}')
    assert parse_call('{"name": "f"}', []) == Call("f", "{}")
    text = "<function=g><parameter=x>{a}</parameter><parameter=y>[1]"
    assert parse_call(text, TOOLS) == Call("g", '{"x": "{a}", "y": [1]}')


PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", HERMES, CODER, " ", "\n", "<", "x y"),
    "<tool",
    '{"name": "weather"}',
]


@given(
    st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
    st.sampled_from(["", "<think>\n"]),
    st.lists(st.integers(1, 300), max_size=12).map(tuple),
)
def test_the_message_does_not_depend_on_where_the_stream_is_cut(
    text: str, prompt: str, cuts: tuple[int, ...]
) -> None:
    whole = message(text, prompt)
    assert message(text, prompt, cuts) == whole
    assert message(text, prompt, tuple(range(1, len(text)))) == whole
    for each in whole.get("tool_calls", ()):
        json.loads(each["function"]["arguments"])


@given(st.text(alphabet="<ab", max_size=12), st.sampled_from(["<a>", "<ab<", "b"]))
def test_a_cut_loses_nothing(text: str, marker: str) -> None:
    found = cut(text, marker)
    assert found.found == (marker in text)
    assert found.before + (marker if found.found else "") + found.after == text
    assert found.found or marker.startswith(found.after)


def test_most_answers_need_no_parts() -> None:
    plain = GenerationRequest(kind="chat")
    assert part_splitter(plain, "x", reasons=False) is None
    assert part_splitter(plain, "<think>\n\n</think>\n\n", reasons=True) is None
    assert part_splitter(plain, "x", reasons=True) is not None
    assert part_splitter(GenerationRequest(kind="chat", tools=TOOLS), "x", reasons=False)


@pytest.mark.parametrize(
    ("final", "text", "reasoning", "content"),
    [
        ("<think>\nit is", " so.\n</think>\n\nYes", " so.", "Yes"),
        ("<think>\n", "\nso.</think>Yes", "so.", "Yes"),
        ("<think>", "so.</think>Yes", "so.", "Yes"),
        ("<think>so</think>\n\nYes", " it is", "", " it is"),
        ("Between <think> and", " its end", "", " its end"),
        ("Yes", " it is", "", " it is"),
    ],
)
def test_a_message_that_goes_on_amid_its_reasoning(
    final: str, text: str, reasoning: str, content: str
) -> None:
    request = GenerationRequest(
        kind="chat",
        messages=[{"role": "user", "content": "?"}, {"role": "assistant", "content": final}],
        continue_final_message=True,
        add_generation_prompt=False,
    )
    parts = part_splitter(request, f"a <think> of the user's {final}", reasons=True)
    assert parts is not None
    found = whole_message(parts.push(text, last=True))
    assert (found.get("reasoning_content", ""), found["content"]) == (reasoning, content)
