"""From a parsed request to a job: each bad input is refused with its parameter's name."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.small_tokenizers import byte_level, save
from tests.gateway.stack import ListSink, completion, new_plan
from tests.ipc.memory import memory
from trserve.endpoint_plan import EndpointPlan
from trserve.errors import RequestError
from trserve.gateway.dispatcher import Job
from trserve.gateway.prompts import Prompt
from trserve.gateway.requests import GenerationRequest
from trserve.gateway.service import Service, choice_seed
from trserve.gateway.tokenizer import Tokenizer
from trserve.params import RequestParams, decode_params

TAU = {"name": "tau", "help": "", "default": 0.03, "minimum": 0.0, "maximum": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def new_service(folder: Path, **changes: Any) -> Service:
    plan = new_plan(folder, **changes)
    with memory(slots=plan.slots, row_tokens=plan.row_tokens) as shared:
        service = Service(plan, shared.slab())
    service.set_router_parameters([TAU])
    return service


@pytest.fixture(scope="module")
def service(folder: Path) -> Service:
    return new_service(folder)


def prepare(service: Service, request: GenerationRequest) -> Job:
    (job,) = service.prepare_all(request, lambda *_: ListSink())
    return job


def params(service: Service, **fields: Any) -> RequestParams:
    return decode_params(prepare(service, completion(**fields)).params)


BAD = {
    "unknown model": ({"model": "gpt-4"}, "model", 404),
    "unknown entry": ({"entry_model": "m2"}, "trserve.entry_model", 400),
    "unknown only": ({"only": "m2"}, "trserve.only", 400),
    "entry and only differ": ({"only": "m0", "entry_model": "m1"}, "trserve.entry_model", 400),
    "no such router parameter": ({"router_params": {"eta": 0.5}}, "trserve.router", 400),
    "router parameter out of range": ({"router_params": {"tau": 1.5}}, "trserve.router", 400),
    "threshold out of range": ({"router_params": {"threshold": -1.0}}, "trserve.router", 400),
    "id out of range": ({"prompts": [[1, 10**6]]}, "prompt", 400),
    "prompt as long as the context": ({"prompts": [[1] * 64]}, "prompt", 400),
    "text longer than the context": (
        {"prompts": ["x y" * 99]},
        "prompt",
        400,
    ),
    "one of several ids out of range": ({"prompts": [[1], [10**6]]}, "prompt", 400),
    "more choices than slots": ({"n": 5}, "n", 400),
    "far more choices than slots": ({"n": 5_000_000}, "n", 400),
    "more prompts than slots": ({"prompts": [[1]] * 3, "n": 2}, "n", 400),
    "stop id out of range": ({"stop_token_ids": [10**6]}, "stop_token_ids", 400),
    "biased id out of range": ({"logit_bias": {10**6: 1.0}}, "logit_bias", 400),
}


@pytest.mark.parametrize(("fields", "param", "status"), BAD.values(), ids=list(BAD))
def test_bad_input_names_its_parameter(
    service: Service, fields: dict[str, Any], param: str, status: int
) -> None:
    with pytest.raises(RequestError) as refused:
        service.prepare_all(completion(**fields), lambda *_: ListSink())
    assert (refused.value.param, refused.value.status) == (param, status)
    assert len(refused.value.message) < 300


def test_a_long_prompt_is_refused_with_the_counts(service: Service) -> None:
    with pytest.raises(RequestError, match=r"70 tokens.*64") as refused:
        prepare(service, completion(prompts=[[1] * 70]))
    assert refused.value.code == "context_length_exceeded"


def test_a_text_with_no_room_by_far_is_not_encoded_as_a_whole(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    with pytest.raises(RequestError, match=r"more than 64 tokens.*64") as refused:
        prepare(service, completion(prompts=["many words " * 2**17]))
    assert refused.value.code == "context_length_exceeded"
    assert sum(encoded) < 2**16


def test_a_long_text_of_few_tokens_is_a_prompt(service: Service) -> None:
    text = max(service.tokenizer.token_bytes() or [], key=len).decode() * 40
    assert len(text) > 4 * service.max_prompt_and_output
    job = prepare(service, completion(prompts=[text]))
    assert len(job.prompt_ids) < service.max_prompt_and_output


def test_a_chat_that_is_too_long_names_its_messages(service: Service) -> None:
    messages = [{"role": "user", "content": "many words " * 99}]
    with pytest.raises(RequestError) as refused:
        prepare(service, GenerationRequest(kind="chat", messages=messages))
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    ("max_tokens", "limit"), [(1, 4), (10, 13), (61, 64), (62, 64), (10**18, 64), (None, 64)]
)
def test_the_limit_is_that_of_request_and_context(
    service: Service, max_tokens: int | None, limit: int
) -> None:
    assert prepare(service, completion(max_tokens=max_tokens)).limit == limit


def test_the_context_is_the_shortest_of_the_models_that_may_write(folder: Path) -> None:
    service = new_service(folder, lengths=(64, 32))
    assert prepare(service, completion()).limit == 32
    assert prepare(service, completion(entry_model="m0")).limit == 32
    assert prepare(service, completion(only="m0")).limit == 64
    assert prepare(service, completion(only="m1")).limit == 32
    assert prepare(service, completion(only="m0", prompts=[[1] * 40])).limit == 64
    with pytest.raises(RequestError, match=r"40 tokens.*32"):
        prepare(service, completion(prompts=[[1] * 40]))


@pytest.mark.parametrize(
    ("fields", "entry", "pinned", "admit"),
    [
        ({}, 0, False, True),
        ({"entry_model": "m1"}, 1, False, False),
        ({"only": "m1"}, 1, True, False),
        ({"only": "m0", "entry_model": "m0"}, 0, True, False),
    ],
)
def test_entry_and_only(
    service: Service, fields: dict[str, Any], entry: int, pinned: bool, admit: bool
) -> None:
    job = prepare(service, completion(**fields))
    found = decode_params(job.params)
    assert (job.entry, found.pinned, found.admit) == (entry, pinned, admit)


@pytest.mark.parametrize("name", ["trserve", "other", None])
def test_every_served_name_is_a_model(service: Service, name: str | None) -> None:
    service.placements.check_model(name)
    prepare(service, completion(model=name))


def test_threshold_is_everybodys_name_of_the_first_parameter(service: Service) -> None:
    assert params(service, router_params={"threshold": 0.25}).router == {"tau": 0.25}
    assert params(service, router_params={"threshold": 0.25, "tau": 0.5}).router == {"tau": 0.5}
    assert params(service).router == {}


def test_a_parameter_that_is_not_for_requests_is_refused(folder: Path) -> None:
    service = new_service(folder)
    service.set_router_parameters([TAU, TAU | {"name": "secret", "per_request": False}])
    with pytest.raises(RequestError, match="secret"):
        prepare(service, completion(router_params={"secret": 0.5}))


def test_a_router_without_parameters_takes_none(folder: Path) -> None:
    service = new_service(folder, router="none")
    service.set_router_parameters([])
    with pytest.raises(RequestError, match="none"):
        prepare(service, completion(router_params={"threshold": 0.5}))


def test_sampling_arrives_at_the_workers(service: Service) -> None:
    found = params(
        service,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        seed=5,
        max_tokens=9,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[4, 5],
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={3: 2.0},
    ).sampling
    assert (found.repetition_penalty, found.logit_bias) == (1.5, {3: 2.0})
    assert (found.presence_penalty, found.frequency_penalty) == (0.5, -0.5)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.5, 0.9, 3, 0.1)
    assert (found.seed, found.max_tokens, found.min_tokens, found.ignore_eos) == (5, 9, 2, True)
    assert (found.stop_token_ids, found.eos_token_ids) == ((4, 5), (7,))


def test_min_tokens_is_no_more_than_can_be(service: Service) -> None:
    assert params(service, max_tokens=4, min_tokens=9).sampling.min_tokens == 4


def test_a_missing_seed_is_drawn_and_a_negative_one_has_64_bits(service: Service) -> None:
    seeds = {params(service).sampling.seed for _ in range(8)}
    assert len(seeds) == 8
    assert params(service, seed=-1).sampling.seed == 2**64 - 1


def test_each_choice_is_a_job_with_a_seed_of_its_own(service: Service) -> None:
    asked: list[int] = []

    def sink_of(index: int, prompt: Prompt) -> ListSink:
        assert len(prompt.ids) == 2 + index // 2
        asked.append(index)
        return ListSink()

    request = completion(prompts=[[1, 2], [3, 4, 5]], n=2, seed=-1)
    jobs = service.prepare_all(request, sink_of)
    assert asked == [0, 1, 2, 3]
    assert [list(job.prompt_ids) for job in jobs] == [[1, 2]] * 2 + [[3, 4, 5]] * 2
    seeds = [decode_params(job.params).sampling.seed for job in jobs]
    second = hashlib.blake2b(b"\xff" * 8 + bytes([1, 0, 0, 0, 0, 0, 0, 0]), digest_size=8).digest()
    assert seeds == [2**64 - 1, int.from_bytes(second, "little")] * 2
    assert len({choice_seed(7, choice) for choice in range(1000)}) == 1000


def test_without_a_seed_equal_prompts_get_different_ones(service: Service) -> None:
    jobs = service.prepare_all(completion(prompts=[[1]] * 4), lambda *_: ListSink())
    assert len({decode_params(job.params).sampling.seed for job in jobs}) == 4


def test_logprobs_take_pages_for_the_limit(folder: Path) -> None:
    service = new_service(folder, lengths=(4096, 4096), slots=2)
    assert prepare(service, completion(max_tokens=4000)).pages == 0
    job = prepare(service, completion(logprobs=5, max_tokens=100))
    assert (job.pages, decode_params(job.params).tops) == (1, 5)
    assert prepare(service, completion(logprobs=20, max_tokens=None)).pages == 44
    assert prepare(service, completion(logprobs=0, max_tokens=None)).pages == 3


def test_logprobs_that_can_never_fit_are_refused(folder: Path) -> None:
    service = new_service(folder, lengths=(200_000,), slots=2)
    assert prepare(service, completion(logprobs=20, max_tokens=90_000)).pages
    with pytest.raises(RequestError) as refused:
        prepare(service, completion(logprobs=20, max_tokens=150_000))
    assert (refused.value.status, refused.value.param) == (400, "logprobs")


def test_an_echo_with_logprobs_scores_the_prompt(service: Service) -> None:
    def job(**fields: Any) -> Job:
        return prepare(service, completion(**fields))

    scored = job(echo=True, logprobs=1, max_tokens=0)
    assert (scored.limit, scored.pages) == (3, 1)
    assert decode_params(scored.params).scores_prompt
    assert not decode_params(job(logprobs=1).params).scores_prompt
    plain = job(echo=True)
    assert (plain.pages, decode_params(plain.params).scores_prompt) == (0, False)


@pytest.mark.parametrize(
    ("fields", "visits"),
    [
        ({}, [0, 1]),
        ({"only": "m1"}, [1]),
        ({"max_tokens": 0}, []),
        ({"echo": True, "logprobs": 1}, []),  # its holder scores the prompt and computes all of it
        ({"echo": True}, [0, 1]),
    ],
)
def test_whom_a_prompt_may_be_computed_early_by(
    service: Service, fields: dict[str, Any], visits: list[int]
) -> None:
    assert list(prepare(service, completion(**fields)).visits) == visits


def test_token_ids_are_used_as_they_are(service: Service) -> None:
    assert list(prepare(service, completion(prompts=[[0, 2, 1]])).prompt_ids) == [0, 2, 1]


def test_text_and_chats_are_tokenized(service: Service) -> None:
    text = prepare(service, completion(prompts=["hello"]))
    chat = prepare(
        service, GenerationRequest(kind="chat", messages=[{"role": "user", "content": "hello"}])
    )
    assert 0 < len(text.prompt_ids) < len(chat.prompt_ids)


@pytest.mark.parametrize(
    ("parser", "template", "fields", "splits"),
    [
        ("auto", "{{ messages }}", {}, False),
        ("auto", "{{ messages }}<think></think>", {}, True),
        ("auto", "{{ messages }}<think></think>", {"reasoning": "within"}, False),
        ("auto", "{{ messages }}<think></think>", {"kind": "completion"}, False),
        ("none", "{{ messages }}<think></think>", {}, False),
        ("qwen3", "{{ messages }}", {}, True),
        ("none", "{{ messages }}{{ tools }}", {"tools": [{"function": {"name": "f"}}]}, True),
    ],
)
def test_which_answers_may_have_parts(
    tmp_path: Path, parser: str, template: str, fields: dict[str, Any], splits: bool
) -> None:
    plan = new_plan(tmp_path, endpoint=EndpointPlan(reasoning_parser=parser))
    save(byte_level(), tmp_path, {"chat_template": template})
    with memory(slots=plan.slots, row_tokens=plan.row_tokens) as shared:
        service = Service(plan, shared.slab())
    request = GenerationRequest(**{"kind": "chat", **fields})
    assert (service.splitters_of(request) is not None) == splits


def test_tools_that_the_template_does_not_show_are_refused(service: Service) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    message = {"role": "user", "content": "x"}
    with pytest.raises(RequestError) as refused:
        prepare(service, GenerationRequest(kind="chat", messages=[message], tools=[tool]))
    assert refused.value.param == "tools"
