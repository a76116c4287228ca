"""Several answers, echoes and log probabilities offline are what they are over HTTP."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from trserve import Completion, Engine, EngineError, SamplingParams
from trserve.engine import Part
from trserve.errors import RequestError
from trserve.gateway.service import choice_seed

QUESTION = "What is 125 - 54 + 25?"
CHAT = [{"role": "user", "content": QUESTION}]
WARM = {"temperature": 1.5, "ignore_eos": True}


def many(answers: Completion | list[Completion]) -> list[Completion]:
    assert isinstance(answers, list)
    return answers


def single(answers: Completion | list[Completion]) -> Completion:
    assert isinstance(answers, Completion)
    return answers


def key(answer: Completion) -> tuple[list[int], list[int], str]:
    return answer.token_ids, answer.sources, answer.text


def test_the_answers_of_a_prompt_stand_side_by_side(embedded: Engine) -> None:
    prompts = ["One", "Two and", [5, 6, 7]]
    answers = many(embedded.generate(prompts, n=2, seed=9, max_tokens=12, **WARM))
    assert [answer.index for answer in answers] == list(range(6))
    assert answers[0].token_ids != answers[1].token_ids
    for place, prompt in enumerate(prompts):
        for choice in (0, 1):
            seed = choice_seed(9, choice)
            seed = seed - 2**64 if seed >= 2**63 else seed
            alone = single(embedded.generate(prompt, seed=seed, max_tokens=12, **WARM))
            assert key(answers[place * 2 + choice]) == key(alone)
            assert answers[place * 2 + choice].prompt_token_ids == alone.prompt_token_ids


def test_one_prompt_with_several_answers_is_a_list(embedded: Engine) -> None:
    assert len(many(embedded.generate("One", n=3, max_tokens=2))) == 3
    assert len(many(embedded.generate(["One"], max_tokens=2))) == 1
    assert many(embedded.generate([])) == []


def test_more_answers_than_slots_are_refused(embedded: Engine) -> None:
    with pytest.raises(RequestError) as refused:
        embedded.generate("One", n=257, max_tokens=2)
    assert refused.value.param == "n"


def joined(parts: Sequence[Part], index: int) -> tuple[list[int], list[int], str]:
    own = [part for part in parts if part.index == index]
    assert [part.finish_reason is not None for part in own] == [False] * (len(own) - 1) + [True]
    return (
        [token for part in own for token in part.token_ids],
        [source for part in own for source in part.sources],
        "".join(part.text for part in own),
    )


def test_streams_of_several_answers_are_the_wholes_in_parts(embedded: Engine) -> None:
    options: dict[str, Any] = {"n": 2, "seed": 4, "max_tokens": 10, "echo": True, **WARM}
    wholes = many(embedded.generate(["One", "Two and"], **options))
    parts = list(embedded.stream(["One", "Two and"], **options))
    assert [joined(parts, index) for index in range(4)] == [key(whole) for whole in wholes]
    last = [part for part in parts if part.finish_reason is not None]
    counts = {part.index: part.usage and part.usage["completion_tokens"] for part in last}
    assert counts == {whole.index: whole.usage["completion_tokens"] for whole in wholes}


def test_an_echo_begins_with_the_prompt_and_scores_it(embedded: Engine) -> None:
    plain = single(embedded.generate(QUESTION, max_tokens=6, temperature=0))
    echo = single(embedded.generate(QUESTION, max_tokens=6, temperature=0, echo=True, logprobs=2))
    assert echo.text == QUESTION + plain.text
    assert echo.token_ids == plain.token_ids
    assert plain.logprobs is None and plain.prompt_logprobs is None
    assert echo.prompt_logprobs is not None
    first, *others = echo.prompt_logprobs
    assert first is None
    assert [each and each.token_id for each in others] == list(echo.prompt_token_ids[1:])
    assert "".join(each.token for each in others if each) == QUESTION.removeprefix("What")


def test_a_prompt_alone_can_be_scored(embedded: Engine) -> None:
    """Each prompt token's is what the model gives it as the next token of an answer."""
    ids = [5, 6, 7, 8]
    only = {"trserve": {"only": "small"}}
    scored = single(embedded.generate(ids, max_tokens=0, echo=True, logprobs=1, **only))
    assert (scored.token_ids, scored.logprobs, scored.finish_reason) == ([], [], "length")
    assert scored.prompt_logprobs is not None
    for place, each in enumerate(scored.prompt_logprobs[1:], start=1):
        assert each is not None
        forced = {"logit_bias": {ids[place]: 100.0}, "max_tokens": 1, "temperature": 0}
        step = single(embedded.generate(ids[:place], logprobs=1, **forced, **only))
        assert step.token_ids == [ids[place]]
        assert step.logprobs is not None
        assert math.isclose(step.logprobs[0].logprob, each.logprob, abs_tol=1e-4)
        assert list(step.logprobs[0].top) == list(each.top)


