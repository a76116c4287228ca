"""Bodies of the two routes: what clients really send, each refusal by name, and random JSON."""

import json
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.machine_speed import slowness
from trserve.errors import RequestError
from trserve.gateway.requests import GenerationRequest, parse_chat, parse_completion
from trserve.params import SamplingDefaults

USER = [{"role": "user", "content": "hi"}]


def chat(**fields):
    return parse_chat(json.dumps({"messages": USER, **fields}).encode())


def completion(**fields):
    return parse_completion(json.dumps({"prompt": "hi", **fields}).encode())


def refusal(parse, body):
    with pytest.raises(RequestError) as refused:
        parse(body if isinstance(body, bytes) else json.dumps(body).encode())
    error = refused.value
    assert (error.status, error.type) == (400, "invalid_request_error")
    assert error.param is None or error.param in error.message
    return error


def refused_param(**fields):
    """The parameter that both routes name when they refuse ``fields``."""
    params = {
        refusal(parse_chat, {"messages": USER, **fields}).param,
        refusal(parse_completion, {"prompt": "hi", **fields}).param,
    }
    assert len(params) == 1
    return params.pop()


def test_defaults():
    assert chat() == GenerationRequest(kind="chat", messages=USER, add_special_tokens=False)
    assert completion() == GenerationRequest(kind="completion", prompts=["hi"], max_tokens=16)


def test_explicit_nulls_are_the_defaults():
    names = [
        "model", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed",
        "max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "stop", "logprobs",
        "stop_token_ids", "include_stop_str_in_output", "no_stop_trim", "skip_special_tokens",
        "add_special_tokens", "return_token_ids", "trserve", "n", "best_of", "echo", "suffix",
        "top_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "logit_bias", "response_format", "tools", "tool_choice", "functions", "guided_json",
        "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents",
        "chat_template", "structured_outputs", "prompt_logprobs", "user", "metadata",
    ]  # fmt: skip
    nulls = dict.fromkeys(names)
    assert chat(**nulls) == chat()
    assert completion(**nulls) == completion()
    inner = {"trace": None, "router": None, "entry_model": None, "only": None}
    assert chat(trserve=inner) == chat(trserve={}) == chat()
    options = {"include_usage": None, "continuous_usage_stats": None}
    assert chat(stream=True, stream_options=options) == chat(stream=True)


def test_every_field_arrives():
    request = chat(
        model="org/name",
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=-2,
        frequency_penalty=0.5,
        logit_bias={"7": -100, "123456": 1.5},
        seed=-5,
        max_tokens=9,
        min_tokens=3.0,
        ignore_eos=True,
        stop=["a", "b"],
        stop_token_ids=[1, 2.0],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        add_special_tokens=True,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        return_token_ids=True,
        chat_template_kwargs={"enable_thinking": False},
        documents=[{"title": "t", "text": "x"}],
        add_generation_prompt=False,
        trserve={"trace": True, "router": {"tau": 1}, "entry_model": "B", "only": "A"},
    )
    assert request == GenerationRequest(
        kind="chat",
        model="org/name",
        model_as_sent="org/name",
        messages=USER,
        chat_template_kwargs={
            "documents": [{"title": "t", "text": "x"}],
            "enable_thinking": False,
        },
        add_generation_prompt=False,
        add_special_tokens=True,
        temperature=0.0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=-2.0,
        frequency_penalty=0.5,
        logit_bias={7: -100.0, 123456: 1.5},
        seed=-5,
        max_tokens=9,
        min_tokens=3,
        ignore_eos=True,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        stream=True,
        include_usage=True,
        continuous_usage_stats=True,
        return_token_ids=True,
        trace=True,
        router_params={"tau": 1.0},
        entry_model="B",
        only="A",
    )
    assert all(type(i) is int for i in [*request.stop_token_ids, request.min_tokens])


