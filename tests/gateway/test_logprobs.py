"""Names of tokens and the two shapes of log probabilities."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.small_tokenizers import byte_level
from tests.gateway.test_responses import conforms, event, needs_schema, stream, whole  # noqa: F401
from trserve.gateway.detokenizer import Detokenizer
from trserve.gateway.logprobs import ChatLogprobs, CompletionLogprobs, TokenNames
from trserve.gateway.responses import chat_response, completion_response
from trserve.gateway.tokenizer import Tokenizer
from trserve.ipc.annotations import Annotation


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(), named={})


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def bytewise(tokenizer: Tokenizer, text: str) -> list[int]:
    """A token for every byte."""
    table = tokenizer.token_bytes()
    assert table is not None
    return [table.index(bytes([byte])) for byte in text.encode()]


def completion(tokenizer: Tokenizer) -> CompletionLogprobs:
    return CompletionLogprobs(TokenNames(tokenizer), Detokenizer(tokenizer, []))


def test_names_are_text_or_bytes(tokenizer: Tokenizer) -> None:
    names = TokenNames(tokenizer)
    a, first, *_ = bytewise(tokenizer, "aé")
    assert (names.name(a), names.bytes_of(a)) == ("a", b"a")
    assert (names.name(first), names.bytes_of(first)) == ("bytes:\\xc3", b"\xc3")
    assert names.bytes_of(10**6) == b"", "ids past the vocabulary have no text"


def test_a_completion_has_parallel_arrays(tokenizer: Tokenizer) -> None:
    tokens = bytewise(tokenizer, "xéy")
    collected = completion(tokenizer)
    other = bytewise(tokenizer, "z")[0]
    records = [
        Annotation(-0.5 - n, [other, token], [-0.25, -0.5 - n]) for n, token in enumerate(tokens)
    ]
    collected.add(tokens[:1], records[:1])
    collected.add(tokens[1:], records[1:])
    found = json.loads(collected.take())
    assert found["tokens"] == ["x", "bytes:\\xc3", "bytes:\\xa9", "y"]
    assert found["token_logprobs"] == [-0.5, -1.5, -2.5, -3.5]
    assert found["text_offset"] == [0, 1, 1, 2]
    assert found["top_logprobs"][0] == {"z": -0.25, "x": -0.5}
    assert json.loads(collected.take())["tokens"] == []


def test_the_chosen_token_is_always_named_and_the_best_of_a_name_counts(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, z = bytewise(tokenizer, "xyz")
    collected = completion(tokenizer)
    monkeypatch.setattr(TokenNames, "name", lambda self, token: "same" if token != z else "z")
    collected.add([y], [Annotation(-3.0, [x, z], [-0.5, -1.0])])
    assert json.loads(collected.take())["top_logprobs"] == [{"same": -0.5, "z": -1.0}]
    collected.add([z], [Annotation(-2.0, [], [])])
    assert json.loads(collected.take())["top_logprobs"] == [{"z": -2.0}]


def test_an_echo_has_an_entry_for_each_token_of_the_prompt(tokenizer: Tokenizer) -> None:
    prompt, tokens = bytewise(tokenizer, "abc"), bytewise(tokenizer, "d")
    names, text = TokenNames(tokenizer), Detokenizer(tokenizer, [])
    collected = CompletionLogprobs(names, text, prompt)
    collected.add_prompt(
        [Annotation(-1.0, [prompt[1]], [-1.0]), Annotation(-2.0, [0], [-0.5])], last=True
    )
    collected.add(tokens, [Annotation(-3.0, tokens, [-3.0])])
    found = json.loads(collected.take())
    assert found["tokens"] == ["a", "b", "c", "d"]
    assert found["token_logprobs"] == [None, -1.0, -2.0, -3.0]
    assert found["top_logprobs"][:2] == [None, {"b": -1.0}]
    assert found["text_offset"] == [0, 1, 2, 3]


def test_a_prompt_that_was_not_scored_to_its_end_has_nulls(tokenizer: Tokenizer) -> None:
    prompt = bytewise(tokenizer, "abc")
    collected = CompletionLogprobs(TokenNames(tokenizer), Detokenizer(tokenizer, []), prompt)
    collected.add_prompt([Annotation(-1.0, [], [])], last=True)
    assert json.loads(collected.take())["token_logprobs"] == [None, -1.0, None]


@needs_schema
def test_both_conform(tokenizer: Tokenizer, conforms: Any) -> None:  # noqa: F811
    x, y = bytewise(tokenizer, "xy")
    records = [Annotation(-0.5, [x, y], [-0.5, -1.0]), Annotation(-1.5, [y, x], [-0.25, -1.5])]
    chat = ChatLogprobs(TokenNames(tokenizer))
    for data in (True, False):
        chat.add([x, y], records)
        logprobs = chat.take()
        if data:
            body = whole(chat_response, text="xy", finish_reason="stop", logprobs=logprobs)
            conforms(body, "CreateChatCompletionResponse")
        else:
            for text, finish in (("xy", None), ("", "stop")):
                chunk = stream().delta(text, first=False, finish_reason=finish, logprobs=logprobs)
                conforms(chunk[6:], "CreateChatCompletionStreamResponse")
    (first, second) = json.loads(logprobs)["content"]
    assert first == {
        "token": "x",
        "logprob": -0.5,
        "bytes": [ord("x")],
        "top_logprobs": [
            {"token": "x", "logprob": -0.5, "bytes": [ord("x")]},
            {"token": "y", "logprob": -1.0, "bytes": [ord("y")]},
        ],
    }
    assert second["token"] == "y"
    arrays = completion(tokenizer)
    arrays.add([x, y], records)
    found = arrays.take()
    body = whole(completion_response, text="xy", finish_reason="stop", logprobs=found)
    conforms(body, "CreateCompletionResponse")
    chunk = event(stream("completion").delta("xy", first=True, logprobs=found))
    assert chunk["choices"][0]["logprobs"]["tokens"] == ["x", "y"]
