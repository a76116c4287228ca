"""Which shapes are captured, and which steps find one."""

from __future__ import annotations

import numpy as np
import pytest

from trserve.errors import ConfigError
from trserve.workers.cuda.buckets import (
    PIECES,
    PIECES_VARIABLE,
    Bucket,
    Buckets,
    extend_rows,
    pieces_from_environment,
    row_buckets,
)
from trserve.workers.step import StepInputs


def step_of(rows: list[tuple[int, int]]) -> StepInputs:
    """``rows``: where each begins, and how many tokens it computes."""
    step = StepInputs(max_tokens=256, max_rows=32, max_blocks_per_row=16, block_size=8)
    for start, count in rows:
        step.add_row(np.zeros(count, np.int64), start, np.zeros(16, np.int32))
    return step


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (12, [1, 2, 4, 8, 12]),
        (32, [1, 2, 4, 8, 16, 24, 32]),
    ],
)
def test_numbers_of_rows_end_with_the_most(most, expected):
    assert row_buckets(most) == expected


def test_extends_double():
    assert [extend_rows(most) for most in (1, 6, 8)] == [[1], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_no_extend_is_larger_than_a_step():
    buckets = Buckets.of(max_rows=16, max_tokens=32)
    assert buckets.by_width == {
        1: [1, 2, 4, 8, 16],
        2: [1, 2, 4, 8, 16],
        4: [1, 2, 4, 8],
        8: [1, 2, 4],
    }
    tokens = [bucket.tokens for bucket in buckets.largest_first]
    assert tokens == sorted(tokens, reverse=True)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(9, 1)] * 3, Bucket(4, 1)),
        ([(0, 1)], Bucket(1, 1)),  # the first token of all
        ([(9, 2)] * 5, Bucket(8, 2)),
        ([(9, 3), (9, 1)], Bucket(2, 4)),
        ([(0, 5), (20, 5)], None),  # nothing could lead the first row's tokens
        ([(3, 5), (20, 5)], Bucket(2, 8)),
        ([(9, 9)], None),
        ([(9, 8)] * 5, None),  # more tokens than a step has
        ([(9, 1)] * 17, None),
    ],
)
def test_a_step_finds_the_smallest_shape_that_holds_it(rows, expected):
    assert Buckets.of(max_rows=16, max_tokens=32).find(step_of(rows)) == expected


def test_every_shape_is_of_one_piece():
    assert [Bucket(4, width).piece for width in (1, 2, 8)] == ["slm", "extend", "extend"]


def test_the_environment_names_the_pieces(monkeypatch):
    monkeypatch.delenv(PIECES_VARIABLE, raising=False)
    assert pieces_from_environment() == set(PIECES)
    monkeypatch.setenv(PIECES_VARIABLE, "slm, router")
    assert pieces_from_environment() == {"slm", "router"}
    monkeypatch.setenv(PIECES_VARIABLE, "")
    assert pieces_from_environment() == set()
    monkeypatch.setenv(PIECES_VARIABLE, "slm,llm")
    with pytest.raises(ConfigError, match="llm is no piece; name some of slm, extend, router"):
        pieces_from_environment()
