"""Faults that users of other servers reported, each tried on a running server.

Named after the number of the report in the list that the project was given; those of scheduling,
memory and processes have tests where those parts are tested.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
import time
from typing import Any
from urllib.parse import SplitResult, urlsplit

import pytest

from tests.blackbox.conftest import CONTEXT
from tests.procfs import command
from tests.serverproc import Server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = "What is 3 + 4?"
CLIENTS = 1000


def complete(server: Server, **fields: Any) -> Any:
    body = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields}
    return server.post(COMPLETIONS, body)


def chat(server: Server, content: Any, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
    return server.post(CHAT, body)


def refused(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0, **fields}
    began = time.monotonic()
    response = server.request("POST", COMPLETIONS, body)
    assert time.monotonic() - began < 2.0  # 50 ms where nothing else runs
    assert response.status == 400, response.body[:300]
    error: dict[str, Any] = response.json()["error"]
    return error


def test_p8_internal_fields_are_not_taken_from_outside(server: Server) -> None:
    usual = complete(server)["choices"][0]["text"]
    odd = {"pinned": True, "admit": False, "deadline_ns": 1, "record": False, "prompts": [[1]]}
    assert complete(server, **odd)["choices"][0]["text"] == usual
    assert "trserve.pinned" in refused(server, trserve={"pinned": True})["message"]


def test_p12_p13_nothing_of_a_stop_string_is_streamed(server: Server) -> None:
    whole = complete(server, max_tokens=40)["choices"][0]["text"]
    stop = whole[len(whole) // 2 :][:6]
    expected = whole[: whole.index(stop)]
    body = {"prompt": [5, 6, 7], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    shown = ""
    for event in server.stream(COMPLETIONS, {**body, "stop": stop}):
        shown += event["choices"][0]["text"]
        assert expected.startswith(shown)
    assert shown == expected
    assert event["choices"][0]["finish_reason"] == "stop"


def test_p14_a_stop_that_never_comes_cuts_nothing(server: Server) -> None:
    assert complete(server, stop="never-written")["choices"] == complete(server)["choices"]


@pytest.mark.parametrize("prompt", ["", [""], [], [[]]], ids=json.dumps)
def test_p18_an_empty_prompt_is_refused(server: Server, prompt: Any) -> None:
    assert refused(server, prompt=prompt)["param"].startswith("prompt")
    complete(server)


@pytest.mark.parametrize("prompt", [[7] * (CONTEXT + 1000), "3 + 4 " * CONTEXT])
def test_p19_p20_a_prompt_beyond_the_context_is_refused_with_counts(
    server: Server, prompt: Any
) -> None:
    error = refused(server, prompt=prompt)
    assert error["code"] == "context_length_exceeded"
    assert str(CONTEXT) in error["message"]


def test_p21_logprobs_stay_finite(server: Server) -> None:
    asked = {"echo": True, "logprobs": 5, "top_k": 1, "temperature": 1, "top_p": 1e-9}
    logprobs = complete(server, **asked)["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == 3 + 6
    assert logprobs["token_logprobs"][0] is None
    assert all(math.isfinite(value) for value in logprobs["token_logprobs"][1:])
    assert all(math.isfinite(v) for top in logprobs["top_logprobs"][1:] for v in top.values())


def test_p23_logprobs_of_a_prompt_are_the_same_from_the_cache(server: Server) -> None:
    asked = {"prompt": [9, 8, 7, 6] * 20, "echo": True, "logprobs": 1}
    one, other = (complete(server, **asked)["choices"][0]["logprobs"] for _ in range(2))
    assert one == other


@pytest.mark.parametrize("tops", [2_000_000_000, -5, 21])
def test_p24_more_logprobs_than_there_are_are_refused(server: Server, tops: int) -> None:
    assert refused(server, logprobs=tops)["param"] == "logprobs"
    assert complete(server, logprobs=20)["choices"]


@pytest.mark.parametrize("tiny", [1e-4, 1e-8, 1e-30, 1e-300])
def test_p25_tiny_temperatures_and_nuclei_are_greedy(server: Server, tiny: float) -> None:
    greedy = complete(server)["choices"][0]["text"]
    assert complete(server, temperature=1.0, top_p=tiny)["choices"][0]["text"] == greedy
    assert complete(server, temperature=tiny)["choices"][0]["text"] == greedy


@pytest.mark.parametrize(
    "fields",
    [{"top_p": -1}, {"repetition_penalty": 0}, {"temperature": -1}, {"min_p": 2}, {"seed": 2**64}],
    ids=str,
)
def test_p26_extremes_are_refused(server: Server, fields: dict[str, Any]) -> None:
    assert refused(server, **fields)["param"] in fields
    assert complete(server, temperature=999_999)["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 5_000_000},
        {"prompt": [2**31 - 1]},
        {"logit_bias": {"99999999": 1}},
        {"max_tokens": -1},
    ],
    ids=str,
)
def test_p28_what_asks_for_too_much_is_refused_at_once(
    server: Server, fields: dict[str, Any]
) -> None:
    refused(server, **fields)
    complete(server)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
        {"guided_regex": "["},
        {"regex": "["},
        {"ebnf": "root ::= x"},
        {"structured_outputs": {"json": 1}},
    ],
    ids=str,
)
def test_p34_p35_grammars_are_refused_by_name(server: Server, fields: dict[str, Any]) -> None:
    assert refused(server, **fields)["param"].split(".")[0] in fields


def test_p37_no_part_of_a_list_is_lost(server: Server) -> None:
    plain = chat(server, "What is\n3 + 4?")
    parts = chat(server, [{"type": "text", "text": "What is"}, {"type": "text", "text": "3 + 4?"}])
    assert parts["choices"] == plain["choices"]
    assert parts["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "prompt",
    ["a\x00b", "x" * 200, "\ufeff", "😀🏳️‍🌈", [0, 1, 2]],
    ids=["nul", "word", "bom", "emoji", "ids"],
)
def test_odd_texts_are_answered(server: Server, prompt: Any) -> None:
    assert complete(server, prompt=prompt)["usage"]["completion_tokens"] == 6


def test_a_word_of_a_megabyte_is_refused_and_others_go_on(server: Server) -> None:
    assert refused(server, prompt="x" * 2**20)["code"] == "context_length_exceeded"


def test_integers_may_be_written_as_floats_and_nothing_else(server: Server) -> None:
    assert complete(server, max_tokens=5.0)["usage"]["completion_tokens"] == 5
    for wrong in ("5", True, [5], 5.5):
        assert refused(server, max_tokens=wrong)["param"] == "max_tokens"


def test_of_two_members_of_one_name_the_last_counts(server: Server) -> None:
    raw = b'{"prompt": [5], "max_tokens": 1, "max_tokens": 3, "temperature": 0, "ignore_eos": true}'
    response = server.request("POST", COMPLETIONS, raw)
    assert response.json()["usage"]["completion_tokens"] == 3


def test_p31_p32_usage_of_a_stream_is_a_chunk_of_its_own(server: Server) -> None:
    """As vLLM's benchmark reads it: usage counts only where there are no choices."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 30}
    whole = server.post(CHAT, body)["usage"]
    for options in (
        {"include_usage": True},
        {"include_usage": True, "continuous_usage_stats": True},
    ):
        *events, last = server.stream(CHAT, {**body, "stream_options": options})
        assert last["choices"] == []
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [last["usage"][name] for name in counts] == [whole[name] for name in counts]
        assert all(event["choices"] for event in events)
        if not options.get("continuous_usage_stats"):
            assert all(event["usage"] is None for event in events)
    # Whoever did not ask reads choices[0] of every chunk.
    assert all(event["choices"] and "usage" not in event for event in server.stream(CHAT, body))


