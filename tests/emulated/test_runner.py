"""The emulated forward: its tokens are the row's alone, its time is the profile's."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tests.emulated.profiles import PAIR, text
from trserve import demo
from trserve.emulated.profile import parse_profile
from trserve.emulated.runner import PEAK, EmulatedRunner, StepClock
from trserve.emulated.tokens import TokenSource, printable_ids
from trserve.gateway.tokenizer import Tokenizer
from trserve.workers.in_step import DecidingRunner, StepAsk
from trserve.workers.random_numbers import uniforms
from trserve.workers.row_sampling import RowSampling, greedy
from trserve.workers.sampler import Sampler
from trserve.workers.step import StepInputs

MODELS = parse_profile(text(PAIR), "pair").models
SIZE, ROWS = 50, 8
IDS = np.array([3, 5, 8, 13, 21, 34, 40, 41, 42, 49])
TABLE = np.arange(64, dtype=np.int32)
Row = tuple[int, int, int]
"""First position, number of tokens, last token."""


def runner(model: int = 0, agreement: float = 0.5, seed: int = 0) -> EmulatedRunner:
    clock = StepClock(MODELS[model], ROWS)
    clock.duration_ns = lambda rows, tokens: 0  # type: ignore[method-assign]
    source = TokenSource(IDS, model=model, agreement=agreement, seed=seed)
    return EmulatedRunner(clock, source, tokenizer_size=SIZE, max_rows=ROWS)


def step(rows: list[Row]) -> StepInputs:
    inputs = StepInputs(max_tokens=256, max_rows=ROWS, max_blocks_per_row=64, block_size=16)
    for start, count, last in rows:
        tokens = np.array([*range(count - 1), last], np.int32)
        inputs.add_row(tokens, start, TABLE)
    return inputs


def drawn(logits: torch.Tensor) -> list[int]:
    assert (logits.sum(-1) == PEAK).all(), "one id has all of it"
    found: list[int] = logits.argmax(-1).tolist()
    return found


any_row = st.tuples(st.integers(0, 600), st.integers(1, 9), st.integers(0, SIZE - 1))


@given(st.lists(st.lists(any_row, min_size=1, max_size=ROWS), min_size=1, max_size=4))
def test_a_token_is_its_rows_alone(steps: list[list[Row]]) -> None:
    """The last token and its position, in any batch, chunk or order, after any other step."""
    shared, fresh = runner(1), runner(1)
    for rows in steps:
        output = shared.forward(step(rows))
        assert output.logits.shape == (len(rows), SIZE) and output.hidden.shape == (len(rows), 1)
        found = drawn(output.logits)
        for (start, count, last), token in zip(rows, found, strict=True):
            alone = fresh.forward(step([(start + count - 1, 1, last)]))
            assert drawn(alone.logits) == [token]
            assert token in IDS


def test_prompts_are_scored_by_the_same_tokens() -> None:
    """What a row's inner tokens are followed by, from the hidden states that were asked for."""
    rows: list[Row] = [(10, 5, 7), (0, 3, 4)]
    inputs = step(rows)
    one = runner(1)
    output = one.forward(inputs, np.arange(8))
    assert output.also is not None
    each = [
        drawn(runner(1).forward(step([(int(p), 1, int(t))])).logits)[0]
        for t, p in zip(inputs.token_ids[:8], inputs.positions[:8], strict=True)
    ]
    assert drawn(one.logits(output.also)) == each
    assert drawn(one.logits(output.hidden)) == [each[4], each[7]]


def test_every_way_of_sampling_finds_the_token() -> None:
    output = runner().forward(step([(i, 1, i) for i in range(ROWS)]))
    rows = RowSampling(
        temperatures=np.array([0, 0.1, 0.7, 1, 1.5, 2, 2, 1]),
        top_k=np.array([0, 0, 5, 0, 1, 0, 0, 0]),
        top_p=np.array([1, 1, 0.5, 1, 1, 0.01, 1, 1]),
        min_p=np.array([0, 0, 0, 0.9, 0, 0, 0, 0]),
        seeds=np.arange(ROWS, dtype=np.uint64),
        positions=np.arange(ROWS),
    )
    assert Sampler(0).sample(output.logits, rows).tolist() == drawn(output.logits)


@given(st.lists(st.lists(any_row, min_size=1, max_size=ROWS), min_size=1, max_size=4))
def test_a_step_that_decides_says_what_is_drawn_from_its_logits(steps: list[list[Row]]) -> None:
    """Tokens with the output, and none with that of a step that only computes."""
    deciding, computing = runner(1), runner(1)
    assert isinstance(deciding, DecidingRunner) and not deciding.routes
    for rows in steps:
        inputs = step(rows)
        output = deciding.decide(inputs, StepAsk(greedy(len(rows))))
        found = computing.forward(inputs)
        assert output.destinations is None and output.tokens is not None
        assert output.tokens.tolist() == drawn(output.logits) == drawn(found.logits)
        assert torch.equal(output.hidden, found.hidden)
        assert deciding.forward(inputs).tokens is None


