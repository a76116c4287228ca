"""What is asked of servers that take ids, and what is read out of their answers."""

import json

import pytest

from tests.edge.openai.visits import END, visit
from trserve.edge.openai_wire import (
    Dialect,
    WireError,
    cut_at_end,
    dialect_of,
    read_answer,
    refusal_of,
    request_body,
    seed_at,
)
from trserve.ipc.baton import Finish

COMPLETIONS, GENERATE = Dialect.COMPLETIONS, Dialect.GENERATE


def asked(dialect, a_visit, tokens=1):
    return json.loads(request_body(dialect, a_visit, "big", tokens))


def test_a_row_goes_as_ids_in_both_dialects():
    body = asked(COMPLETIONS, visit([3, 4, 5]), 2)
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("big", [3, 4, 5], 2)
    assert body["return_token_ids"] and body["return_tokens_as_token_ids"]
    assert (body["temperature"], body["stop_token_ids"]) == (0.0, [END])
    body = asked(GENERATE, visit([3, 4, 5]), 2)
    assert body["input_ids"] == [3, 4, 5]
    params = body["sampling_params"]
    assert (params["max_new_tokens"], params["top_k"]) == (2, -1)


def test_ends_count_only_when_the_request_says_so():
    body = asked(COMPLETIONS, visit([3], ignore_eos=True, stop_token_ids=(9,)))
    assert body["stop_token_ids"] == [] and body["ignore_eos"]
    body = asked(COMPLETIONS, visit([3, 4, 5], prompt_len=2, min_tokens=3), 8)
    assert body["min_tokens"] == 2
    assert asked(COMPLETIONS, visit([3, 4, 5], prompt_len=2, min_tokens=3))["min_tokens"] == 1


def test_penalties_of_what_was_written_are_biases():
    """The server takes the whole row for a prompt, and would count none of it."""
    row = [3, 4, 5, 5, 6]
    body = asked(
        COMPLETIONS,
        visit(row, prompt_len=2, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={6: 1.0}),
    )
    assert body["logit_bias"] == {"5": -1.0, "6": 0.25}
    assert (body["presence_penalty"], body["frequency_penalty"]) == (0.5, 0.25)
    assert "logit_bias" not in asked(COMPLETIONS, visit(row, prompt_len=2))


def test_each_position_has_a_seed_of_its_own():
    seeds = {seed_at(seed, at) for seed in (0, 1, 2**64 - 1) for at in range(50)}
    assert len(seeds) == 150 and all(0 <= seed < 2**63 for seed in seeds)
    assert asked(COMPLETIONS, visit([1, 2], seed=5))["seed"] == seed_at(5, 2)


ANSWERS = [
    (COMPLETIONS, {"choices": [{"token_ids": [5, 6]}]}),
    (COMPLETIONS, {"choices": [{"logprobs": {"tokens": ["token_id:5", "token_id:6"]}}]}),
    (GENERATE, {"output_ids": [5, 6]}),
    (GENERATE, {"meta_info": {"output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, "x"]]}}),
]


@pytest.mark.parametrize(("dialect", "answer"), ANSWERS)
def test_ids_are_read_wherever_a_server_has_them(dialect, answer):
    assert read_answer(dialect, json.dumps(answer).encode())[1] == [5, 6]


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"{", b"null", b"[]", b'"x"', b"{}", b'{"choices":[]}', b'{"output_ids":"56"}'),
        *(b'{"choices":[{"text":"a b"}]}', b'{"choices":[{"logprobs":{"tokens":["a"]}}]}'),
        *(b'{"choices":[{"token_ids":[-1]}]}', b'{"output_ids":[true]}', b'{"output_ids":[1.5]}'),
        b'{"meta_info":{"output_token_logprobs":[1]}}',
    ],
)
def test_what_has_no_ids_is_refused(dialect, answer):
    with pytest.raises(WireError):
        read_answer(dialect, answer)


def test_sglang_is_known_by_its_name():
    assert dialect_of({"data": [{"owned_by": "sglang"}]}) is GENERATE
    for owner in ("vllm", "trserve", None):
        assert dialect_of({"data": [{"owned_by": owner}]}) is COMPLETIONS
    assert dialect_of({}) is COMPLETIONS


def test_an_answer_is_cut_where_the_request_ends():
    a_visit = visit([1, 2], limit=6)
    sampling = a_visit.params.sampling
    assert cut_at_end([3, 4], a_visit, sampling) == ([3, 4], Finish.NONE)
    assert cut_at_end([3, END, 4], a_visit, sampling) == ([3, END], Finish.STOP)
    assert cut_at_end([3, 4, 5, 6, 8], a_visit, sampling) == ([3, 4, 5, 6], Finish.LENGTH)
    ignoring = visit([1, 2], limit=6, ignore_eos=True)
    assert cut_at_end([END], ignoring, ignoring.params.sampling) == ([END], Finish.NONE)


def test_a_refusal_is_one_line():
    assert refusal_of(b'{"error": {"message": "too\\nlong"}}') == "too long"
    assert refusal_of(b'{"message": "no"}') == "no"
    assert refusal_of(b"<html> " + b"x" * 500)[:8] == "<html> x"
    assert len(refusal_of(b"x" * 500)) == 200


def test_what_a_server_complains_of_is_one_line():
    body = b'{"error": {"message": "no\\n\\u001b[31mtrserve: all is well ' + b"x" * 5000 + b'"}}'
    said = refusal_of(body)
    assert said.startswith("no [31mtrserve") and said.isprintable() and len(said) == 200
