"""The reference itself is tested: against transformers' own generation, against a brute-force loop
without caches, against published vectors, and by tampering with right answers."""

import dataclasses
import math
from collections.abc import Sequence
from random import Random

import pytest
import torch

from tests.golden.compare import Answer, assert_golden, compare, ties
from tests.golden.philox import philox4x32, uniform
from tests.golden.random_pair import OUTPUT, RandomPair, build_random_pair, random_prompts
from tests.golden.reference import (
    LLM,
    SLM,
    Reference,
    Setting,
    Step,
    Trace,
    arg_max,
    filtered,
    inverse_cdf,
    masked,
    normalised_entropy,
    penalised,
)

PROMPTS = random_prompts(6, Random("reference"))
FULL_WORD = 0xFFFFFFFF


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def pair(request, tmp_path_factory) -> RandomPair:
    return build_random_pair(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def reference(pair) -> Reference:
    return Reference(pair.slm, pair.llm)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (FULL_WORD,) * 4,
            (FULL_WORD,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(counter, key, expected):
    """The vectors that its authors publish with their Random123 library."""
    assert philox4x32(counter, key) == expected


def test_uniform_uses_every_part_of_its_input():
    numbers = {
        uniform(seed, position, model, purpose)
        for seed in (0, 1, 1 << 32, (1 << 64) - 1)
        for position in (0, 1, 4096)
        for model in (0, 1)
        for purpose in (0, 1)
    }
    assert len(numbers) == 4 * 3 * 2 * 2
    assert all(0.0 <= number < 1.0 for number in numbers)


def test_uniform_is_uniform():
    numbers = torch.tensor([uniform(7, position, 0) for position in range(4000)])
    counts = torch.histc(numbers, bins=10, min=0.0, max=1.0)
    # 27.9 is the 99.9 % point of chi-squared with 9 degrees of freedom.
    assert ((counts - 400) ** 2 / 400).sum() < 27.9


def test_entropy_of_known_distributions():
    assert normalised_entropy(torch.zeros(64).double(), 64) == pytest.approx(1.0)
    half = masked(torch.tensor([5.0, 5.0, 9.0]), 2)
    assert normalised_entropy(half, 2) == pytest.approx(1.0)
    certain = torch.tensor([2000.0, 0.0, 0.0]).double()
    assert normalised_entropy(certain, 3) == 0.0


def test_inverse_cdf_and_its_margins():
    logits = torch.tensor([0.5, 0.3, 0.2]).double().log()
    token, margin = inverse_cdf(logits, 1.0, 0.45)
    assert (token, margin) == (0, pytest.approx(0.05))
    token, margin = inverse_cdf(logits, 1.0, 0.51)
    assert (token, margin) == (1, pytest.approx(0.01))
    # Nothing lies beyond the last interval: only its lower end could change the choice.
    token, margin = inverse_cdf(logits, 1.0, 0.999)
    assert (token, margin) == (2, pytest.approx(0.199))
    assert inverse_cdf(masked(torch.zeros(4), 1), 1.0, 0.7) == (0, math.inf)


def test_penalties_and_filters_are_those_of_transformers():
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    shape = Setting(temperature=1.0, top_k=12, top_p=0.8, min_p=0.1, repetition_penalty=1.5)
    theirs = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.5),
            TopKLogitsWarper(12),
            TopPLogitsWarper(0.8),
            MinPLogitsWarper(0.1),
        ]
    )
    for seed in range(20):
        logits = torch.randn(60, generator=torch.Generator().manual_seed(seed)).double() * 2
        row = [1, 5, 5, 9]
        ours, margin = filtered(penalised(logits, row, 2, shape), shape)
        expected = theirs(torch.tensor([row]), logits[None].clone())[0]
        assert torch.allclose(ours, expected)
        assert 0 < margin < 1


def test_penalties_of_the_output_count_its_tokens():
    shape = Setting(presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((0, 1.0),))
    found = penalised(torch.zeros(4).double(), [3, 1, 2, 2], 1, shape)
    assert found.tolist() == [1.0, -0.75, -1.0, 0.0]


def test_filter_margins():
    half = torch.tensor([0.5, 0.3, 0.2]).double().log()
    assert filtered(half, Setting(top_k=1))[1] == pytest.approx(0.2)
    assert filtered(half, Setting(top_p=0.75))[1] == pytest.approx(0.05)
    assert filtered(half, Setting(min_p=0.5))[1] == pytest.approx(0.05)
    assert filtered(half, Setting())[1] == math.inf