def test_once_its_time_is_all_that_is_to_pass_the_step_says_so() -> None:
    one = EmulatedRunner(
        StepClock(MODELS[0], ROWS),
        TokenSource(IDS, model=0, agreement=0.5),
        tokenizer_size=SIZE,
        max_rows=ROWS,
    )
    inputs, said = step([(0, 1, 1)]), list[int]()
    one.on_submitted = lambda: said.append(time.monotonic_ns())
    for compute in (one.forward, lambda each: one.decide(each, StepAsk(greedy(1)))):
        began = time.monotonic_ns()
        compute(inputs)
        ended = time.monotonic_ns()
        took = StepClock(MODELS[0], ROWS).duration_ns(1, 1)
        assert ended - said.pop() > took / 2 and ended - began >= took
        assert not said


def contexts(count: int) -> tuple[Any, Any]:
    seeds = np.arange(count, dtype=np.uint64)
    tokens = (uniforms(seeds, np.zeros(count, int), 0, 0) * SIZE).astype(np.int64)
    return tokens, np.arange(count, dtype=np.int64)


@pytest.mark.parametrize("agreement", [0.0, 0.3, 0.9, 1.0])
def test_models_agree_as_often_as_they_should(agreement: float) -> None:
    tokens, positions = contexts(4000)
    first = TokenSource(IDS, model=0, agreement=agreement).after(tokens, positions)
    second = TokenSource(IDS, model=1, agreement=agreement).after(tokens, positions)
    third = TokenSource(IDS, model=2, agreement=agreement).after(tokens, positions)
    same = int((first == second).sum())
    if agreement in (0.0, 1.0):
        assert same == agreement * 4000
        return
    assert stats.binomtest(same, 4000, agreement).pvalue > 1e-4
    assert (second != third).any(), "two models that differ from the first differ by themselves"


def test_all_ids_are_as_frequent_and_a_seed_changes_them() -> None:
    tokens, positions = contexts(5000)
    for model in (0, 1):
        found = TokenSource(IDS, model=model, agreement=0.2).after(tokens, positions)
        counts = np.bincount(np.searchsorted(IDS, found), minlength=len(IDS))
        assert stats.chisquare(counts).pvalue > 1e-4
    other = TokenSource(IDS, model=0, agreement=1, seed=1).after(tokens, positions)
    same = TokenSource(IDS, model=0, agreement=1).after(tokens, positions)
    assert stats.binomtest(int((other == same).sum()), 5000, 1 / len(IDS)).pvalue > 1e-4


def test_ids_are_readable_and_end_nothing() -> None:
    tokenizer = Tokenizer.load(demo.model_path("tiny"))
    ids = printable_ids(tokenizer, [7, 300])
    assert len(ids) > 500 and ids.max() < tokenizer.size
    out = {7, 300, *tokenizer.special_ids, *tokenizer.eos_token_ids}
    assert not out.intersection(ids.tolist())
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    assert text.isprintable() and "\N{REPLACEMENT CHARACTER}" not in text


@pytest.mark.parametrize(
    ("model", "rows", "tokens", "ms"),
    [
        (0, 1, 1, 2.0),
        (0, 8, 8, 2.0),
        (0, 1, 65, 2.0),  # 64 tokens beyond one a row are free
        (0, 1, 115, 3.0),  # 50 more at 50,000 a second
        (0, 2, 166, 4.0),
        (1, 1, 1, 4.0),
        (1, 8, 8, 6.0),
        (1, 8, 16, 6.0),
        (1, 8, 26, 7.0),
    ],
)
def test_a_step_takes_what_the_profile_says(model: int, rows: int, tokens: int, ms: float) -> None:
    assert StepClock(MODELS[model], 64).duration_ns(rows, tokens) == pytest.approx(ms * 1e6)


def test_a_forward_takes_its_time_and_no_less() -> None:
    source = TokenSource(IDS, model=0, agreement=1.0)
    real = EmulatedRunner(StepClock(MODELS[0], ROWS), source, tokenizer_size=SIZE, max_rows=ROWS)
    inputs = step([(0, 1, 1)])
    took = []
    for _ in range(30):
        began = time.monotonic_ns()
        real.forward(inputs)
        took.append(time.monotonic_ns() - began)
    assert min(took) >= 2e6
    assert sorted(took)[5] < 2.3e6


def test_a_long_forward_gives_signs_of_life() -> None:
    """Whoever owns the runner says how; a step of a second is not one second of silence."""
    beats: list[int] = []
    one = runner()
    one._clock.duration_ns = lambda rows, tokens: 600_000_000  # type: ignore[method-assign]
    one.on_layer = lambda: beats.append(time.monotonic_ns())
    one.forward(step([(0, 1, 1)]))
    assert len(beats) >= 3
    assert max(after - before for before, after in pairwise(beats)) < 500_000_000
