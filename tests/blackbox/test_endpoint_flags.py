"""Flags that change what answers look like, together on one server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.blackbox.conftest import CONTEXT
from tests.serverproc import Server

FLAGS = ["--incremental-streaming-output", "--reasoning-parser", "qwen3"]
QUESTION = {"role": "user", "content": "What is 3 + 4?"}


@pytest.fixture(scope="module")
def flagged() -> Iterator[Server]:
    with Server(["--device", "cpu", "--max-model-len", str(CONTEXT), *FLAGS]) as running:
        yield running


def test_events_of_generate_hold_what_is_new(flagged: Server) -> None:
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    body = {"text": "What is 3 + 4?", "sampling_params": params}
    whole = flagged.post("/generate", body)
    found = list(flagged.stream("/generate", body))
    assert "".join(event["text"] for event in found) == whole["text"]
    assert [i for event in found for i in event["output_ids"]] == whole["output_ids"]


def chat(server: Server, *messages: dict[str, Any], **fields: Any) -> tuple[dict[str, Any], Any]:
    """The message of an answer, and what the deltas of its stream add up to."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 20, **fields}
    message = server.post("/v1/chat/completions", body)["choices"][0]["message"]
    added: dict[str, str] = {}
    for event in server.stream("/v1/chat/completions", body):
        for name, text in event["choices"][0]["delta"].items():
            added[name] = added.get(name, "") + text
    return message, added


def test_what_follows_an_open_thought_is_reasoning(flagged: Server) -> None:
    """The embedded pair never thinks: its turn is opened with the marker of one that does."""
    opened = {"role": "assistant", "content": "<think>"}
    message, added = chat(flagged, QUESTION, opened, continue_final_message=True)
    assert message["reasoning_content"]
    assert message["content"] == ""
    assert added == {"role": "assistant", "reasoning_content": message["reasoning_content"]}
    hidden, _ = chat(
        flagged, QUESTION, opened, continue_final_message=True, include_reasoning=False
    )
    assert hidden == {"role": "assistant", "content": "", "refusal": None}
    within, _ = chat(
        flagged, QUESTION, opened, continue_final_message=True, separate_reasoning=False
    )
    assert within["content"].strip() == message["reasoning_content"]


def test_an_answer_without_a_thought_is_content(flagged: Server, server: Server) -> None:
    message, added = chat(flagged, QUESTION)
    assert "reasoning_content" not in message
    assert added["content"] == message["content"]
    assert message == chat(server, QUESTION)[0]


def test_tools_that_the_template_never_shows_are_refused(flagged: Server) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"messages": [QUESTION], "tools": [tool], "max_tokens": 2}
    response = flagged.request("POST", "/v1/chat/completions", body)
    assert (response.status, response.json()["error"]["param"]) == (400, "tools")
    assert flagged.post("/v1/chat/completions", {**body, "tool_choice": "none"})["choices"]
