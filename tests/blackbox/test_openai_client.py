"""The official client, unmodified: chat and completions, streamed and whole, errors, extras."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

QUESTIONS = (
    "What is 125 - 54 + 25?",
    "Eva has 71 pencils. Then she gives away 15. How many pencils does Eva have now?",
    "Hello!",
)


@pytest.fixture(scope="module")
def client(server):
    address = f"{server.url}/v1"
    with openai.OpenAI(base_url=address, api_key="any", max_retries=0, timeout=30.0) as made:
        yield made


def chat(question: str, **change: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": question},
    ]
    return {"model": "trserve", "messages": messages, "max_tokens": 60, "temperature": 0} | change


def completion(prompt: Any, **change: Any) -> dict[str, Any]:
    return {"model": "trserve", "prompt": prompt, "max_tokens": 30, "temperature": 0} | change


def test_models(client):
    assert [model.id for model in client.models.list().data] == ["trserve", "tiny", "small"]
    for name in ("trserve", "small"):
        assert client.models.retrieve(name).id == name


@pytest.mark.parametrize("question", QUESTIONS)
def test_chat_streamed_is_chat_whole(client, question):
    whole = client.chat.completions.create(**chat(question))
    assert whole.object == "chat.completion"
    assert whole.model == "trserve"
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    chunks = list(client.chat.completions.create(**chat(question), stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert all(len(chunk.choices) == 1 for chunk in chunks), "no usage was asked for"
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert deltas[0].content, "role and first text come in one chunk"
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [choice.finish_reason]


def test_completion_streamed_is_completion_whole(client):
    whole = client.completions.create(**completion("What is 20 + 30?"))
    assert whole.object == "text_completion"
    chunks = list(client.completions.create(**completion("What is 20 + 30?"), stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_text_and_token_ids_as_prompt_are_the_same(client):
    asked = completion("What is 20 + 30?", extra_body={"return_token_ids": True})
    whole = client.completions.create(**asked)
    assert whole.usage.prompt_tokens > 1
    ids = whole.choices[0].model_extra["token_ids"]
    assert len(ids) == whole.usage.completion_tokens
    flat = client.completions.create(**completion(ids))
    nested = client.completions.create(**completion([ids]))
    assert flat.choices[0].text == nested.choices[0].text
    assert flat.usage.prompt_tokens == nested.usage.prompt_tokens == len(ids)


def test_usage_of_a_stream(client):
    whole = client.chat.completions.create(**chat(QUESTIONS[0]))
    options = {"include_usage": True}
    asked = chat(QUESTIONS[0], stream=True, stream_options=options)
    *chunks, last = client.chat.completions.create(**asked)
    assert last.choices == []
    assert all(chunk.usage is None for chunk in chunks)
    assert all(chunk.choices for chunk in chunks)
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(last.usage, count) == getattr(whole.usage, count)


def test_extras_of_a_response(client, server):
    extra = {"return_token_ids": True, "trserve": {"trace": True, "router": {"tau": 0.05}}}
    whole = client.chat.completions.create(**chat(QUESTIONS[1], extra_body=extra))
    (choice,) = whole.choices
    trace, usage = choice.model_extra["trserve"], whole.usage.model_extra["trserve"]
    assert trace["models"] == server.models
    assert len(trace["source"]) == len(choice.model_extra["token_ids"])
    assert len(trace["source"]) == whole.usage.completion_tokens
    assert len(trace["handoff_us"]) == len(trace["alone"]) == len(trace["source"])
    # The entry model wrote first; whoever took over from it says how long that took.
    changes = [a != b for a, b in pairwise([0, *trace["source"]])]
    assert all(
        time is not None for time, new in zip(trace["handoff_us"], changes, strict=True) if new
    )
    assert sum(usage["tokens"].values()) == whole.usage.completion_tokens
    assert set(usage) >= {"tokens", "handoffs", "share", "pending_ms", "degraded", "seed"}


def test_threshold_in_the_model_name(client):
    """No entropy exceeds 1; hardly any is 0, though rounding may say so of a certain token."""
    shares = []
    for threshold in ("1.0", "0.0"):
        asked = chat(QUESTIONS[1]) | {"model": f"trserve:threshold={threshold}"}
        usage = client.chat.completions.create(**asked).usage
        shares.append(usage.model_extra["trserve"]["share"])
    assert shares[0] == 0.0
    assert shares[1] > 0.8


def test_same_seed_same_text(client):
    def text(seed: int) -> str:
        asked = chat("Hello!", temperature=1.5, seed=seed, max_tokens=40)
        return client.chat.completions.create(**asked).choices[0].message.content

    first = text(11)
    assert text(11) == first
    assert any(text(seed) != first for seed in range(12, 16))


def test_seed_that_was_not_given_is_told_and_repeats(client):
    asked = chat("Hello!", temperature=1.5, max_tokens=40)
    whole = client.chat.completions.create(**asked)
    seed = whole.usage.model_extra["trserve"]["seed"]
    again = client.chat.completions.create(**asked, seed=seed)
    assert again.choices[0].message.content == whole.choices[0].message.content


def test_stop_string(client):
    whole = client.chat.completions.create(**chat(QUESTIONS[0])).choices[0].message.content
    stop = whole[len(whole) // 2 :][:3]
    asked = chat(QUESTIONS[0], stop=[stop])
    cut = client.chat.completions.create(**asked)
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    chunks = client.chat.completions.create(**asked, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == cut.choices[0].message.content


def test_max_tokens_is_obeyed(client):
    whole = client.chat.completions.create(**chat(QUESTIONS[1], max_tokens=5))
    assert whole.usage.completion_tokens == 5
    assert whole.choices[0].finish_reason == "length"


def test_errors_become_the_clients_own(client):
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.chat.completions.create(**chat("Hello!") | {"model": "no-such-model"})
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**chat("Hello!", temperature=-1))


def test_choices_of_several_prompts(client):
    prompts = ["The first", "The second"]
    options = completion(prompts, n=2, temperature=1, seed=3)
    whole = client.completions.create(**options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.usage.completion_tokens > 0
    alone = [
        client.completions.create(**completion(prompt, temperature=1, seed=3)) for prompt in prompts
    ]
    assert [whole.choices[0].text, whole.choices[2].text] == [a.choices[0].text for a in alone]
    assert whole.choices[0].text != whole.choices[1].text
    assert whole.usage.prompt_tokens == sum(a.usage.prompt_tokens for a in alone)
    texts = [""] * 4
    ends = []
    stream = client.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        if not chunk.choices:
            assert chunk.usage.completion_tokens == whole.usage.completion_tokens
            continue
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ends += [choice.index] if choice.finish_reason else []
    assert texts == [choice.text for choice in whole.choices]
    assert sorted(ends) == [0, 1, 2, 3]


def test_choices_of_a_chat_each_have_their_role(client):
    options = chat(QUESTIONS[0], n=3, temperature=1, seed=1)
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True))
    for index, choice in enumerate(whole.choices):
        own = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert own[-1].finish_reason == choice.finish_reason
        assert "".join(c.delta.content or "" for c in own) == choice.message.content


def test_more_choices_than_slots_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="5000000 choices"):
        client.chat.completions.create(**chat("hi", n=5_000_000))


def test_logprobs_of_a_chat(client):
    options = chat(QUESTIONS[0], logprobs=True, top_logprobs=3, max_tokens=12)
    (choice,) = client.chat.completions.create(**options).choices
    entries = choice.logprobs.content
    assert b"".join(bytes(e.bytes) for e in entries).decode().startswith(choice.message.content)
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert entry.logprob == values[0], "greedy"
        assert math.exp(sum(map(math.exp, values))) <= math.e + 1e-6
    chunks = list(client.chat.completions.create(**options, stream=True))
    streamed = [
        e for c in chunks for e in (c.choices[0].logprobs and c.choices[0].logprobs.content)
    ]
    assert [e.token for e in streamed] == [e.token for e in entries]
    logprobs = [e.logprob for e in entries]
    assert [e.logprob for e in streamed] == pytest.approx(logprobs, abs=1e-4)
    plain = client.chat.completions.create(**chat(QUESTIONS[0]))
    assert plain.choices[0].logprobs is None


def test_logprobs_of_a_completion(client):
    options = completion("Two and two", logprobs=2, n=2, temperature=1, seed=4, max_tokens=9)
    whole = client.completions.create(**options)
    streamed = {0: [], 1: []}
    for chunk in client.completions.create(**options, stream=True):
        streamed[chunk.choices[0].index].append(chunk.choices[0].logprobs)
    for choice in whole.choices:
        found, parts = choice.logprobs, streamed[choice.index]
        count = len(found.tokens)
        assert len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset)
        assert 0 < count <= 9
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [x for part in parts for x in getattr(part, name)]
            if name == "top_logprobs":  # floats depend on the shape of the batch
                joined = [pytest.approx(tops, abs=1e-4) for tops in joined]
            elif name == "token_logprobs":
                joined = pytest.approx(joined, abs=1e-4)
            assert getattr(found, name) == joined
        for token, logprob, tops in zip(
            found.tokens, found.token_logprobs, found.top_logprobs, strict=True
        ):
            assert 2 <= len(tops) <= 3 and tops[token] == logprob
        for token, offset in zip(found.tokens, found.text_offset, strict=True):
            shown = choice.text[offset : offset + len(token)]
            assert shown in (token, "")  # "": an end that is not shown


def test_echo(client):
    text = "Two and two are"
    alone = client.completions.create(**completion(text, echo=True, max_tokens=0))
    assert (alone.choices[0].text, alone.choices[0].finish_reason) == (text, "length")
    assert alone.usage.completion_tokens == 0
    plain = client.completions.create(**completion(text)).choices[0].text
    options = completion(text, echo=True, logprobs=0)
    (choice,) = client.completions.create(**options).choices
    assert choice.text == text + plain
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0.0 for value in choice.logprobs.token_logprobs[1:])
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert choice.text[offset : offset + len(token)] in (token, "")
    parts = [c.choices[0] for c in client.completions.create(**options, stream=True)]
    assert "".join(part.text for part in parts) == choice.text
    tokens = [token for part in parts for token in part.logprobs.tokens]
    assert tokens == choice.logprobs.tokens


def test_the_embedded_pair_is_greedy_unless_asked_otherwise(client):
    asked = {key: value for key, value in chat(QUESTIONS[0]).items() if key != "temperature"}
    texts = {client.chat.completions.create(**asked).choices[0].message.content for _ in range(3)}
    greedy = client.chat.completions.create(**asked, temperature=0)
    assert texts == {greedy.choices[0].message.content}


class Answer(BaseModel):
    """What the client turns into a strict schema, and answers back into."""

    total: int = Field(description="of all", ge=0, le=999)
    unit: str | None = Field(max_length=8)
    sure: Literal["yes", "no"]


def test_answers_are_parsed_into_types(client):
    asked = chat(QUESTIONS[0], response_format=Answer, max_tokens=200)
    found = client.chat.completions.parse(**asked).choices[0].message.parsed
    assert isinstance(found, Answer)
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == found
