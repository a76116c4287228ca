"""Constrained answers of a routed pair equal a loop that applies llguidance itself.

One request at a time, with a matcher that is made anew for every token, over the library's own
reading of the tokenizer. What a form lets through is checked apart: every answer that stopped by
itself has it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer, grammar_from

from tests.faults.streams import Streams, check_equal, kill_workers, undisturbed
from tests.golden.compare import assert_golden
from tests.golden.completions import ask, check_accounts
from tests.golden.reference import Reference, Setting, Trace
from tests.golden.word_problems import chat_prompts
from tests.serverproc import Server, concurrently
from trserve.demo import model_path

OUTPUT = 48
BLANKS = r"[ ]{1,2}|\r?\n[ \t]{0,24}"
SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "integer", "minimum": 0, "maximum": 999},
        "unit": {"type": "string", "maxLength": 12},
        "sure": {"type": "boolean"},
    },
    "required": ["answer", "unit", "sure"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"enum": ["yes", "no", 7]}, "minItems": 2, "maxItems": 5}
REGEX = r"(The|An?) [a-z]{2,9} is [0-9]{1,3}\."
CHOICES = ["The answer is 85.", "The answer is 9.", "no answer"]
LARK = 'start: "sum(" n ("," n)* ")"\nn: /[0-9]{1,2}/'


def _schema(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": BLANKS})


@dataclass(frozen=True)
class Form:
    """How a request asks for it, the library's word for it, and what an answer must be."""

    fields: dict[str, Any]
    grammar: str

    def holds(self, text: str) -> bool:
        matches = {
            "guided_json": lambda: _is_answer(json.loads(text)),
            "response_format": lambda: len(json.loads(text)) in range(2, 6),
            "guided_regex": lambda: re.fullmatch(REGEX, text) is not None,
            "guided_choice": lambda: text in CHOICES,
            "ebnf": lambda: re.fullmatch(r"sum\(\d{1,2}(,\d{1,2})*\)", text) is not None,
        }
        (name,) = self.fields
        return bool(matches[name]())


def _is_answer(value: Any) -> bool:
    return (
        list(value) == ["answer", "unit", "sure"]
        and value["answer"] in range(1000)
        and len(value["unit"]) <= 12
        and isinstance(value["sure"], bool)
    )


FORMS = {
    "json": Form({"guided_json": SCHEMA}, _schema(SCHEMA)),
    "list": Form(
        {"response_format": {"type": "json_schema", "json_schema": {"name": "l", "schema": LIST}}},
        _schema(LIST),
    ),
    "regex": Form({"guided_regex": REGEX}, LLMatcher.grammar_from_regex(REGEX)),
    "choice": Form({"guided_choice": CHOICES}, grammar_from("choice", json.dumps(CHOICES))),
    "lark": Form({"ebnf": LARK}, grammar_from("lark", LARK)),
}


@dataclass(frozen=True)
class Constrained(Setting):
    form: str = ""


class ConstrainedReference(Reference):
    """R-Stitch whose models see the logits as they are, and choose among what the form allows."""

    def __init__(self, slm: Path, llm: Path) -> None:
        super().__init__(slm, llm)
        self.library = LLTokenizer(str(slm.parent / "tiny/tokenizer.json"), eos_token=[*self.eos])

    def _wanted(self, logits: torch.Tensor, row: Sequence[int], trace: Trace) -> torch.Tensor:
        wanted = super()._wanted(logits, row, trace)
        assert isinstance(trace.setting, Constrained)
        matcher = LLMatcher(self.library, FORMS[trace.setting.form].grammar)
        assert matcher.consume_tokens(list(row[len(trace.prompt) :]))
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = torch.from_numpy(bits[: len(wanted)].astype(bool))
        return wanted.masked_fill(~allowed, -torch.inf)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(
        "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    )
    flags = ("--dtype", "float32", "--device", "cpu", "--chat-template", str(template))
    with Server([*flags, "--router", "r-stitch"]) as started:
        yield started


@pytest.fixture(scope="module")
def reference() -> ConstrainedReference:
    return ConstrainedReference(model_path("tiny"), model_path("small"))


def settings() -> list[Constrained]:
    routed = Constrained(tau=0.02, max_tokens=OUTPUT)
    kinds: list[dict[str, Any]] = [
        {},
        {"tau": 0.3, "temperature": 1.0, "seed": 5},
        {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02, "seed": 2**63 - 7},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "logit_bias": ((95, 3.0),)},
        {"only": 1},
    ]
    return [dataclasses.replace(routed, **kind) for kind in kinds]


