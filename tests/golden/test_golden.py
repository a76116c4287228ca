"""A server's answers equal a sequential loop over its models, token for token, source for source.

Invariant 1 of the design, over HTTP: every setting, streamed or not, at concurrencies 1, 8 and
32, with all settings mixed in one batch. Three pairs: random Qwen3 and Llama models, which
disagree about everything, and the embedded pair, which is what a user gets. float32, so that
rounding stays far below the margins.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from random import Random

import pytest
import torch

from tests.golden.compare import Answer, assert_golden
from tests.golden.completions import PATH, body_of
from tests.golden.pairs import LARGE_SEED, SETTINGS, Pair, settings_of
from tests.golden.random_pair import OUTPUT, build_random_pair, random_prompts
from tests.golden.reference import SLM, Reference
from tests.golden.word_problems import chat_prompts
from tests.serverproc import Server
from trserve.demo import model_path

EMBEDDED_TAUS = (0.02, 0.05, 0.3)
EMBEDDED_OUTPUT = 56


@pytest.fixture(scope="module", params=["qwen3", "llama", "embedded"])
def pair(request, tmp_path_factory, full) -> Iterator[Pair]:
    # What Llama has of its own is in one file of the server: fewer prompts show it.
    count = 200 if full else 10 if request.param == "llama" else 24
    rng = Random(f"golden {request.param}")
    if request.param == "embedded":
        slm, llm, taus, output = model_path("tiny"), model_path("small"), EMBEDDED_TAUS, 0
    else:
        built = build_random_pair(tmp_path_factory.mktemp(request.param), request.param)
        slm, llm, taus, output = built.slm, built.llm, built.taus, OUTPUT
    reference = Reference(slm, llm)
    if request.param == "embedded":
        prompts = chat_prompts(count, rng, reference.models[SLM].tokenizer)
    else:
        prompts = random_prompts(count, rng)
    settings = settings_of(taus, output or EMBEDDED_OUTPUT)
    args = ["--models", f"{slm},{llm}", "--dtype", "float32", "--device", "cpu"]
    with Server([*args, "--router", "r-stitch"]) as server:
        assert len(server.models) == 2
        yield Pair(request.param, server, reference, prompts, settings)


def some(pair: Pair, share: float) -> range:
    return range(max(4, round(len(pair.prompts) * share)))


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_eight_at_a_time(pair, name):
    cases = [(index, name) for index in range(len(pair.prompts))]
    pair.check(cases, 8, streamed=[False])


def test_all_settings_mixed_thirty_two_at_a_time(pair):
    cases = [(index, name) for index in some(pair, 0.5) for name in SETTINGS]
    Random("order").shuffle(cases)
    pair.check(cases, 32, streamed=[True])


def test_one_at_a_time(pair):
    cases = [(index, name) for index in some(pair, 0.1) for name in SETTINGS]
    pair.check(cases, 1, streamed=[True, False])


def test_lists_of_prompts_with_several_choices_each(pair):
    """Every choice is a request of its own, with the documented seed."""
    setting = dataclasses.replace(pair.settings["sampled"], seed=LARGE_SEED)
    prompts = pair.prompts[:3]
    body = body_of(prompts[0], setting, pair.server.models) | {"n": 3}
    body["prompt"] = [list(prompt) for prompt in prompts]
    choices = pair.server.post(PATH, body, timeout_s=120.0)["choices"]
    assert [choice["index"] for choice in choices] == list(range(9))
    cases = []
    for choice in choices:
        of_prompt, number = divmod(choice["index"], 3)
        own = dataclasses.replace(setting, seed=choice_seed(LARGE_SEED, number))
        trace = pair.reference.run(prompts[of_prompt], own)
        found = Answer(choice["token_ids"], choice["trserve"]["source"], choice["finish_reason"])
        cases.append((f"choice {choice['index']}", trace, found))
    assert_golden(cases)


def test_a_stop_string_across_a_handoff_cuts_the_text_that_would_have_been(pair):
    """The string is the end of one model's token and the beginning of the other's."""
    setting = dataclasses.replace(pair.settings["middle"], seed=LARGE_SEED)
    found = 0
    for prompt in pair.prompts:
        trace = pair.reference.run(prompt, setting)
        body = body_of(prompt, setting, pair.server.models)
        (whole,) = pair.server.post(PATH, body, timeout_s=120.0)["choices"]
        own = Answer(whole["token_ids"], whole["trserve"]["source"], whole["finish_reason"])
        assert_golden([("without a stop string", trace, own)])
        stop = string_across_a_handoff(pair, own)
        if stop is None:
            continue
        found += 1
        (cut,) = pair.server.post(PATH, body | {"stop": [stop]}, timeout_s=120.0)["choices"]
        assert cut["text"] == whole["text"].partition(stop)[0]
        assert cut["finish_reason"] == "stop"
        events = pair.server.stream(PATH, body | {"stop": [stop], "stream": True})
        choices = [choice for event in events for choice in event["choices"]]
        assert "".join(choice["text"] for choice in choices) == cut["text"]
        if found == 3:
            return
    assert found, "no text has readable tokens on both sides of a handoff"


def string_across_a_handoff(pair: Pair, answer: Answer) -> str | None:
    """Two characters around the first handoff that has readable ones on both sides."""
    decode = pair.reference.models[SLM].tokenizer.decode
    sources = answer.sources
    for at in range(1, len(sources) - 1):
        before, after = (decode([answer.tokens[i]]) for i in (at - 1, at))
        if sources[at - 1] != sources[at] and before.isprintable() and after.isprintable():
            string = before[-1:] + after[:1]
            if len(string) == 2 and string.isascii():
                return string
    return None


@pytest.mark.parametrize("name", ["middle", "shaped"])
def test_logprobs_are_those_of_the_model_that_wrote_the_token(pair, name):
    """Raw values, whatever shaped the choice; the chosen token has one float in both places."""
    setting = pair.setting((1, name))
    prompt = list(pair.prompts[1])
    trace = pair.expected((1, name))
    body = body_of(prompt, setting, pair.server.models) | {"logprobs": 5}
    (choice,) = pair.server.post(PATH, body, timeout_s=120.0)["choices"]
    tokens, found = choice["token_ids"], choice["logprobs"]
    assert_golden([(name, trace, Answer(tokens, choice["trserve"]["source"], trace.finish_reason))])
    assert {len(values) for values in found.values()} == {len(tokens)}
    for at, (token, source) in enumerate(zip(tokens, choice["trserve"]["source"], strict=True)):
        session = pair.reference.models[source].session()
        expected = torch.log_softmax(session.logits(prompt + tokens[:at]), dim=-1)
        assert found["token_logprobs"][at] == pytest.approx(float(expected[token]), abs=1e-3)
        tops = sorted(found["top_logprobs"][at].values(), reverse=True)
        assert tops[:5] == pytest.approx(expected.topk(5).values.tolist(), abs=1e-3)
        assert found["token_logprobs"][at] in tops


def test_a_trace_says_what_the_router_decided_on(pair):
    """The entropy of every step whose token counts; nothing where one model writes alone."""
    traces = [
        (pair.expected((1, name)), pair.setting((1, name))) for name in ("middle", "llm-only")
    ]
    for trace, setting in traces:
        body = body_of(pair.prompts[1], setting, pair.server.models)
        (choice,) = pair.server.post(PATH, body, timeout_s=120.0)["choices"]
        own = choice["trserve"]
        assert_golden(
            [("traced", trace, Answer(choice["token_ids"], own["source"], choice["finish_reason"]))]
        )
        if setting.only is not None:
            assert "score" not in own
        elif choice["token_ids"] == trace.tokens:
            entropies = [step.entropy for step in trace.steps if step.kept]
            assert own["score"] == pytest.approx(entropies, abs=1e-4)


def test_an_echoed_prompt_is_scored_as_a_harness_reads_it(pair):
    """Twice, because the second finds the prompt in the prefix cache; a batch of several."""
    prompts = [list(prompt) for prompt in pair.prompts[:6]]
    body = {"prompt": prompts, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    for max_tokens in (1, 1, 0):
        choices = pair.server.post(PATH, body | {"max_tokens": max_tokens})["choices"]
        for prompt, choice in zip(prompts, choices, strict=True):
            found = choice["logprobs"]
            length = len(prompt) + max_tokens
            assert {len(values) for values in found.values()} == {length}
            assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
            model = pair.reference.models[SLM]
            logits = model.net(input_ids=torch.tensor([prompt])).logits[0, :, : model.size].detach()
            logprobs = torch.log_softmax(logits.double(), dim=-1)
            for at in range(1, len(prompt)):
                own, tops = found["token_logprobs"][at], found["top_logprobs"][at].values()
                assert own == pytest.approx(float(logprobs[at - 1, prompt[at]]), abs=1e-3)
                assert max(tops) == pytest.approx(float(logprobs[at - 1].max()), abs=1e-3)
                greedy = int(logprobs[at - 1].argmax()) == prompt[at]
                assert (own == max(tops)) == greedy


def choice_seed(seed: int, number: int) -> int:
    words = seed.to_bytes(8, "little") + number.to_bytes(8, "little")
    digest = hashlib.blake2b(words, digest_size=8).digest()
    return int.from_bytes(digest, "little") if number else seed


def test_the_settings_put_the_loop_to_the_test(pair):
    """Guards the guards: both models write, texts end in both ways, an end is discarded."""
    routed = [
        pair.expected((index, name))
        for name in ("low", "middle", "high")
        for index in range(len(pair.prompts))
    ]
    sources = [source for trace in routed for source in trace.sources]
    share = sum(sources) / len(sources)
    assert {trace.finish_reason for trace in routed} == {"stop", "length"}
    if pair.name == "embedded":
        assert 0.01 < share < 0.5
        return
    assert 0.1 <= share <= 0.9
    thrown_away = [step.token for trace in routed for step in trace.steps if not step.kept]
    assert pair.reference.eos & set(thrown_away)
    ends = {trace.tokens[-1] for trace in routed if trace.finish_reason == "stop"}
    assert len(ends) > 1, "no text ended by the end-of-sequence token of the other model"
