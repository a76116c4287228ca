"""openai-python beyond what ``tests/blackbox/test_openai_client.py`` asks: helpers, async."""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

ASKED = {
    "model": "trserve",
    "messages": [{"role": "user", "content": "What is 125 - 54 + 25?"}],
    "max_tokens": 30,
    "temperature": 0,
}
DIGITS = {"type": "integer", "minimum": 0, "maximum": 999}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": DIGITS, "b": DIGITS},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


class Verdict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    is_even: bool
    kind: Literal["small", "large"]


@pytest.fixture(scope="module")
def client(base_url):
    with openai.OpenAI(base_url=base_url, api_key="any", max_retries=0, timeout=30.0) as made:
        yield made


def test_headers_and_request_id(client):
    raw = client.chat.completions.with_raw_response.create(
        **ASKED, extra_headers={"X-Request-ID": "my-label"}
    )
    assert raw.headers["x-request-id"] == "my-label"
    assert raw.headers["x-trserve-router"] == "r-stitch"
    assert raw.parse()._request_id == "my-label"


def test_the_streaming_helper_puts_the_whole_together(client):
    asked = ASKED | {"max_tokens": 80}  # it takes an answer that was cut for an error
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.usage.completion_tokens == whole.usage.completion_tokens


def test_async_streams_side_by_side(base_url, client):
    whole = client.chat.completions.create(**ASKED).choices[0].message.content

    async def one(made: openai.AsyncOpenAI) -> str:
        stream = await made.chat.completions.create(**ASKED, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0) as made:
            return await asyncio.gather(*(one(made) for _ in range(6)))

    assert asyncio.run(many()) == [whole] * 6


def test_a_stream_that_is_closed_early_ends_its_request(client, server):
    stream = client.chat.completions.create(
        **ASKED | {"max_tokens": 400, "n": 8}, stream=True, extra_body={"ignore_eos": True}
    )
    first = next(iter(stream))
    stream.close()
    for _ in range(100):
        told = server.request("GET", f"/v1/trserve/requests/{first.id}").json()
        if told["status"] != "running":
            break
        asyncio.run(asyncio.sleep(0.02))
    assert told["status"] == "cancelled"


def test_tools_are_offered_and_parsed(client):
    answer = client.chat.completions.create(**ASKED, tools=[ADD])
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


def test_a_call_that_must_come_is_a_call_whole_and_streamed(client):
    asked = ASKED | {"max_tokens": 200}
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        options = {**asked, "tools": [ADD], "tool_choice": choice, "parallel_tool_calls": False}
        (call,) = client.chat.completions.create(**options).choices[0].message.tool_calls
        assert call.function.name == "add"
        assert set(json.loads(call.function.arguments)) == {"a", "b"}
        with client.chat.completions.stream(**options) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments


def test_parse_gives_an_object(client):
    asked = ASKED | {"max_tokens": 200}
    parsed = client.chat.completions.parse(**asked, response_format=Verdict)
    assert isinstance(parsed.choices[0].message.parsed, Verdict)


def test_errors_have_all_members(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASKED | {"messages": []})
    assert caught.value.param == "messages"
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="trserve", input="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            **ASKED | {"messages": [{"role": "user", "content": "word " * 2000}]}
        )
    assert caught.value.code == "context_length_exceeded"
