"""What the endpoint sends, held against OpenAI's own document of its API.

The document is a file of ``TRSERVE_DATA``, which is not part of the project. It marks what may be
null with the word of OpenAPI 3.0, which 3.1 no longer knows; that is put right first. Two things
it does not know of: chunks of a completion's stream (it describes the whole, which cannot have a
null as the reason of its end), and the null of a prompt's first token, which nothing predicts
(``echo``; evaluation harnesses count on it).
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

DATA = Path(os.environ.get("TRSERVE_DATA", Path(__file__).parents[3] / "shared" / "data"))
DOCUMENT = DATA / "openai-openapi-subset.json"
CHAT = {
    "model": "trserve",
    "messages": [{"role": "user", "content": "What is 12 + 30?"}],
    "max_tokens": 20,
}
COMPLETION = {"model": "trserve", "prompt": "What is", "max_tokens": 12}
CHATS = (
    {},
    {"logprobs": True, "top_logprobs": 2},
    {"n": 2, "temperature": 1},
    {"return_token_ids": True, "trserve": {"trace": True}},
)
COMPLETIONS = ({}, {"logprobs": 2}, {"prompt": ["One", "Two"], "n": 2, "temperature": 1})


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any]:
    if not DOCUMENT.exists():
        pytest.skip(f"no {DOCUMENT.name} in TRSERVE_DATA: nothing is compared with OpenAI's words")
    found: dict[str, Any] = json.loads(DOCUMENT.read_text())["components"]["schemas"]
    for schema in found.values():
        allow_nulls(schema)
    return found


def allow_nulls(schema: Any) -> None:
    """Say ``nullable`` in the words of JSON Schema, in place."""
    if isinstance(schema, list):
        for each in schema:
            allow_nulls(each)
    elif isinstance(schema, dict):
        for each in schema.values():
            allow_nulls(each)
        if schema.pop("nullable", False):
            inner = dict(schema)
            schema.clear()
            schema["anyOf"] = [inner, {"type": "null"}]


def faults(schemas: dict[str, Any], name: str, value: Any) -> list[str]:
    """What of ``value`` is not as the schema of this name says."""
    whole = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}
    errors = jsonschema_rs.Draft202012Validator(whole).iter_errors(value)
    return [f"{list(error.instance_path)}: {error.message[:300]}" for error in errors]


@pytest.mark.parametrize("change", CHATS)
def test_a_chat(server, schemas, change):
    whole = server.post("/v1/chat/completions", CHAT | change)
    assert faults(schemas, "CreateChatCompletionResponse", whole) == []
    for options in ({}, {"stream_options": {"include_usage": True}}):
        chunks = list(server.stream("/v1/chat/completions", CHAT | change | options))
        assert len(chunks) > 1
        for chunk in chunks:
            assert faults(schemas, "CreateChatCompletionStreamResponse", chunk) == []


@pytest.mark.parametrize("change", COMPLETIONS)
def test_a_completion(server, schemas, change):
    whole = server.post("/v1/completions", COMPLETION | change)
    assert faults(schemas, "CreateCompletionResponse", whole) == []
    for chunk in server.stream("/v1/completions", COMPLETION | change):
        for choice in chunk["choices"]:
            if choice["finish_reason"] is None:
                choice["finish_reason"] = "stop"
        assert faults(schemas, "CreateCompletionResponse", chunk) == []


def test_an_echo_but_for_its_first_token(server, schemas):
    whole = server.post("/v1/completions", COMPLETION | {"echo": True, "logprobs": 1})
    assert faults(schemas, "CreateCompletionResponse", whole) != []
    logprobs = whole["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"].pop(0) is None
    assert logprobs["top_logprobs"].pop(0) is None
    assert faults(schemas, "CreateCompletionResponse", whole) == []


def test_models_and_errors(server, schemas):
    assert faults(schemas, "ListModelsResponse", server.request("GET", "/v1/models").json()) == []
    assert faults(schemas, "Model", server.request("GET", "/v1/models/trserve").json()) == []
    refused = server.request("POST", "/v1/chat/completions", CHAT | {"temperature": -1})
    assert refused.status == 400
    assert faults(schemas, "ErrorResponse", refused.json()) == []


def test_faults_are_found(schemas, server):
    whole = server.post("/v1/chat/completions", CHAT)
    for path in (("choices", 0, "message", "refusal"), ("created",), ("choices", 0, "logprobs")):
        broken = copy.deepcopy(whole)
        place: Any = broken
        for step in path[:-1]:
            place = place[step]
        del place[path[-1]]
        assert faults(schemas, "CreateChatCompletionResponse", broken) != []