def test_answers_equal_a_loop_with_the_library(
    server: Server, reference: ConstrainedReference, full: bool
) -> None:
    tokenizer = reference.models[0].tokenizer
    prompts = chat_prompts(20 if full else 2, Random("grammar"), tokenizer)
    cases = [
        (prompt, dataclasses.replace(setting, form=form))
        for prompt in prompts
        for setting in settings()
        for form in FORMS
    ]
    traces = [reference.run(*case) for case in cases]

    def one(at: int) -> Any:
        prompt, setting = cases[at]
        fields = FORMS[setting.form].fields
        return ask(server, prompt, setting, stream=bool(at % 2), **fields)

    replies = concurrently(one, range(len(cases)), 8)
    labels = [f"{setting.form}, {setting}" for _, setting in cases]
    assert_golden(zip(labels, traces, [reply.answer for reply in replies], strict=True))
    whole = 0
    for (_, setting), reply, trace in zip(cases, replies, traces, strict=True):
        check_accounts(reply, trace, server.models)
        if reply.answer.finish_reason == "stop":
            whole += 1
            text = tokenizer.decode(list(reply.answer.tokens)[:-1], skip_special_tokens=False)
            assert FORMS[setting.form].holds(text), text
    assert whole > len(cases) / 2
    assert sum(trace.handoffs for trace in traces) > 2 * len(traces)


def test_each_choice_follows_it(server: Server) -> None:
    body = {"prompt": "x", "n": 4, "seed": 3, "temperature": 1.0, "guided_regex": REGEX}
    found = [
        choice["text"]
        for choice in server.post("/v1/completions", body | {"max_tokens": 40})["choices"]
    ]
    assert len(set(found)) > 1
    assert all(re.fullmatch(REGEX, text) for text in found)


def test_log_probabilities_are_those_of_the_model(server: Server) -> None:
    """What is forced may be what the model would never write."""
    body = {"prompt": "5 +", "max_tokens": 8, "temperature": 0, "logprobs": 2}
    free = server.post("/v1/completions", body)["choices"][0]["logprobs"]
    forced = server.post("/v1/completions", body | {"guided_choice": ["zzz"]})["choices"][0]
    first = forced["logprobs"]
    assert first["top_logprobs"][0].keys() >= free["top_logprobs"][0].keys()
    assert first["token_logprobs"][0] < min(free["top_logprobs"][0].values())


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_must_come(server: Server, stream: bool) -> None:
    number = {"type": "integer", "minimum": 0, "maximum": 99}
    parameters = {"type": "object", "properties": {"n": number}}
    required = parameters | {"required": ["n"], "additionalProperties": False}
    tools = [
        {"type": "function", "function": {"name": "add", "parameters": required}},
        {"type": "function", "function": {"name": "stop"}},
    ]
    body = {
        "messages": [{"role": "user", "content": "What is 5 + 6?"}],
        "tools": tools,
        "parallel_tool_calls": False,
        "max_tokens": 120,
        "temperature": 0,
    }
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        asked = body | {"tool_choice": choice}
        if stream:
            chunks = [c["choices"][0] for c in server.stream("/v1/chat/completions", asked)]
            calls = [call for c in chunks for call in c["delta"].get("tool_calls", ())]
            assert not any(chunk["delta"].get("content") for chunk in chunks)
            reason = chunks[-1]["finish_reason"]
        else:
            (answer,) = server.post("/v1/chat/completions", asked)["choices"]
            calls, reason = answer["message"]["tool_calls"], answer["finish_reason"]
            assert answer["message"]["content"] is None
        (call,) = calls
        assert reason == "tool_calls"
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "add":
            assert arguments["n"] in range(100)
        else:
            assert (choice, call["function"]["name"], arguments) == ("required", "stop", {})


def test_answers_survive_both_workers(server: Server, reference: ConstrainedReference) -> None:
    """Their successors find where each answer stands in its grammar from its tokens."""
    pattern = "([a-z]{1,6} ){20,}"
    bodies = [
        {
            "model": "trserve",
            "prompt": [5 + number, 6, 7] * 4,
            "max_tokens": 300,
            "temperature": number % 2,
            "top_k": 20,
            "seed": number,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
            "trserve": {"trace": True, "router": {"tau": 0.02}},
            "guided_regex": pattern,
        }
        for number in range(6)
    ]
    expected = undisturbed(server, bodies)
    streams = Streams(server, bodies)
    streams.until_begun()
    kill_workers(server, (0, 1))
    check_equal(streams.join(), expected)
    for heard in expected:
        assert len(heard.tokens) == 300
        text = reference.models[0].tokenizer.decode(heard.tokens)
        assert re.fullmatch(f"{pattern}[a-z]{{0,6}}", text)
