"""Biases and penalties against a plain loop over one row, alone, in batches and after losses."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.fakes import VOCAB, hash_route, hash_token, reference, router_class, world
from trserve.params import RequestParams, SamplingParams, decode_params, encode_params
from trserve.workers.adjustments import Adjustment, add_biases, penalise
from trserve.workers.sampler import NO_TOKEN, RowSampling, Sampler

SAMPLINGS = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5, 100.0]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    logit_bias=st.dictionaries(st.integers(0, 9), st.sampled_from([-100.0, -0.5, 3.0]), max_size=3),
)
ROWS = st.lists(st.integers(0, 9), min_size=2, max_size=200)


def plain(
    logits: Sequence[float],
    row: Sequence[int],
    prompt_len: int,
    sampling: SamplingParams,
    banned: Sequence[int] = (),
) -> list[float]:
    """The definition, one token at a time."""
    output, found = row[prompt_len:], []
    for token, logit in enumerate(logits):
        value = float(logit) + sampling.logit_bias.get(token, 0.0)
        if token in banned:
            value = -math.inf
        if token in row:
            factor = sampling.repetition_penalty
            value = value / factor if value > 0 else value * factor
        value -= sampling.frequency_penalty * output.count(token)
        value -= sampling.presence_penalty if token in output else 0.0
        found.append(value)
    return found


def adjusted(logits: np.ndarray, each: Adjustment) -> np.ndarray:
    got = logits[None].copy()
    add_biases(got, [(0, each)])
    penalise(got, [(0, each)])
    return got[0]


@given(SAMPLINGS, ROWS, st.data())
def test_logits_follow_the_definition(sampling: SamplingParams, row: list[int], data: Any) -> None:
    prompt_len = data.draw(st.integers(1, len(row)))
    logits = np.linspace(-3, 3, 10, dtype=np.float32)[np.array([3, 1, 4, 9, 5, 2, 6, 8, 7, 0])]
    logits[8] = -np.inf
    each = Adjustment(sampling, prompt_len)
    # The committed length grows from that of the prompt, by one or by what another model wrote.
    for length in sorted(data.draw(st.sets(st.integers(prompt_len, len(row))))):
        each.advance(np.array(row[:length], np.int32))
    each.advance(np.array(row, np.int32))
    expected = plain(logits.tolist(), row, prompt_len, sampling)
    assert adjusted(logits, each) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    rebuilt = Adjustment(sampling, prompt_len).advance(np.array(row, np.int32))
    assert np.array_equal(adjusted(logits, rebuilt), adjusted(logits, each))


@given(st.lists(st.tuples(SAMPLINGS, ROWS), min_size=1, max_size=5), st.integers(0, 1000))
def test_rows_are_independent_and_the_ban_stands_between(
    rows: list[tuple[SamplingParams, list[int]]], seed: int
) -> None:
    count = len(rows)
    logits = np.random.default_rng(seed).normal(0, 2, (count + 1, 10)).astype(np.float32)
    adjustments = [
        (at, Adjustment(sampling, 1).advance(np.array(row)))
        for at, (sampling, row) in enumerate(rows)
    ]
    settings = RowSampling(
        temperatures=np.zeros(count + 1),
        top_k=np.zeros(count + 1, np.int64),
        top_p=np.ones(count + 1),
        min_p=np.zeros(count + 1),
        seeds=np.zeros(count + 1, np.uint64),
        positions=np.zeros(count + 1, np.int64),
        banned=[(0, (2, 5))],
        adjustments=adjustments,
    )
    before = torch.from_numpy(logits.copy())
    tokens = Sampler().sample(before, settings)
    assert np.array_equal(before.numpy(), logits), "routers see raw logits"
    assert tokens[count] == logits[count].argmax()
    for at, (sampling, row) in enumerate(rows):
        banned = (2, 5) if at == 0 else ()
        values = plain(logits[at].tolist(), row, 1, sampling, banned)
        assert values[tokens[at]] == pytest.approx(max(values), rel=1e-5, abs=1e-5)


def test_a_long_row_of_many_tokens() -> None:
    row = random.Random(1).choices(range(1000), k=3000)
    for repetition in (1.0, 1.5):
        each = Adjustment(SamplingParams(repetition_penalty=repetition, presence_penalty=1.0), 40)
        for length in (41, 100, 101, 3000):
            each.advance(np.array(row[:length]))
        output = row[40:]
        assert set(each.ids.tolist()) == set(row if repetition != 1.0 else output)
        assert each.counts.tolist() == [output.count(token) for token in each.ids.tolist()]


def test_repetition_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)) * 3
    row = [3, 7, 7, 20, 49, 3]
    expected = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([row]), logits.clone())
    each = Adjustment(SamplingParams(repetition_penalty=1.4), 2).advance(np.array(row))
    assert np.allclose(adjusted(logits[0].numpy(), each), expected[0].numpy())


def test_a_row_that_is_not_finite_stays_so() -> None:
    each = Adjustment(SamplingParams(repetition_penalty=2.0, logit_bias={1: -100.0}), 1)
    each.advance(np.array([0, 1, 2]))
    for broken in (np.nan, np.inf):
        logits = torch.zeros(1, 4)
        logits[0, 1] = broken
        one, none = np.ones(1), np.zeros(1, np.int64)
        settings = RowSampling(
            none, none, one, none, none.astype(np.uint64), none, adjustments=[(0, each)]
        )
        assert Sampler().sample(logits, settings)[0] == NO_TOKEN


def test_nothing_asked_for_is_nothing_kept() -> None:
    assert Adjustment.of(SamplingParams(), 3) is None
    presence_only = Adjustment(SamplingParams(presence_penalty=1.0), 3)
    assert presence_only.advance(np.arange(3)).ids.size == 0, "a prompt is no output"


def test_parameters_travel() -> None:
    sampling = SamplingParams(
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=2.0,
        logit_bias={70000: 1.5},
    )
    params = RequestParams(sampling=sampling)
    assert decode_params(encode_params(params)) == params


SETTINGS = (
    {"repetition_penalty": 3.0},
    {"presence_penalty": 1.5, "logit_bias": {9: 0.5, 8: -1.0}},
    {"frequency_penalty": 2.0},
)


def written(sampling: SamplingParams, prompt_len: int) -> Any:
    """What a model of the fakes writes after a row, greedily, penalties applied."""

    def token(model: int, row: Sequence[int]) -> int:
        raw = hash_token(model, row)
        logits = [0.0] * VOCAB
        logits[(raw + 1) % VOCAB], logits[raw] = 1.0, 2.0
        values = plain(logits, row, prompt_len, sampling)
        return values.index(max(values))

    return token


def test_penalties_survive_handoffs_kv_losses_and_restarts() -> None:
    """The counts of a worker are a function of the row: no loss of state changes a token."""
    dice = random.Random(5)
    decide = hash_route(1, 30)
    with world(slots=6, num_blocks=20, router=router_class(decide)) as w:
        prompts = [[dice.randrange(10, VOCAB) for _ in range(n)] for n in (1, 4, 9, 5, 3, 12)]
        cases = [(prompt, SETTINGS[n % 3]) for n, prompt in enumerate(prompts)]
        slots = [w.submit(p, limit=45, eos_token_ids=(), **setting) for p, setting in cases]
        for turn in range(60):
            for index, worker in enumerate(w.workers):
                worker.turn()
                if turn % 7 == 3 + index:  # it ends, and its successor knows the slab alone
                    w.workers[index] = w.create(index)
                    w.workers[index].table.rescan()
        w.run(*slots)
        for slot, (prompt, setting) in zip(slots, cases, strict=True):
            sampling = SamplingParams(**setting)
            expected = reference(
                prompt,
                limit=45,
                models=2,
                decide=decide,
                token=written(sampling, len(prompt)),
                stop_ids=(),
            )
            found = w.outcome(slot)
            assert (found.row, found.sources) == (expected.row, expected.sources)
            raw = reference(prompt, limit=45, models=2, decide=decide, stop_ids=())
            assert found.row != raw.row, "the penalties changed nothing"
