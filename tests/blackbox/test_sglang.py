"""SGLang's routes on a running server: the tokens of the other routes, caches really empty."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from tests.serverproc import Server, wait_until

PROMPT = "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


def generate(server: Server, **fields: Any) -> Any:
    return server.post("/generate", {"sampling_params": GREEDY, **fields})


def events(server: Server, **fields: Any) -> list[dict[str, Any]]:
    return list(server.stream("/generate", {"sampling_params": GREEDY, **fields}))


def complete(server: Server, prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True, **fields}
    return server.post("/v1/completions", body)


@pytest.fixture(scope="module")
def ids(server: Server) -> list[int]:
    found: list[int] = server.post("/tokenize", {"prompt": PROMPT})["tokens"]
    return found


def test_it_writes_what_the_other_route_writes(server: Server, ids: list[int]) -> None:
    reference = complete(server, ids, return_token_ids=True)
    choice, usage = reference["choices"][0], reference["usage"]
    for prompt in ({"text": PROMPT}, {"input_ids": ids}):
        found = generate(server, **prompt)
        assert found["text"] == choice["text"]
        assert found["output_ids"] == choice["token_ids"]
        meta = found["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": 12}
        assert meta["prompt_tokens"] == usage["prompt_tokens"] == len(ids)
        assert meta["trserve"]["tokens"] == usage["trserve"]["tokens"]
    one, other = generate(server, input_ids=[ids, [5, 6]])
    assert one["output_ids"] == choice["token_ids"]
    assert other["output_ids"] == generate(server, input_ids=[5, 6])["output_ids"]


def test_each_event_repeats_what_was_there(server: Server, ids: list[int]) -> None:
    whole = generate(server, input_ids=ids)
    found = events(server, input_ids=ids, stream=True)
    assert found[-1]["text"] == whole["text"]
    assert found[-1]["output_ids"] == whole["output_ids"]
    for before, after in itertools.pairwise(found):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None


def test_logprobs_are_those_of_the_other_route(server: Server, ids: list[int]) -> None:
    wants = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    meta = generate(server, input_ids=ids, **wants)["meta_info"]
    reference = complete(server, ids, logprobs=2, echo=True)["choices"][0]["logprobs"]
    own = meta["input_token_logprobs"] + meta["output_token_logprobs"]
    assert [entry[0] for entry in own] == reference["token_logprobs"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == ids
    tops = meta["input_top_logprobs"] + meta["output_top_logprobs"]
    assert tops[0] is None
    assert all(len(top) == 2 for top in tops[1:])
    rest = generate(server, input_ids=ids, **{**wants, "logprob_start_len": 4})["meta_info"]
    assert rest["input_token_logprobs"] == meta["input_token_logprobs"][4:]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_flush_empties_the_caches_of_all_models(server: Server, method: str) -> None:
    prompt = [7, 8, 9, 10] * 20

    def cached() -> int:
        found: int = generate(server, input_ids=prompt)["meta_info"]["cached_tokens"]
        return found

    cached()
    assert cached() >= 64
    answer = wait_until(
        lambda: server.request(method, "/flush_cache"), lambda r: r.status == 200, 5.0
    )
    assert answer.status == 200, answer.body
    assert cached() == 0


def test_an_open_request_is_ended_by_its_name(server: Server) -> None:
    # Its answer is long; whether it ended before it was asked to is what is told apart below.
    body = {
        "input_ids": [5, 6],
        "rid": "slow",
        "sampling_params": {**GREEDY, "max_new_tokens": 240},
    }
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.post("/generate", body)))
    thread.start()
    aborted = wait_until(
        lambda: server.post("/abort_request", {"rid": "slow"})["aborted"],
        lambda count: count == 1 or bool(answers),
        20.0,
    )
    thread.join(20.0)
    meta = answers[0]["meta_info"]
    if aborted:
        assert meta["finish_reason"]["type"] == "abort"
        assert meta["completion_tokens"] < 240
    else:
        assert meta["completion_tokens"] == 240
    assert server.post("/abort_request", {"rid": "slow"}) == {"aborted": 0}


def test_models_write_under_their_own_names(server: Server) -> None:
    names = [model["id"] for model in server.request("GET", "/v1/models").json()["data"]]
    assert names == ["trserve", "tiny", "small"]
    for name in ("tiny", "small"):
        reply = complete(server, [5, 6, 7], model=name)
        assert reply["model"] == name
        written = reply["usage"]["trserve"]["tokens"]
        assert written[name] == 12 and sum(written.values()) == 12
    assert server.request("GET", "/v1/models/small").json()["id"] == "small"


@pytest.mark.parametrize("path", ["/health_generate", "/health?deep=1"])
def test_a_look_that_takes_tokens(server: Server, path: str) -> None:
    steps = [model["steps"] for model in server.request("GET", "/health").json()["models"]]
    assert server.request("GET", path).status == 200

    def more() -> bool:
        now = [model["steps"] for model in server.request("GET", "/health").json()["models"]]
        return all(after > before for after, before in zip(now, steps, strict=True))

    assert wait_until(more, bool, 5.0)