def test_p10_p11_a_thousand_clients_at_once_are_all_answered(server: Server) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4 * CLIENTS:
        pytest.skip(f"this machine allows {hard} open files to a process")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    workers = [pid for pid in server.children() if "trserve.workers.main" in command(pid)]
    assert len(workers) == 2
    before = [len(os.listdir(f"/proc/{pid}/fd")) for pid in workers]
    at_most: list[int] = []
    try:
        answers = asyncio.run(_crowd(urlsplit(server.url), workers, at_most))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert {answer[:12] for answer in answers} <= {b"HTTP/1.1 200", b"HTTP/1.1 429"}
    assert len(answers) == CLIENTS
    assert sum(answer.startswith(b"HTTP/1.1 200") for answer in answers) > CLIENTS / 2
    assert at_most == before, "no descriptor of a worker's is a client's"


async def _crowd(address: SplitResult, workers: list[int], at_most: list[int]) -> list[bytes]:
    """The first lines of the answers to :data:`CLIENTS` who all connect before any asks."""
    host, port = address.hostname, address.port
    made = await asyncio.gather(*(asyncio.open_connection(host, port) for _ in range(CLIENTS)))
    body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 2}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    for _, writer in made:
        writer.write(head.encode() + body)
    at_most += [len(os.listdir(f"/proc/{pid}/fd")) for pid in workers]
    async with asyncio.timeout(60):
        lines = [await reader.readline() for reader, _ in made]
    for _, writer in made:
        writer.close()
    return lines