def test_what_load_tools_send_by_default():
    """As recorded from the tools; each must be taken without a word."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    guidellm = chat(
        messages=parts,
        max_completion_tokens=8,
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    assert guidellm.messages == USER
    vllm = completion(
        model="m",
        temperature=0.0,
        repetition_penalty=1.0,
        max_tokens=8,
        logprobs=None,
        stream=True,
        stream_options={"include_usage": True},
        ignore_eos=True,
    )
    assert vllm.include_usage
    sglang = completion(temperature=0.0, best_of=1, max_tokens=8, stream=True, ignore_eos=True)
    assert sglang.ignore_eos
    sdk = chat(
        user="u", metadata={"a": "b"}, store=False, service_tier="auto", parallel_tool_calls=True,
        n=1, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, logprobs=False,
        top_logprobs=0, response_format={"type": "text"}, tools=[], tool_choice="auto", x=[{}],
    )  # fmt: skip
    assert sdk == chat()
    harness = completion(prompt=[[5, 6, 7]], max_tokens=1, seed=1234, stop=["\n\n", "Q:"] * 4)
    assert harness.prompts == [[5, 6, 7]]


def test_new_name_of_max_tokens_wins():
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert chat(max_tokens=5).max_tokens == 5
    assert refusal(parse_chat, {"messages": USER, "max_completion_tokens": 0}).param == (
        "max_completion_tokens"
    )
    assert completion(max_completion_tokens=7).max_tokens == 16  # not a field of that route


@pytest.mark.parametrize("value", [0, -1, None])
def test_top_k_off(value):
    assert chat(top_k=value).top_k == 0


@pytest.mark.parametrize("value", [1e-9, 1e-30, 1e-300])
def test_tiny_top_p_stays_positive_in_float32(value):
    import numpy as np

    assert np.float32(completion(top_p=value).top_p) > 0


def test_stop_forms_and_synonyms():
    assert chat(stop="x").stop == ["x"]
    assert chat(stop=[]).stop == []
    assert chat(no_stop_trim=True).include_stop_str_in_output
    assert len(chat(stop=["x" * 1024] * 64).stop) == 64


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1, 0, 1e3])
def test_seeds_in_range(seed):
    assert chat(seed=seed).seed == int(seed)


OUT_OF_RANGE = [
    ("temperature", [-1, -1e-9, 1e39, 10**400]),
    ("top_p", [0, 0.0, -1, 1.5]),
    ("min_p", [-0.1, 1.1]),
    ("top_k", [-2, 1.5, 2**63]),
    ("seed", [2**63, 2**64, -(2**63) - 1, 0.5]),
    ("max_tokens", [0, -1, 1.5, 2**63]),
    ("min_tokens", [-1, 1.5]),
    ("n", [0, -1, 1.5, 2**63]),
    ("best_of", [0, 2, 5]),
    ("repetition_penalty", [0, 0.0, -1, 1e-3, 101, 1e39, 10**400]),
    ("presence_penalty", [-2.1, 2.1, 1e300]),
    ("frequency_penalty", [-2.1, 2.1, -(10**400)]),
    ("logit_bias", [{str(token): 1 for token in range(257)}]),
    ("stop", ["", ["a", ""], ["x"] * 65, ["x" * 1025]]),
]


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in OUT_OF_RANGE for v in vs])
def test_out_of_range_is_named(name, value):
    assert refused_param(**{name: value}) == name


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "seed", "max_tokens"])
def test_no_number_that_is_not_finite(name, literal):
    error = refusal(parse_chat, b'{"messages":[],"%b":%b}' % (name.encode(), literal.encode()))
    assert error.param in (None, name)  # most are not JSON at all


NUMBERS = [
    "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "n", "best_of",
]  # fmt: skip
FLAGS = [
    "stream", "ignore_eos", "include_stop_str_in_output", "no_stop_trim", "skip_special_tokens",
    "add_special_tokens", "return_token_ids",
]  # fmt: skip


@pytest.mark.parametrize("value", ["5", True, [], {}])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_numbers(name, value):
    assert refused_param(**{name: value}) == name


@pytest.mark.parametrize("value", ["true", 1, 0, []])
@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_booleans(name, value):
    assert refused_param(**{name: value}) == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 5}, "model"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", None]}, "stop[1]"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [1, -2]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [1, 2.5]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [0] * 1025}, "stop_token_ids"),
        ({"stream": True, "stream_options": 1}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
        ({"trserve": []}, "trserve"),
        ({"trserve": {"trcae": True}}, "trserve.trcae"),
        ({"trserve": {"trace": 1}}, "trserve.trace"),
        ({"trserve": {"only": 1}}, "trserve.only"),
        ({"trserve": {"router": {"tau": "0.1"}}}, "trserve.router.tau"),
        ({"trserve": {"router": {"q": 1, "tau": True}}}, "trserve.router.tau"),
        ({"trserve": {"router": {"tau": None}}}, "trserve.router.tau"),
        ({"trserve": {"router": {"tau": 10**400}}}, "trserve.router.tau"),
        ({"trserve": {"router": [1]}}, "trserve.router"),
        ({"trserve": {"router": {str(i): i for i in range(65)}}}, "trserve.router"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"logit_bias": {"-5": 1}}, "logit_bias.-5"),
        ({"logit_bias": {"1.5": 1}}, "logit_bias.1.5"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
        ({"logit_bias": {"5": True}}, "logit_bias.5"),
        ({"logit_bias": {"5": None}}, "logit_bias.5"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias.5"),
        ({"logit_bias": {"5": -(10**400)}}, "logit_bias.5"),
    ],
)
def test_wrong_types_are_named(fields, param):
    assert refused_param(**fields) == param


UNSUPPORTED = [
    ("use_beam_search", [True]),
    ("prompt_logprobs", [0, 1]),
    ("bad_words", [["x"]]),
    ("allowed_token_ids", [[1]]),
    ("structural_tag", [{"x": 1}]),
]
UNSUPPORTED_CHAT = [
    ("echo", [True]),
    ("chat_template", ["{{ x }}"]),
    ("functions", [[{"name": "f"}]]),
]


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in UNSUPPORTED for v in vs])
def test_what_is_not_supported_is_refused(name, value):
    assert refused_param(**{name: value}) == name


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in UNSUPPORTED_CHAT for v in vs])
def test_what_chat_does_not_support_is_refused(name, value):
    error = refusal(parse_chat, {"messages": USER, name: value})
    assert error.param == name
    assert "not supported yet" in error.message


def test_an_echo_may_be_the_whole_answer():
    request = completion(echo=True, max_tokens=0, logprobs=1)
    assert (request.echo, request.max_tokens, request.logprobs) == (True, 0, 1)
    assert completion(echo=False) == completion()
    assert refusal(parse_completion, {"prompt": "x", "max_tokens": 0}).param == "max_tokens"
    assert refusal(parse_completion, {"prompt": "x", "echo": 1}).param == "echo"


def test_logprobs_of_the_two_routes():
    assert chat(logprobs=False) == chat(top_logprobs=0) == chat()
    assert (chat(logprobs=True).logprobs, completion(logprobs=0).logprobs) == (0, 0)
    assert chat(logprobs=True, top_logprobs=20).logprobs == 20
    assert completion(logprobs=20).logprobs == 20
    assert completion(logprobs=None).logprobs is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 2e9}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": "true"}, "logprobs"),
    ],
)
def test_logprobs_of_a_chat_that_are_refused(fields, param):
    assert refusal(parse_chat, {"messages": USER, **fields}).param == param


@pytest.mark.parametrize("value", [True, "5", -1, -5, 21, 2e9, 1.5, []])
def test_logprobs_of_a_completion_that_are_refused(value):
    assert refusal(parse_completion, {"prompt": "x", "logprobs": value}).param == "logprobs"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_tools():
    assert chat(tools=[{"type": "function"}], tool_choice="none") == chat()
    for choice in (None, "auto"):
        request = chat(tools=[TOOL], tool_choice=choice)
        assert request.tools == request.chat_template_kwargs["tools"] == [TOOL]
        assert not request.called_tools and not request.constrained
    assert chat(tools=[TOOL]).parallel_tool_calls
    assert not chat(tools=[TOOL], parallel_tool_calls=False).parallel_tool_calls


OTHER_TOOL = {"type": "function", "function": {"name": "g"}}
NAMED = {"type": "function", "function": {"name": "g"}}


def test_a_call_that_must_come():
    any_call = chat(tools=[TOOL, OTHER_TOOL], tool_choice="required")
    assert (any_call.called_tools, any_call.calls_any) == (["f", "g"], True)
    one = chat(tools=[TOOL, OTHER_TOOL], tool_choice=NAMED)
    assert (one.called_tools, one.calls_any) == (["g"], False)
    assert one.tools == one.chat_template_kwargs["tools"] == [TOOL, OTHER_TOOL]


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        *(([TOOL], choice) for choice in ("x", 1, True, [], {}, {"type": "function"}, NAMED)),
        *(([TOOL], {"type": "function", "function": f}) for f in ("f", {}, {"name": ["f"]})),
        *((none, choice) for none in (None, []) for choice in ("required", NAMED)),
    ],
)
def test_a_choice_of_no_tool_is_refused(tools, choice):
    error = refusal(parse_chat, {"messages": USER, "tools": tools, "tool_choice": choice})
    assert error.param == "tool_choice"


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (1, "tools[0]"),
        ({"type": "custom"}, "tools[0]"),
        ({"type": "function"}, "tools[0].function"),
        ({"type": "function", "function": {"name": 1}}, "tools[0].function"),
        (
            {"type": "function", "function": {"name": "f", "parameters": "x"}},
            "tools[0].function.parameters",
        ),
    ],
)
def test_tools_that_are_none_are_refused(tool, param):
    assert refusal(parse_chat, {"messages": USER, "tools": [tool]}).param == param


def test_what_becomes_of_reasoning():
    assert chat().reasoning == "apart"
    assert chat(separate_reasoning=False).reasoning == "within"
    assert chat(include_reasoning=False).reasoning == "dropped"


def test_the_last_message_may_go_on():
    request = chat(continue_final_message=True)
    assert (request.continue_final_message, request.add_generation_prompt) == (True, False)
    error = refusal(
        parse_chat,
        {"messages": USER, "continue_final_message": True, "add_generation_prompt": True},
    )
    assert error.param == "continue_final_message"


@pytest.mark.parametrize(
    ("model", "name", "params"),
    [
        ("trserve:threshold=0.3", "trserve", {"threshold": 0.3}),
        ("org/a:b:tau=1e-2, q=2", "org/a:b", {"tau": 0.01, "q": 2.0}),
        ("org/name:latest", "org/name:latest", {}),
        ("a=b", "a=b", {}),
        (":threshold=1", ":threshold=1", {}),
        ("a:b/c=1", "a:b/c=1", {}),
        ("", "", {}),
    ],
)
def test_model_names_with_parameters(model, name, params):
    request = chat(model=model)
    assert (request.model, request.router_params) == (name, params)
    assert request.model_as_sent == model


@pytest.mark.parametrize("model", ["m:tau=", "m:tau=x", "m:tau=nan", "m:tau=inf", "m:a=1,b"])
def test_bad_parameters_in_a_model_name(model):
    assert refused_param(model=model) == "model"


def test_router_parameters_of_the_body_win():
    request = chat(model="m:a=1,b=2", trserve={"router": {"b": 3}})
    assert request.router_params == {"a": 1.0, "b": 3.0}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("x", ["x"]),
        (["x"], ["x"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [2]], ["a", [2]]),
        ("\x00", ["\x00"]),
        ([0, 2**31 - 1], [[0, 2**31 - 1]]),
    ],
)
def test_forms_of_a_prompt(prompt, prompts):
    request = completion(prompt=prompt)
    assert request.prompts == prompts
    assert request.num_choices == len(prompts)


def test_choices_are_prompts_times_n():
    request = completion(prompt=["a", "b", "c"], n=2, best_of=2)
    assert (request.n, request.num_choices) == (2, 6)
    assert chat(n=3.0, best_of=1).num_choices == 3


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([""], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        (["a", 5], "prompt[1]"),
        ([[1], None], "prompt[1]"),
        ([[1], [2, -1]], "prompt[1][1]"),
        (["x"] * 4097, "prompt"),
        (None, "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        ([1, "a"], "prompt[1]"),
        ([1, -1], "prompt[1]"),
        ([1, 2**31], "prompt[1]"),
        ([1, True], "prompt[1]"),
        ([1.5], "prompt[0]"),
        ([None], "prompt[0]"),
        ([["a"]], "prompt[0][0]"),
        ([[1, [2]]], "prompt[0][1]"),
    ],
)
def test_prompts_that_are_refused(prompt, param):
    assert refusal(parse_completion, {"prompt": prompt}).param == param


def test_missing_prompt_and_messages():
    assert refusal(parse_completion, {}).param == "prompt"
    assert refusal(parse_chat, {}).param == "messages"
    assert refusal(parse_chat, {"messages": []}).param == "messages"
    assert refusal(parse_chat, {"messages": "hi"}).param == "messages"
    assert refusal(parse_chat, {"messages": [5]}).param == "messages[0]"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    assert refusal(parse_chat, {"messages": image}).param == "messages[0].content[0]"


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
@pytest.mark.parametrize(
    "body",
    [
        b"", b" \n", b"\xef\xbb\xbf", b"{", b"nul", b"[]", b"5", b'"x"', b"null", b"{} {}",
        b'{"prompt":"\\ud800"}', b'{"model":"\xff"}', b"{'prompt': 1}", b"a=b&c=d", b"\x00",
        b"[" * 100_000, b'{"x":' + b"[" * 100_000, b'{"messages":' + b'[{"a":' * 50_000,
        b'{"prompt":' + b"[" * 50_000 + b"]" * 50_000 + b"}", b"9" * 100_000,
    ],
)  # fmt: skip
def test_bodies_that_are_no_requests(parse, body):
    begin = time.perf_counter()
    refusal(parse, body)
    assert time.perf_counter() - begin < 0.5 * slowness()


def test_byte_order_mark_and_duplicate_keys_are_taken():
    assert parse_completion(b'\xef\xbb\xbf{"prompt":"a","prompt":"b"}').prompts == ["b"]


def test_a_huge_unknown_name_is_neither_repeated_nor_slow():
    name = "x - at `$" * 100_000
    begin = time.perf_counter()
    error = refusal(parse_chat, {"messages": USER, "trserve": {name: 1}})
    assert time.perf_counter() - begin < 0.5 * slowness()
    assert error.param.startswith("trserve.x - at `$")
    assert len(error.message) < 300


def test_a_refusal_does_not_repeat_a_huge_value():
    error = refusal(parse_completion, {"prompt": "x", "logit_bias": {"1": "y" * 100_000}})
    assert len(error.message) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3),
    max_leaves=6,
)
FIELDS = sorted(
    {*NUMBERS, *FLAGS, "model", "messages", "prompt", "stop", "stop_token_ids", "stream_options"}
    | {"trserve", "chat_template_kwargs", "documents", "tool_choice", "max_completion_tokens"}
    | {name for name, _ in UNSUPPORTED + UNSUPPORTED_CHAT}
    | {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"}
    | {"guided_grammar", "regex", "json_schema", "ebnf", "tools"}
)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6), st.booleans())
def test_random_bodies_parse_or_are_refused(fields, valid):
    if valid:
        fields = {**fields, "messages": USER, "prompt": "x"}
    body = json.dumps(fields).encode()
    for parse in (parse_chat, parse_completion):
        try:
            request = parse(body)
        except RequestError as refused:
            assert refused.status == 400
        else:
            assert math.isfinite(request.temperature)
            assert 0 < request.top_p <= 1


@given(st.binary(max_size=40) | JSON.map(lambda v: json.dumps(v).encode()))
def test_random_bytes_parse_or_are_refused(body):
    for parse in (parse_chat, parse_completion):
        try:
            parse(body)
        except RequestError as refused:
            assert refused.status == 400


def test_defaults_of_the_checkpoint_count_where_the_request_is_silent() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1)
    silent = parse_completion(b'{"prompt": "x"}', defaults)
    assert (silent.temperature, silent.top_p, silent.top_k, silent.min_p) == (0.6, 0.9, 20, 0.1)
    body = b'{"prompt": "x", "temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0}'
    spoken = parse_completion(body, defaults)
    assert (spoken.temperature, spoken.top_p, spoken.top_k, spoken.min_p) == (1.0, 1.0, 0, 0.0)


def test_names_that_are_kept_and_sent_back_are_short():
    for name in ("model", "rid"):
        assert refused_param(**{name: "x" * 1025}) == name
        assert getattr(completion(**{name: "x" * 1024}), name) == "x" * 1024
