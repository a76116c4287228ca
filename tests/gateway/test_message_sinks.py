"""Chats whose messages have parts: a stream adds up to the body, with the reason of its end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.gateway.test_message_parts import HERMES, TOOLS
from tests.gateway.test_sinks import Socket, events
from trserve.gateway.answer import Delta
from trserve.gateway.members import Extras
from trserve.gateway.message_parts import PartSplitter, part_splitter, whole_message
from trserve.gateway.message_sinks import MessageStream, MessageWhole
from trserve.gateway.prompts import Prompt
from trserve.gateway.requests import GenerationRequest
from trserve.gateway.responses import usage_dict


def splitter(request: GenerationRequest) -> Any:
    def of(prompt: Prompt) -> PartSplitter | None:
        return part_splitter(request, prompt.text, reasons=True)

    return of


def answers(text: str, finish: str, **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    """The choice of a body with ``text``, and the events of a stream of it, letter by letter."""
    request = GenerationRequest(kind="chat", tools=TOOLS, return_token_ids=True, **fields)
    extras = Extras(request, ["small"])
    deltas = [Delta(letter, [number], [0], None, None) for number, letter in enumerate(text)]
    deltas.append(Delta("", [99], [0], finish, None))

    async def play() -> tuple[dict[str, Any], list[Any]]:
        socket = Socket()
        whole = MessageWhole(request, extras, "m", splitter(request))
        stream = MessageStream(request, extras, "m", socket, False, splitter(request))
        stream.open()
        for sink in (whole, stream):
            place = sink.choice(0, Prompt([1], "prompt"))
            place.usage = lambda: usage_dict(1, 1, {})
            for delta in deltas:
                place.take(delta)
            await sink.ended
        return json.loads(whole.body())["choices"][0], events(socket)

    return asyncio.run(asyncio.wait_for(play(), 10))


@pytest.mark.parametrize(
    ("text", "finish", "reason"),
    [
        (f"<think>\nhm\n</think>\n\nI look.\n{HERMES}", "stop", "tool_calls"),
        (f"{HERMES}{HERMES}", "length", "length"),
        ("<think>hm</think>No call.", "stop", "stop"),
        ("plain", "stop", "stop"),
        ("", "stop", "stop"),
    ],
)
def test_the_stream_adds_up_to_the_body(text: str, finish: str, reason: str) -> None:
    choice, (*parts, done) = answers(text, finish)
    assert done == "[DONE]"
    choices = [part["choices"][0] for part in parts]
    assert choices[0]["delta"]["role"] == "assistant"
    assert all("role" not in each["delta"] for each in choices[1:])
    added = whole_message([each["delta"] for each in choices])
    for call in (*added.get("tool_calls", ()), *choice["message"].get("tool_calls", ())):
        assert call.pop("id").startswith("call_")
    assert added == choice["message"]
    assert [each["finish_reason"] for each in choices] == [None] * (len(choices) - 1) + [reason]
    assert choice["finish_reason"] == reason
    ids = [token for each in choices for token in each.get("token_ids", ())]
    assert ids == choice["token_ids"] == [*range(len(text)), 99]


def test_a_prompt_after_which_nothing_has_parts_gets_plain_events() -> None:
    async def play() -> None:
        request = GenerationRequest(kind="chat")
        stream = MessageStream(
            request, Extras(request, ["m"]), "m", Socket(), False, splitter(request)
        )
        closed = stream.choice(0, Prompt([1], "<think>\n\n</think>\n\n"))
        assert type(closed).__name__ == "StreamChoice"

    asyncio.run(play())


def test_the_sdk_reads_calls() -> None:
    from openai.types.chat import ChatCompletionChunk
    from openai.types.chat.chat_completion import Choice

    choice, (*parts, _) = answers(HERMES, "stop")
    message = Choice.model_validate(choice).message
    assert message.tool_calls is not None and message.tool_calls[0].type == "function"
    assert message.tool_calls[0].function.name == "weather"
    chunks = [ChatCompletionChunk.model_validate(part) for part in parts]
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [call.index for call in calls] == [0]
