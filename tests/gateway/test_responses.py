"""Shapes of what goes out, against OpenAI's own schema, its SDK's types, and plain JSON."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trserve.errors import RequestError
from trserve.gateway.responses import (
    DONE,
    Choice,
    StreamFormat,
    chat_response,
    completion_response,
    error_body,
    model_body,
    models_body,
    usage_dict,
)

# The schema is handed to developers beside the checkout; without it these checks are skipped.
SCHEMA_FILE = Path(
    os.environ.get("TRSERVE_OPENAPI")
    or Path(__file__).parents[3] / "shared" / "data" / "openai-openapi-subset.json"
)
needs_schema = pytest.mark.skipif(not SCHEMA_FILE.is_file(), reason="no OpenAPI file")

HEAD = {"response_id": "id-1", "created": 17, "model": 'a/"b"'}
USAGE = usage_dict(3, 2, {"handoffs": 1, "share": 0.5}, cached_tokens=1)


def whole(make, **choice):
    return make(**HEAD, choices=[Choice(**choice)], usage=USAGE)


def stream(kind="chat", include_usage=False):
    return StreamFormat(kind=kind, include_usage=include_usage, **HEAD)


def event(data):
    """The object of one event, which must be one line."""
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    return json.loads(data[6:])


# ---- a validator for the keywords that the subset uses ----

TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def problems(value, schema, schemas, where="$"):
    """What in ``value`` breaks ``schema``, as a list of texts."""
    if value is None and schema.get("nullable"):
        return []
    if "$ref" in schema:
        return problems(value, schemas[schema["$ref"].rsplit("/", 1)[1]], schemas, where)
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            found = [problems(value, option, schemas, where) for option in schema[choice]]
            return [] if [] in found else [f"{where}: none of {choice}: {found}"]
    kind = schema.get("type")
    if kind is not None and (
        not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")
    ):
        return [f"{where}: {value!r} is no {kind}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where}: {value!r} is not in {schema['enum']}"]
    found = []
    if isinstance(value, dict):
        found += [f"{where}.{n} is missing" for n in schema.get("required", []) if n not in value]
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                found += problems(value[name], inner, schemas, f"{where}.{name}")
    if isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            found += problems(item, schema["items"], schemas, f"{where}[{i}]")
    return found


@pytest.fixture(scope="module")
def conforms():
    schemas = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))["components"]["schemas"]

    def check(body, name):
        assert problems(json.loads(body), schemas[name], schemas) == []

    return check


@needs_schema
def test_the_validator_finds_faults():
    schemas = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))["components"]["schemas"]
    good = json.loads(whole(chat_response, text="x", finish_reason="stop"))
    bad = {**good, "created": "now"}
    assert problems(bad, schemas["CreateChatCompletionResponse"], schemas)
    del good["choices"][0]["message"]["refusal"]
    assert problems(good, schemas["CreateChatCompletionResponse"], schemas)


@needs_schema
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_whole_responses_conform(conforms, reason):
    options = {"text": "x", "finish_reason": reason, "stop_reason": "\n"}
    conforms(whole(chat_response, **options), "CreateChatCompletionResponse")
    conforms(whole(completion_response, **options), "CreateCompletionResponse")


@needs_schema
@pytest.mark.parametrize("include_usage", [False, True])
def test_stream_events_conform(conforms, include_usage):
    chunks = stream(include_usage=include_usage)
    for data in (
        chunks.delta("x", first=True),
        chunks.delta("y", first=False, usage=USAGE, extra=b'"token_ids":[1]'),
        chunks.delta("", first=False, finish_reason="stop", stop_reason=5),
    ):
        conforms(data[6:], "CreateChatCompletionStreamResponse")
    if include_usage:
        conforms(chunks.usage(USAGE)[6:], "CreateChatCompletionStreamResponse")


@needs_schema
def test_models_and_errors_conform(conforms):
    conforms(models_body({"a": 4096, "b/c": 64}, 1), "ListModelsResponse")
    conforms(model_body("b/c", 1, 4096), "Model")
    conforms(error_body(RequestError("m", param="p", code="c")), "ErrorResponse")
    conforms(error_body(RequestError("m", status=503)), "ErrorResponse")


# ---- shapes that clients depend on ----


def test_the_sdk_reads_them():
    from openai.types import Completion
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    options = {"text": "é", "finish_reason": "stop", "extra": b'"trserve":{"x":1}'}
    chat = ChatCompletion.model_validate_json(whole(chat_response, **options))
    assert chat.choices[0].message.content == "é"
    assert chat.choices[0].model_extra["trserve"] == {"x": 1}
    assert chat.usage.prompt_tokens_details.cached_tokens == 1
    assert chat.usage.model_extra["trserve"]["handoffs"] == 1
    assert Completion.model_validate_json(whole(completion_response, **options)).choices[0].text
    for data in (
        stream().delta("x", first=True),
        stream().delta("", first=False, finish_reason="length"),
        stream(include_usage=True).usage(USAGE),
    ):
        ChatCompletionChunk.model_validate_json(data[6:])
    last = stream("completion").delta("", first=False, finish_reason="stop")
    Completion.model_validate_json(last[6:])


def test_chat_stream():
    chunks = stream()
    first = event(chunks.delta("Hi", first=True))
    assert first == {
        "id": "id-1",
        "object": "chat.completion.chunk",
        "created": 17,
        "model": 'a/"b"',
        "choices": [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": "Hi"},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
    }
    second = event(chunks.delta("!", first=False))
    assert second["choices"][0]["delta"] == {"content": "!"}
    last = event(chunks.delta("", first=False, finish_reason="stop", stop_reason="\n\n"))
    assert last["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": "\n\n",
        "matched_stop": "\n\n",
    }
    for other in (second, last):
        assert {k: other[k] for k in ("id", "object", "created", "model")} == {
            k: first[k] for k in ("id", "object", "created", "model")
        }
        assert "usage" not in other


def test_completion_stream():
    chunks = stream("completion")
    first = event(chunks.delta("Hi", first=True))
    assert first["object"] == "text_completion"
    assert first["choices"] == [{"index": 0, "text": "Hi", "logprobs": None, "finish_reason": None}]
    last = event(chunks.delta("", first=False, finish_reason="length"))
    assert last["choices"][0]["text"] == ""
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["choices"][0]["stop_reason"] is None


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_stream_of_one_event_has_role_text_and_reason(kind):
    for text in ("", "x"):
        choice = event(stream(kind).delta(text, first=True, finish_reason="stop"))["choices"][0]
        assert choice["finish_reason"] == "stop"
        expected = {"role": "assistant", "content": text}
        assert (choice["delta"] if kind == "chat" else choice["text"]) == (
            expected if kind == "chat" else text
        )


def test_last_text_may_come_with_the_reason():
    choice = event(stream().delta("bye", first=False, finish_reason="abort"))["choices"][0]
    assert (choice["delta"], choice["finish_reason"]) == ({"content": "bye"}, "abort")


def test_usage_in_streams():
    chunks = stream(include_usage=True)
    assert event(chunks.delta("x", first=False))["usage"] is None
    assert event(chunks.delta("x", first=False, usage=USAGE))["usage"] == USAGE
    last = event(chunks.usage(USAGE))
    assert (last["choices"], last["usage"]) == ([], USAGE)
    assert event(stream().delta("x", first=False, usage=USAGE))["usage"] == USAGE


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_extra_members_join_the_choice(kind):
    extra = b'"token_ids":[1,2],"trserve":{"source":[0]}'
    for options in ({}, {"finish_reason": "stop"}, {"usage": USAGE}):
        data = event(stream(kind).delta("x", first=False, extra=extra, **options))
        assert data["choices"][0]["token_ids"] == [1, 2]
        assert data["choices"][0]["trserve"] == {"source": [0]}
        assert data["choices"][0]["finish_reason"] == options.get("finish_reason")


@given(st.text(), st.sampled_from(["chat", "completion"]), st.booleans(), st.booleans())
def test_any_text_survives_on_one_line(text, kind, first, finish):
    chunks = stream(kind, include_usage=True)
    data = event(chunks.delta(text, first=first, finish_reason="stop" if finish else None))
    choice = data["choices"][0]
    assert (choice["delta"].get("content", "") if kind == "chat" else choice["text"]) == text


@given(st.text(), st.none() | st.text() | st.integers(0, 2**31))
def test_whole_responses(text, stop_reason):
    options = {"text": text, "finish_reason": "stop", "stop_reason": stop_reason}
    chat = json.loads(whole(chat_response, **options, extra=b'"token_ids":[7]'))
    end = {
        "index": 0,
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": stop_reason,
        "matched_stop": stop_reason,
    }
    message = {"role": "assistant", "content": text, "refusal": None}
    assert chat["choices"] == [{**end, "message": message, "token_ids": [7]}]
    assert (chat["object"], chat["usage"]) == ("chat.completion", USAGE)
    completion = json.loads(whole(completion_response, **options))
    assert completion["choices"] == [{**end, "text": text}]
    assert completion["object"] == "text_completion"


def test_choices_are_numbered():
    choices = [Choice(text, "stop") for text in "abc"]
    for make in (chat_response, completion_response):
        found = json.loads(make(**HEAD, choices=choices, usage=USAGE))["choices"]
        assert [choice["index"] for choice in found] == [0, 1, 2]
    assert (
        event(
            StreamFormat(kind="chat", include_usage=False, index=2, **HEAD).delta("x", first=True)
        )["choices"][0]["index"]
        == 2
    )


def test_usage():
    totals = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert usage_dict(3, 4) == {**totals, "prompt_tokens_details": {"cached_tokens": 0}}
    assert USAGE["prompt_tokens_details"] == {"cached_tokens": 1}
    assert USAGE["trserve"] == {"handoffs": 1, "share": 0.5}


def test_errors_have_all_four_members():
    error = RequestError("full", status=429, retry_after=1)
    expected = {"message": "full", "type": "rate_limit_error", "param": None, "code": None}
    assert json.loads(error_body(error)) == {"error": expected}
    assert event(stream().error(error)) == {"error": expected}
    assert stream().DONE == DONE == b"data: [DONE]\n\n"


def test_an_error_that_repeats_half_a_surrogate_pair_is_told():
    said = json.loads(error_body(RequestError("no \ud83d", param="x.\ud83d")))["error"]
    assert (said["message"], said["param"]) == ("no ?", "x.?")


def test_models():
    first, second = json.loads(models_body({"a": 4096, "b": 64}, 1))["data"]
    assert (first["id"], first["root"], first["max_model_len"]) == ("a", "a", 4096)
    assert second == json.loads(model_body("b", 1, 64))
