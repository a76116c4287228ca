"""SGLang's /generate: bodies to requests, and answers as its clients read them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.small_tokenizers import byte_level, save
from tests.gateway.test_sinks import Socket, events
from trserve.errors import RequestError
from trserve.gateway.answer import Delta
from trserve.gateway.logprobs import TokenNames
from trserve.gateway.prompts import Prompt
from trserve.gateway.responses import usage_dict
from trserve.gateway.sglang import Ask, Generate, parse_generate
from trserve.gateway.sglang_responses import GenerateStream, GenerateWhole, Style
from trserve.gateway.tokenizer import Tokenizer
from trserve.ipc.annotations import Annotation


def parse(**fields: Any) -> Generate:
    return parse_generate(json.dumps(fields).encode())


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        parse(**fields)
    return error.value


# ---- requests ----


def test_defaults() -> None:
    found = parse(text="hello")
    (request,) = found.requests
    assert found.single
    assert request.prompts == ["hello"]
    assert (request.max_tokens, request.temperature, request.logprobs) == (128, 1.0, None)
    assert not request.stream
    assert found.asks == [Ask(None, None, -1, False)]
    assert parse(text="hello", stream=None, sampling_params=None, rid=None, lora_path=None) == found


def test_names_of_sampling_params() -> None:
    params = {
        "max_new_tokens": 7,
        "min_new_tokens": 2,
        "sampling_seed": 5,
        "top_k": -1,
        "stop": ["x"],
        "stop_token_ids": [3],
        "no_stop_trim": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "custom_params": {"unknown": 1},
    }
    (request,) = parse(input_ids=[1, 2], sampling_params=params, stream=True, rid="r").requests
    assert request.prompts == [[1, 2]]
    assert (request.max_tokens, request.min_tokens, request.seed, request.top_k) == (7, 2, 5, 0)
    assert (request.stop, request.stop_token_ids) == (["x"], [3])
    assert request.include_stop_str_in_output and request.ignore_eos and request.stream
    assert not request.skip_special_tokens
    assert request.rid == "r"


def test_a_batch_has_a_request_for_each_prompt() -> None:
    found = parse(
        input_ids=[[1], [2, 3]],
        sampling_params=[{"max_new_tokens": 1}, {"n": 2, "temperature": 0}],
        rid=["a", "b"],
        return_logprob=[True, False],
        logprob_start_len=0,
        top_logprobs_num=[2, 3],
    )
    assert not found.single
    assert [request.prompts for request in found.requests] == [[[1]], [[2, 3]]]
    assert [request.n for request in found.requests] == [1, 2]
    assert [request.max_tokens for request in found.requests] == [1, 128]
    assert found.asks == [Ask("a", 2, 0, False), Ask("b", None, -1, False)]
    assert [request.echo for request in found.requests] == [True, False]
    assert [ask.rid for ask in parse(text=["x", "y"], rid="r").asks] == ["r_0", "r_1"]
    assert not parse(text=["x"]).single
    assert not parse(text="x", sampling_params={"n": 2}).single


def test_a_prompt_may_be_scored_alone() -> None:
    scored = {"return_logprob": True, "logprob_start_len": 0}
    (request,) = parse(text="x", sampling_params={"max_new_tokens": 0}, **scored).requests
    assert request.max_tokens == 0
    error = refused(text="x", sampling_params={"max_new_tokens": 0})
    assert error.param == "sampling_params.max_new_tokens"
    assert "max_new_tokens" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "x", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids[1]"),
        ({"input_ids": ["x"]}, "input_ids"),
        ({"text": ["x", "y"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": "x", "rid": ["a", "b"]}, "rid"),
        ({"text": "x", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "x", "sampling_params": {"max_new_tokens": "1"}}, None),
        ({"text": "x", "sampling_params": {"sampling_seed": 2**64}}, None),
        ({"text": "x", "sampling_params": {"regex": 5}}, "sampling_params.regex"),
        ({"text": "x", "sampling_params": {"stop_regex": "["}}, "stop_regex"),
        ({"text": "x", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "x", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "x", "lora_path": "a"}, "lora_path"),
        ({"text": "x", "image_data": ["a"]}, "image_data"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str | None) -> None:
    error = refused(**fields)
    assert error.status == 400
    if param is not None:
        assert error.param is not None and error.param.endswith(param)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3),
    max_leaves=6,
)
FIELDS = ["text", "input_ids", "sampling_params", "rid", "stream", "return_logprob", "trserve"]


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5))
def test_random_bodies_parse_or_are_refused(fields: dict[str, Any]) -> None:
    try:
        assert parse(**fields).requests
    except RequestError as error:
        assert error.status == 400


# ---- answers ----


@pytest.fixture(scope="module")
def style(tmp_path_factory: pytest.TempPathFactory) -> Style:
    folder: Path = save(byte_level(), tmp_path_factory.mktemp("tokenizer"))
    return Style(TokenNames(Tokenizer.load(folder)), ["small", "large"])


A, B, C, END = 35, 36, 37, 2  # letters of the byte-level vocabulary, and <|im_end|>


def usage(tokens: int) -> dict[str, Any]:
    return usage_dict(2, tokens, {"handoffs": 1}, cached_tokens=1)


def feed(sink: Any, deltas: Sequence[Delta], prompt: list[int]) -> None:
    place = sink.choice(0, Prompt(prompt))
    count = 0
    for delta in deltas:
        count += len(delta.token_ids)
        place.usage = lambda count=count: usage(count)
        place.take(delta)


def annotated(token: int) -> Annotation:
    return Annotation(-0.5, [token, END], [-0.5, -2.0])


DELTAS = [
    Delta("A", [A], [0], None, None, [annotated(A)], [annotated(B)]),
    Delta("", [B], [1], None, None, [annotated(B)]),
    Delta("C", [C, END], [1, 0], "stop", None, [annotated(C), annotated(END)]),
]


UNSCORED = [delta._replace(prompt_annotations=None) for delta in DELTAS]


def play(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 10))


def test_a_body(style: Style) -> None:
    async def story() -> None:
        sink = GenerateWhole(parse(input_ids=[A, B], rid="r"), style)
        feed(sink, [delta._replace(annotations=()) for delta in DELTAS], [A, B])
        await sink.ended
        found = json.loads(sink.body())
        meta = found["meta_info"]
        assert (found["text"], found["output_ids"]) == ("AC", [A, B, C, END])
        assert meta.pop("e2e_latency") >= 0
        assert meta == {
            "id": "r",
            "finish_reason": {"type": "stop", "matched": END},
            "prompt_tokens": 2,
            "completion_tokens": 4,
            "cached_tokens": 1,
            "weight_version": "default",
            "trserve": {"handoffs": 1},
        }

    play(story())


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (Delta("x", [A], [0], "stop", "x"), {"type": "stop", "matched": "x"}),
        (Delta("x", [A], [0], "stop", 9), {"type": "stop", "matched": 9}),
        (Delta("x", [A], [0], "length", None), {"type": "length", "length": 1}),
        (Delta("", [], [], "abort", "timeout"), {"type": "abort", "message": "timeout"}),
    ],
)
def test_why_an_answer_ended(style: Style, last: Delta, reason: dict[str, Any]) -> None:
    async def story() -> None:
        sink = GenerateWhole(parse(text="x"), style)
        feed(sink, [last], [A])
        assert json.loads(sink.body())["meta_info"]["finish_reason"] == reason

    play(story())


def test_logprobs(style: Style) -> None:
    async def story() -> None:
        wanted = parse(
            input_ids=[A, B],
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=2,
            return_text_in_logprobs=True,
        )
        sink = GenerateWhole(wanted, style)
        feed(sink, DELTAS, [A, B])
        meta = json.loads(sink.body())["meta_info"]
        assert meta["input_token_logprobs"] == [[None, A, "A"], [-0.5, B, "B"]]
        assert [entry[1] for entry in meta["output_token_logprobs"]] == [A, B, C, END]
        assert meta["input_top_logprobs"][0] is None
        assert meta["output_top_logprobs"][0] == [[-0.5, A, "A"], [-2.0, END, "<|im_end|>"]]

    play(story())


def test_logprobs_of_the_output_alone(style: Style) -> None:
    async def story() -> None:
        sink = GenerateWhole(parse(input_ids=[A, B], return_logprob=True), style)
        feed(sink, UNSCORED, [A, B])
        meta = json.loads(sink.body())["meta_info"]
        assert meta["output_token_logprobs"][0] == [-0.5, A, None]
        assert not {"input_token_logprobs", "output_top_logprobs"} & set(meta)

    play(story())


def test_events_are_cumulative_or_incremental(style: Style) -> None:
    async def story() -> None:
        for incremental in (False, True):
            socket = Socket()
            wanted = parse(input_ids=[A, B], stream=True, return_logprob=True)
            sink = GenerateStream(
                wanted, style._replace(incremental=incremental), socket, chunked=False
            )
            sink.open()
            feed(sink, UNSCORED, [A, B])
            await sink.ended
            *parts, done = events(socket)
            assert done == "[DONE]"
            assert [part["meta_info"]["completion_tokens"] for part in parts] == [1, 2, 4]
            assert all("index" not in part for part in parts)
            texts, ids = zip(*((part["text"], part["output_ids"]) for part in parts), strict=True)
            if incremental:
                assert (texts, ids) == (("A", "", "C"), ([A], [B], [C, END]))
            else:
                assert (texts, ids) == (("A", "A", "AC"), ([A], [A, B], [A, B, C, END]))
            shown = [len(part["meta_info"]["output_token_logprobs"]) for part in parts]
            assert shown == ([1, 1, 2] if incremental else [1, 2, 4])
            reasons = [part["meta_info"]["finish_reason"] for part in parts]
            assert reasons == [None, None, {"type": "stop", "matched": END}]

    play(story())


@pytest.mark.parametrize("incremental", [False, True])
def test_a_prompt_is_repeated_with_all_else_or_shown_once(style: Style, incremental: bool) -> None:
    async def story() -> None:
        socket = Socket()
        wanted = parse(
            input_ids=[A, B],
            stream=True,
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=2,
        )
        sink = GenerateStream(
            wanted, style._replace(incremental=incremental), socket, chunked=False
        )
        sink.open()
        feed(sink, DELTAS, [A, B])
        await sink.ended
        *parts, _ = events(socket)
        entries = [part["meta_info"]["input_token_logprobs"] for part in parts]
        tops = [part["meta_info"]["input_top_logprobs"] for part in parts]
        whole = [[None, A, None], [-0.5, B, None]]
        whole_tops = [None, [[-0.5, B, None], [-2.0, END, None]]]
        assert entries == [whole, *([[], []] if incremental else [whole, whole])]
        assert tops == [whole_tops, *([[], []] if incremental else [whole_tops, whole_tops])]

    play(story())


def test_several_answers_are_told_apart(style: Style) -> None:
    async def story() -> None:
        socket = Socket()
        wanted = parse(text=["x", "y"], sampling_params={"n": 2}, stream=True, rid=["a", "b"])
        sink = GenerateStream(wanted, style, socket, chunked=False)
        sink.open()
        places = [sink.choice(index, Prompt([A])) for index in range(4)]
        for place in places:
            place.usage = lambda: usage(1)
            place.take(Delta("A", [A], [0], "length", None))
        await sink.ended
        *parts, _ = events(socket)
        assert [part["index"] for part in parts] == [0, 1, 2, 3]
        assert [part["meta_info"]["id"] for part in parts] == ["a_0", "a_1", "b_0", "b_1"]

    play(story())


def test_an_error_within_a_stream_ends_it(style: Style) -> None:
    async def story() -> None:
        socket = Socket()
        sink = GenerateStream(parse(text="x", stream=True), style, socket, chunked=False)
        sink.open()
        place = sink.choice(0, Prompt([A]))
        place.usage = lambda: usage(1)
        place.take(Delta("A", [A], [0], None, None))
        place.fail(RequestError("broken", status=500))
        _, error, done = events(socket)
        assert error["error"]["message"] == "broken"
        assert done == "[DONE]"

    play(story())
