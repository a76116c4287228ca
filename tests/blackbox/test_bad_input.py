"""Bad requests: the right status, the OpenAI envelope, the parameter's name, a living server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.blackbox.conftest import CONTEXT
from tests.serverproc import Response, Server

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "What is 3 + 4?"}]


def chat(**change: Any) -> dict[str, Any]:
    return {"model": "trserve", "messages": HELLO, "max_tokens": 8, "temperature": 0} | change


def completion(**change: Any) -> dict[str, Any]:
    return {"model": "trserve", "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0} | change


@pytest.fixture(autouse=True)
def still_answers(server: Server):
    """After each bad request a good one must work."""
    yield
    reply = server.post(CHAT, chat(), timeout_s=20.0)
    assert reply["usage"]["completion_tokens"] > 0


def error_of(response: Response, status: int) -> dict[str, Any]:
    """The error of a response that has ``status`` and the four keys of the envelope."""
    assert response.status == status, response.body
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["message"]
    assert "Traceback" not in error["message"]
    return error


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_longer_than_the_context(server, stream):
    body = completion(prompt=[7] * (CONTEXT + 44), stream=stream)
    error = error_of(server.request("POST", COMPLETIONS, body), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    assert str(CONTEXT + 44) in error["message"]
    assert str(CONTEXT) in error["message"]


def test_conversation_longer_than_the_context(server):
    long = [{"role": "user", "content": "What is 3 + 4? " * 200}]
    error = error_of(server.request("POST", CHAT, chat(messages=long)), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert str(CONTEXT) in error["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"stream": "yes"}, "stream"),
        ({"trserve": {"router": {"no_such_key": 1}}}, "no_such_key"),
        ({"trserve": {"router": {"tau": "warm"}}}, "tau"),
        ({"trserve": {"only": "no-such-model"}}, "only"),
        ({"trserve": {"entry_model": "no-such-model"}}, "entry_model"),
    ],
    ids=str,
)
def test_field_of_a_chat_request(server, change, param):
    error = error_of(server.request("POST", CHAT, chat(**change)), 400)
    assert param in f"{error['param']} {error['message']}"


def test_missing_messages(server):
    body = {"model": "trserve", "max_tokens": 8}
    error = error_of(server.request("POST", CHAT, body), 400)
    assert "messages" in f"{error['param']} {error['message']}"


@pytest.mark.parametrize("prompt", [[], [[]], [-1], [10**9], [1.5], {"text": "x"}], ids=json.dumps)
def test_prompt_of_a_completion(server, prompt):
    error = error_of(server.request("POST", COMPLETIONS, completion(prompt=prompt)), 400)
    assert "prompt" in f"{error['param']} {error['message']}"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_unknown_model(server, path):
    body = chat(model="no-such-model") if path == CHAT else completion(model="no-such-model")
    error = error_of(server.request("POST", path, body), 404)
    assert error["code"] == "model_not_found"
    assert "no-such-model" in error["message"]


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"nonsense", b"[]", b"null", b'{"messages": [', b"\xff\xfe", b"[" * 10_000],
    ids=lambda raw: repr(raw[:12]),
)
def test_body_that_is_no_json_object(server, raw):
    error_of(server.request("POST", CHAT, raw), 400)


def test_number_that_json_does_not_have(server):
    raw = json.dumps(chat()).replace('"temperature": 0', '"temperature": NaN').encode()
    assert b"NaN" in raw
    error_of(server.request("POST", CHAT, raw), 400)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_wrong_method(server, method, path):
    response = server.request(method, path)
    error_of(response, 405)
    assert "POST" in response.headers["allow"]


@pytest.mark.parametrize("path", ["/v1/no-such-route", "/no-such-route", "/v1/models/no-such"])
def test_unknown_path(server, path):
    error_of(server.request("GET", path), 404)


@pytest.mark.parametrize(
    "change",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": False, "no_such_field": [1]},
        {"stop": None, "seed": None, "top_p": None, "logit_bias": None, "n": None},
    ],
    ids=["unknown fields", "explicit nulls"],
)
def test_what_clients_send_along_is_no_error(server, change):
    assert server.post(CHAT, chat(**change))["choices"]
