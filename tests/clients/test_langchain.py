"""LangChain's OpenAI chat model, unmodified: whole, streamed, async, with tools, with usage."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field

ASKED = [SystemMessage("You are a helpful assistant."), HumanMessage("What is 125 - 54 + 25?")]


def model(base_url: str, **change) -> ChatOpenAI:
    settings = {"model": "trserve", "temperature": 0, "max_tokens": 40, "max_retries": 0}
    return ChatOpenAI(base_url=base_url, api_key="any", **(settings | change))


Digits = Annotated[int, Field(ge=0, le=999)]


class Numbers(BaseModel):
    """What the pair, which knows no tools, comes to an end with by itself."""

    model_config = ConfigDict(extra="forbid")
    a: Digits
    b: Digits


@tool(args_schema=Numbers)
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def test_a_chat_with_usage_and_our_summary(base_url):
    answer = model(base_url).invoke(ASKED)
    assert isinstance(answer, AIMessage) and answer.content
    usage = answer.usage_metadata
    assert usage["input_tokens"] > 5
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    told = answer.response_metadata
    assert told["finish_reason"] in ("stop", "length")
    assert told["model_name"] == "trserve"
    own = told["token_usage"]["trserve"]
    assert sum(own["tokens"].values()) == usage["output_tokens"]


def test_a_stream_is_the_whole_with_the_same_usage(base_url):
    whole = model(base_url).invoke(ASKED)
    parts = list(model(base_url, stream_usage=True).stream(ASKED))
    text = "".join(part.content for part in parts)
    assert text == whole.content
    total = parts[0]
    for part in parts[1:]:
        total += part
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert total.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]


def test_async_and_batches(base_url):
    async def all_of_them() -> tuple[list[str], list[AIMessage]]:
        streamed = [part.content async for part in model(base_url).astream(ASKED)]
        return streamed, await model(base_url).abatch([ASKED, ASKED, ASKED])

    streamed, answers = asyncio.run(all_of_them())
    assert {answer.content for answer in answers} == {"".join(streamed)}


def test_extra_members_pass(base_url):
    extra = {"trserve": {"only": "small"}}
    answer = model(base_url, extra_body=extra).invoke(ASKED)
    assert answer.response_metadata["token_usage"]["trserve"]["tokens"]["tiny"] == 0


def test_logprobs(base_url):
    answer = model(base_url, logprobs=True, top_logprobs=2).invoke(ASKED)
    entries = answer.response_metadata["logprobs"]["content"]
    assert len(entries) == answer.usage_metadata["output_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_tools_are_offered_and_their_results_go_on(base_url):
    """The pair calls none by itself; what a call and its result look like is taken all the same."""
    bound = model(base_url).bind_tools([add])
    first = bound.invoke(ASKED)
    assert first.content and first.tool_calls == []
    call = {"name": "add", "args": {"a": 1, "b": 2}, "id": "call_1", "type": "tool_call"}
    went_on = [*ASKED, AIMessage("", tool_calls=[call]), ToolMessage("3", tool_call_id="call_1")]
    assert (
        bound.invoke(went_on).usage_metadata["input_tokens"]
        > (first.usage_metadata["input_tokens"])
    )


def test_completions(base_url):
    settings = {"model": "trserve", "temperature": 0, "max_tokens": 12, "max_retries": 0}
    made = OpenAI(base_url=base_url, api_key="any", **settings)
    whole = made.invoke("Two and two")
    assert whole
    assert "".join(made.stream("Two and two")) == whole


def test_errors_keep_their_message(base_url):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        model(base_url, temperature=-1).invoke(ASKED)
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        model(base_url, model="no-such-model").invoke(ASKED)


def test_a_call_that_must_come_is_a_call(base_url):
    bound = model(base_url, max_tokens=200).bind_tools(
        [add], tool_choice="any", parallel_tool_calls=False, strict=True
    )
    answer = bound.invoke(ASKED)
    (call,) = answer.tool_calls
    assert call["name"] == "add"
    assert all(type(value) is int for value in call["args"].values())
    assert answer.response_metadata["finish_reason"] in ("tool_calls", "stop")
    parts = list(bound.stream(ASKED))
    total = parts[0]
    for part in parts[1:]:
        total += part
    assert total.tool_calls[0]["name"] == "add"
    assert total.tool_calls[0]["args"] == call["args"]


class Sum(BaseModel):
    """A sum."""

    model_config = ConfigDict(extra="forbid")
    is_even: bool
    kind: Literal["small", "large"]


def test_structured_output(base_url):
    for method in ("json_schema", "function_calling"):
        asked = model(base_url, max_tokens=200).with_structured_output(Sum, method=method)
        assert isinstance(asked.invoke(ASKED), Sum)
