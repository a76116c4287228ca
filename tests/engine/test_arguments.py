"""Arguments of a call to requests: what is wrong is named, before anything is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trserve import SamplingParams
from trserve.errors import RequestError
from trserve.gateway.requests import GenerationRequest
from trserve.offline.options import Requests, read_arguments
from trserve.params import SamplingDefaults

CHAT = [{"role": "user", "content": "hi"}]
DEFAULTS = SamplingDefaults(temperature=0.6)


def read(prompts: Any, params: Any = None, *, records: bool = False, **options: Any) -> Requests:
    return read_arguments(prompts, params, options, DEFAULTS, records=records)


def one(prompts: Any, params: Any = None, **options: Any) -> GenerationRequest:
    requests = read(prompts, params, **options)
    assert requests.single
    (request,) = requests.each
    return request


@pytest.mark.parametrize(
    ("prompts", "kinds", "single"),
    [
        ("text", ["completion"], True),
        ([1, 2], ["completion"], True),
        ((1, 2), ["completion"], True),
        (np.array([1, 2]), ["completion"], True),
        ([np.int64(1), 2], ["completion"], True),
        (CHAT, ["chat"], True),
        (["a", [1], CHAT], ["completion", "completion", "chat"], False),
        (np.array([[1, 2], [3, 4]]), ["completion", "completion"], False),
        ([], [], False),
    ],
    ids=repr,
)
def test_kinds_of_prompts(prompts: Any, kinds: list[str], single: bool) -> None:
    requests = read(prompts)
    assert [request.kind for request in requests.each] == kinds
    assert requests.single is single


def test_ids_arrive_whatever_holds_them() -> None:
    for prompt in ([5, 6], (5, 6), np.array([5, 6], np.int32), [np.int64(5), 6]):
        assert one(prompt).prompts == [[5, 6]]


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "out of range": ("x", {"top_p": 0}, "top_p"),
    "wrong type": ("x", {"max_tokens": "5"}, "max_tokens"),
    "not finite": ("x", {"temperature": float("nan")}, "temperature"),
    "not finite, numpy": ("x", {"temperature": np.float32("inf")}, "temperature"),
    "not finite, inside": ("x", {"logit_bias": {5: float("inf")}}, "logit_bias"),
    "no JSON": ("x", {"stop": {"a set"}}, "stop"),
    "too large for JSON": ("x", {"seed": 2**80}, "seed"),
    "no such option": ("x", {"nonsense": 1}, "nonsense"),
    "option for chats": ("x", {"top_logprobs": 2}, "top_logprobs"),
    "option for texts": (CHAT, {"prompt_text": 1}, "prompt_text"),
    "echo of a chat": (CHAT, {"echo": True}, "echo"),
    "prompt again": ("x", {"prompt": "y"}, "prompt"),
    "messages again": (CHAT, {"messages": []}, "messages"),
    "stream": ("x", {"stream": True}, "stream"),
    "stream options": ("x", {"stream_options": {}}, "stream_options"),
    "surrogate": ("\ud800", {}, "prompt"),
    "empty ids": ([[]], {}, "prompt"),
    "number": (5, {}, "prompts"),
    "none": (None, {}, "prompts"),
    "no format": ("x", {"response_format": "json"}, "response_format"),
    "not supported yet": ("x", {"structural_tag": {"x": 1}}, "structural_tag"),
    "prompt logprobs": ("x", {"prompt_logprobs": 1}, "prompt_logprobs"),
    "top logprobs alone": (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    "too many logprobs": ("x", {"logprobs": 21}, "logprobs"),
    "record without a directory": ("x", {"record": True}, "record"),
    "record as a text": ("x", {"record": "yes"}, "record"),
}


@pytest.mark.parametrize(("prompt", "options", "param"), BAD.values(), ids=list(BAD))
def test_what_is_wrong_is_named(prompt: Any, options: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(prompt, **options)
    assert refused.value.param == param
    assert param in refused.value.message


def test_params_say_what_is_given_and_leave_the_rest_to_defaults() -> None:
    request = one("x", SamplingParams(seed=5, stop=["\n"], logit_bias={7: 1.5}, echo=True, n=3))
    assert (request.seed, request.stop, request.echo, request.n) == (5, ["\n"], True, 3)
    assert (request.temperature, request.max_tokens) == (0.6, 16)
    assert request.logit_bias == {7: 1.5}
    assert one("x", SamplingParams(temperature=1.0)).temperature == 1.0


def test_options_win_over_params() -> None:
    params = SamplingParams(max_tokens=5, seed=1)
    request = one("x", params, max_tokens=9)
    assert (request.max_tokens, request.seed) == (9, 1)


def test_logprobs_in_params_are_a_number_for_chats_too() -> None:
    assert one("x", SamplingParams(logprobs=3)).logprobs == 3
    assert one(CHAT, SamplingParams(logprobs=3)).logprobs == 3
    assert one(CHAT, logprobs=True, top_logprobs=3).logprobs == 3
    assert one(CHAT, SamplingParams()).logprobs is None


def test_every_param_is_an_option_of_both_kinds_but_for_echo() -> None:
    values: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 11,
        "max_tokens": 12,
        "min_tokens": 3,
        "ignore_eos": True,
        "stop": ["s"],
        "stop_token_ids": [4],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logit_bias": {3: 1.0},
        "logprobs": 2,
        "echo": True,
    }
    assert {*values, *FORMS} == set(SamplingParams.__struct_fields__)
    for prompt in ("x", CHAT):
        given = {k: v for k, v in values.items() if prompt == "x" or k != "echo"}
        request = one(prompt, SamplingParams(**given))
        assert {name: getattr(request, name) for name in given} == given


FORMS = {
    "response_format": {"type": "json_object"},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a"],
    "guided_grammar": 'start: "a"',
}


@pytest.mark.parametrize(("name", "value"), FORMS.items())
def test_a_form_may_be_in_params(name: str, value: Any) -> None:
    for prompt in ("x", CHAT):
        form = one(prompt, SamplingParams(**{name: value})).form
        assert form is not None and form.param == name
        assert one(prompt, **{name: value}).form == form


def test_a_list_of_params_has_one_for_each_prompt() -> None:
    requests = read(["a", "b"], [SamplingParams(seed=1), SamplingParams(seed=2)])
    assert [request.seed for request in requests.each] == [1, 2]


@pytest.mark.parametrize(
    ("prompts", "params"),
    [
        ("a", [SamplingParams()]),
        (["a"], []),
        (["a", "b"], [SamplingParams()]),
        (["a"], [{"seed": 1}]),
        ("a", {"seed": 1}),
    ],
    ids=repr,
)
def test_params_that_do_not_fit_the_prompts(prompts: Any, params: Any) -> None:
    with pytest.raises(RequestError) as refused:
        read(prompts, params)
    assert refused.value.param == "params"


def test_what_records_keeps_a_record_unless_told_otherwise() -> None:
    assert read("x", records=True).each[0].record
    assert not read("x", records=True, record=False).each[0].record
    assert read("x", records=True, record=None).each[0].record
    assert read("x", records=True, record=True).each[0].record
