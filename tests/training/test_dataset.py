"""From recordings to rows: only prefixes of both models, in the order of the prompts."""

from __future__ import annotations

import pytest
import torch

from tests.training.rows import planted, record
from trserve.errors import ConfigError
from trserve.training.dataset import dataset_of


def test_rows_stand_where_both_models_chose_in_the_order_of_the_prompts() -> None:
    later = record("b", own={0: 1, 1: 2, 3: 1}, peer={1: 2, 2: 0, 3: 0})
    first = record("a", own={0: 2}, peer={0: 9})
    other = record("not asked for", own={0: 2}, peer={0: 1})
    rows = dataset_of([later, other, first], ["a", "b"])
    assert rows.request.tolist() == [0, 1, 1]
    assert rows.position.tolist() == [0, 1, 3]
    assert rows.tokens.tolist() == [2, 2, 1]
    assert rows.peer_tokens.tolist() == [9, 2, 0]
    assert rows.differs.tolist() == [1.0, 0.0, 1.0]
    assert rows.hidden[:, 0].tolist() == [0.0, 1.0, 2.0]
    # Logits 3, 2, 1 of the ids 0, 1, 2; id 9 is none of them, and is given the least of these.
    assert rows.own_logprob.tolist() == [-2.5, -2.5, -0.5]
    assert rows.peer_logprob.tolist() == [-0.5] * 3


def test_without_common_prefixes_there_is_nothing_to_train_on() -> None:
    with pytest.raises(ConfigError, match="both models"):
        dataset_of([record("a", own={0: 1}, peer={1: 1})], ["a"])


def test_prompts_are_held_out_as_wholes_and_by_seed() -> None:
    rows = planted(200)
    held = rows.held_out(0.25, seed=3)
    names = set(rows.request[held].tolist())
    assert len(names) == 5
    assert not names & set(rows.request[~held].tolist())
    assert torch.equal(held, rows.held_out(0.25, seed=3))
    assert not torch.equal(held, rows.held_out(0.25, seed=4))
    with pytest.raises(ConfigError, match=r"20 prompts.*0\.001"):
        rows.held_out(0.001, seed=0)