def test_arg_max_takes_the_lowest_of_equals():
    assert arg_max(torch.tensor([1.0, 3.0, 3.0]).double()) == (1, 0.0)
    assert arg_max(torch.tensor([1.0, 3.0, 2.5]).double()) == (1, 0.5)


@pytest.mark.parametrize("only", [SLM, LLM])
def test_one_model_alone_writes_what_transformers_generates(reference, only):
    model = reference.models[only]
    beyond = list(range(model.size, model.net.config.vocab_size))
    assert beyond, "the head needs rows beyond the tokenizer for this test to mean anything"
    for prompt in PROMPTS:
        trace = reference.run(prompt, Setting(only=only, max_tokens=OUTPUT))
        expected = model.net.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=OUTPUT,
            do_sample=False,
            eos_token_id=sorted(reference.eos),
            pad_token_id=0,
            suppress_tokens=beyond,
        )
        assert trace.tokens == expected[0, len(prompt) :].tolist()
        assert set(trace.sources) == {only}
        assert trace.handoffs == 0


def brute_force(
    reference: Reference, prompt: Sequence[int], setting: Setting
) -> tuple[list[int], list[int]]:
    """The algorithm again, from its description, without caches: each step reads the whole row."""
    row, sources, active = list(prompt), [], setting.entry
    while len(sources) < setting.max_tokens:
        model = reference.models[active]
        with torch.inference_mode():
            logits = model.net(torch.tensor([row])).logits[0, -1, : model.size].double()
        p = logits.softmax(-1)
        entropy = float(-(p * p.log()).sum()) / math.log(model.size)
        if setting.greedy:
            token = int(logits.argmax())
        else:
            steps = torch.softmax(logits / setting.temperature, -1).cumsum(-1)
            u = uniform(setting.seed, len(row), active)
            token = int(torch.searchsorted(steps, u * float(steps[-1]), right=True))
        if active == SLM and entropy > setting.tau:
            active = LLM
            continue
        row.append(token)
        sources.append(active)
        if token in reference.eos:
            break
        if active == LLM and entropy <= setting.tau:
            active = SLM
    return row[len(prompt) :], sources


@pytest.mark.parametrize(
    "change",
    [{}, {"temperature": 0.8, "seed": 0x9E3779B97F4A7C15}, {"entry": LLM}],
    ids=["greedy", "sampled", "llm-first"],
)
def test_caches_change_nothing(reference, pair, change):
    handoffs = 0
    for prompt, tau in zip(PROMPTS, pair.taus * 2, strict=True):
        setting = Setting(tau=tau, max_tokens=OUTPUT, **change)
        trace = reference.run(prompt, setting)
        assert (trace.tokens, trace.sources) == brute_force(reference, prompt, setting)
        handoffs += trace.handoffs
    assert handoffs > 20, "hardly any handoff: the caches were not put to the test"


def test_the_pair_divides_the_work(reference, pair):
    traces = [
        reference.run(prompt, Setting(tau=tau, max_tokens=OUTPUT))
        for tau in pair.taus
        for prompt in PROMPTS
    ]
    sources = [source for trace in traces for source in trace.sources]
    assert 0.1 <= sum(sources) / len(sources) <= 0.9
    entropies = [step.entropy for trace in traces for step in trace.steps]
    assert 0.2 < sum(entropies) / len(entropies) < 0.4
    discarded = [step for trace in traces for step in trace.steps if not step.kept]
    assert {trace.finish_reason for trace in traces} == {"stop", "length"}
    assert all(step.model == SLM for step in discarded)


@pytest.mark.parametrize("pair", ["qwen3"], indirect=True)
def test_the_pair_is_the_same_for_the_same_seed(pair, tmp_path):
    again = build_random_pair(tmp_path)
    assert again.taus == pair.taus
    for ours, theirs in ((pair.slm, again.slm), (pair.llm, again.llm)):
        for name in ("model.safetensors", "tokenizer.json", "generation_config.json"):
            assert (ours / name).read_bytes() == (theirs / name).read_bytes()