def test_a_long_prompt_is_scored_to_its_end_as_its_beginning_is(embedded: Engine) -> None:
    ids = [5 + n * n % 200 for n in range(170)]
    options: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 1}
    long, short = (single(embedded.generate(ids[:n], **options)) for n in (170, 40))
    (part, *_) = embedded.stream(ids, **options)
    assert long.prompt_logprobs == part.prompt_logprobs
    assert long.prompt_logprobs is not None and short.prompt_logprobs is not None
    assert [each and each.token_id for each in long.prompt_logprobs] == [None, *ids[1:]]
    pairs = zip(short.prompt_logprobs[1:], long.prompt_logprobs[1:], strict=False)
    for one, other in pairs:
        assert one is not None and other is not None
        assert math.isclose(one.logprob, other.logprob, abs_tol=1e-4)


def test_more_log_probabilities_than_there_is_room_for_are_waited_for(embedded: Engine) -> None:
    slots = embedded._session._dispatcher._slots
    kept, slots._free_pages = slots._free_pages, slots._free_pages[:6]
    options = {"logprobs": 20, "max_tokens": 200, **WARM}
    try:
        answers = many(embedded.generate([[n] for n in range(1, 5)], **options))
    finally:
        slots._free_pages = kept
    assert len(answers) == 4
    assert all(a.logprobs is not None and len(a.logprobs) == len(a.token_ids) for a in answers)


def test_an_interrupted_call_leaves_nothing_in_the_engine(
    embedded: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = embedded._session
    wait, begun = session._wait, []

    def interrupted(future: Any) -> Any:
        begun.extend(wait(future))  # all are in the server, and nobody was told
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        embedded.generate(["One", "Two"], max_tokens=10_000, **WARM)
    deadline = time.monotonic() + 20
    while not all(generation.ended for generation in begun):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert [generation.end_reason for generation in begun] == ["left"]


def test_log_probabilities_have_one_shape_for_texts_and_chats(embedded: Engine) -> None:
    options = {"max_tokens": 20, "temperature": 0}
    chat = single(embedded.generate(CHAT, logprobs=True, top_logprobs=3, **options))
    text = single(embedded.generate(list(chat.prompt_token_ids), logprobs=3, **options))
    params = SamplingParams(logprobs=3, max_tokens=20, temperature=0)
    again = single(embedded.generate(CHAT, params))
    assert chat.logprobs and text.logprobs and again.logprobs
    for one, two, three in zip(chat.logprobs, text.logprobs, again.logprobs, strict=True):
        assert one[:2] == two[:2] == three[:2]
        assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
        assert one.top == pytest.approx(two.top, abs=1e-4)
        assert one.top == pytest.approx(three.top, abs=1e-4)
    assert [each.token_id for each in chat.logprobs] == chat.token_ids
    for each in chat.logprobs:
        assert next(iter(each.top)) == each.token_id  # greedy
        assert list(each.top.values()) == sorted(each.top.values(), reverse=True)
        assert len(each.top) == 3 and each.top[each.token_id] == each.logprob


def test_traces_say_what_the_router_decided_on(embedded: Engine) -> None:
    answer = single(embedded.generate(CHAT, temperature=0, trserve={"trace": True}))
    assert answer.scores is not None
    assert len(answer.scores) == len(answer.token_ids)
    assert any(score is not None and 0 <= score <= 1 for score in answer.scores)
    assert single(embedded.generate(CHAT, max_tokens=2)).scores is None


def test_params_for_each_prompt(embedded: Engine) -> None:
    params = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=5)]
    answers = many(embedded.generate(["One", "Two"], params, ignore_eos=True))
    assert [len(answer.token_ids) for answer in answers] == [3, 5]


def test_a_bad_prompt_among_good_ones_leaves_nothing_behind(embedded: Engine) -> None:
    long = {"max_tokens": 400, "ignore_eos": True}
    for _ in range(3):
        with pytest.raises(RequestError) as refused:
            embedded.generate([[5]] * 100 + [[10**6]], **long)
        assert refused.value.param == "prompt"
    # Were they not ended, all slots would be taken for seconds.
    assert len(many(embedded.generate([[5, 6]] * 256, max_tokens=1))) == 256


def test_several_threads_at_once_get_what_one_would(embedded: Engine) -> None:
    prompts = [f"{place} and {place + 1} is" for place in range(24)]

    def whole(prompt: str) -> tuple[list[int], list[int], str]:
        return key(single(embedded.generate(prompt, max_tokens=8, seed=3, **WARM)))

    def stream(prompt: str) -> tuple[list[int], list[int], str]:
        return joined(list(embedded.stream(prompt, max_tokens=8, seed=3, **WARM)), 0)

    expected = [whole(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        wholes = pool.map(whole, prompts, timeout=60)
        streams = pool.map(stream, prompts, timeout=60)
        assert list(wholes) == list(streams) == expected


def test_closing_ends_the_calls_of_other_threads() -> None:
    engine = Engine(models="tiny", max_requests=2, threads=(1,))
    with ThreadPoolExecutor(4) as pool:
        # Two hold the slots, two wait for one.
        calls = [pool.submit(engine.generate, [5], max_tokens=480, ignore_eos=True) for _ in "four"]
        stream = engine.stream([6], max_tokens=1)
        engine.close()
        failures = [call.exception(timeout=30) for call in calls]
        with pytest.raises(EngineError, match="closed"):
            next(stream)
    assert all(failure is None or "closed" in str(failure) for failure in failures)
    assert any(isinstance(failure, EngineError) for failure in failures)