def trace_of(steps: Sequence[Step]) -> Trace:
    kept = [step for step in steps if step.kept]
    tokens, sources = [step.token for step in kept], [step.model for step in kept]
    return Trace((1, 2), Setting(tau=0.3), tokens, sources, list(steps), "length")


SAFE = Step(0, SLM, 10, True, 0.1, 1.0, 0.2)
CLEAR = [dataclasses.replace(SAFE, position=p, token=10 + p) for p in range(6)]


def at(position: int, **change: object) -> Trace:
    """Six clear steps, one of them changed."""
    steps = list(CLEAR)
    steps[position] = dataclasses.replace(steps[position], **change)
    return trace_of(steps)


def answer_to(trace: Trace, **change: object) -> Answer:
    answer = Answer(list(trace.tokens), list(trace.sources), trace.finish_reason)
    return dataclasses.replace(answer, **change)


def test_ties_are_found_where_they_decide():
    assert ties(trace_of(CLEAR)) == set()
    assert ties(at(2, choice_margin=5e-5)) == {2}
    assert ties(at(2, choice_margin=2e-4)) == set()
    assert ties(at(2, router_margin=5e-6)) == {2}
    # The LLM's entropy decides about the next position; after the last one there is none.
    assert ties(at(2, model=LLM, router_margin=5e-6)) == {3}
    assert ties(at(5, model=LLM, router_margin=5e-6)) == set()
    # What was discarded could have been any token.
    discarded = dataclasses.replace(CLEAR[2], kept=False, choice_margin=0.0)
    assert ties(trace_of([*CLEAR[:2], discarded, *CLEAR[2:]])) == set()


def test_an_equal_answer_passes():
    trace = trace_of(CLEAR)
    summary = assert_golden([("right", trace, answer_to(trace))])
    assert (summary.compared, summary.tokens, summary.stops) == (6, 6, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": [10, 11, 99, 13, 14, 15]},
        {"sources": [0, 0, 1, 0, 0, 0]},
        {"tokens": [10, 11, 12], "sources": [0, 0, 0]},
        {"tokens": [*range(10, 17)], "sources": [0] * 7},
        {"tokens": [], "sources": []},
        {"sources": [0] * 5},
        {"finish_reason": "stop"},
    ],
    ids=["token", "source", "short", "long", "empty", "ragged", "reason"],
)
def test_a_wrong_answer_fails_and_is_named(change):
    trace = trace_of(CLEAR)
    with pytest.raises(AssertionError, match="the one"):
        assert_golden([("the one", trace, answer_to(trace, **change))])


def test_the_report_shows_both_sides_and_the_margins():
    trace = trace_of(CLEAR)
    report = compare(trace, answer_to(trace, tokens=[10, 11, 99, 13, 14, 15])).mismatch
    for part in ("position 2", "token 12", "token 99", "model 0", "router margin 2.00e-01"):
        assert part in report


def test_a_tie_excuses_its_own_position_and_what_follows_but_nothing_before():
    trace = at(3, choice_margin=5e-5)
    later = compare(trace, answer_to(trace, tokens=[10, 11, 12, 99, 98, 97]))
    assert (later.stop, later.compared, later.mismatch) == (3, 3, None)
    assert compare(trace, answer_to(trace, tokens=[10, 99, 12, 13, 14, 15])).mismatch
    # Both chose alike at the tie: the texts are still the same and must stay so.
    assert compare(trace, answer_to(trace, tokens=[10, 11, 12, 13, 99, 15])).mismatch


def test_too_many_stops_fail():
    good, tied = trace_of(CLEAR), at(5, choice_margin=0.0)
    right = ("right", good, answer_to(good))
    stopped = ("stopped", tied, answer_to(tied, tokens=[10, 11, 12, 13, 14, 99]))
    assert assert_golden([stopped, *[right] * 30]).stops == 1
    with pytest.raises(AssertionError, match="more than 1 stops"):
        assert_golden([stopped, stopped, *[right] * 30])
    assert assert_golden([stopped, stopped, *[right] * 198]).stops == 2


def test_too_little_compared_fails():
    trace = at(0, choice_margin=0.0)
    early = ("early", trace, answer_to(trace, tokens=[99] * 6))
    good = trace_of(CLEAR)
    with pytest.raises(AssertionError, match="too few compared"):
        assert_golden([early, *[("right", good, answer_to(good))] * 30])
    with pytest.raises(AssertionError, match="nothing"):
        assert_golden([])
