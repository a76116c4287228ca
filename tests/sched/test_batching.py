"""Which rows a step takes: limits, order, and nobody who is never taken."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trserve.sched.batching import SHORT_SUFFIX, STARVED_AFTER_NS, Turns, choose_step

NOW = 10**12
MS = 1_000_000


@dataclass(eq=False)
class Row:
    remaining: int
    runnable_since_ns: int = NOW


def oldest_first(sizes: list[int], ages_ms: list[int]) -> list[Row]:
    ages = sorted(ages_ms, reverse=True)
    return [Row(size, NOW - age * MS) for size, age in zip(sizes, ages, strict=True)]


ROWS = st.lists(
    st.tuples(st.integers(1, 5000) | st.integers(1, 20), st.integers(0, 1000)), max_size=40
).map(lambda rows: oldest_first([size for size, _ in rows], [age for _, age in rows]))
LIMITS = st.tuples(st.integers(1, 48), st.integers(1, 2048)).filter(lambda pair: pair[1] >= pair[0])


def step(rows: list[Row], limits: tuple[int, int]) -> list[tuple[Row, int]]:
    return choose_step(rows, max_rows=limits[0], max_tokens=limits[1], now_ns=NOW)


@given(ROWS, LIMITS)
def test_limits_are_kept(rows: list[Row], limits: tuple[int, int]) -> None:
    chosen = step(rows, limits)
    assert len(chosen) <= limits[0]
    assert sum(tokens for _, tokens in chosen) <= limits[1]
    assert len({id(row) for row, _ in chosen}) == len(chosen)
    assert all(1 <= tokens <= row.remaining for row, tokens in chosen)


@given(ROWS, LIMITS)
def test_something_runs_if_anything_can(rows: list[Row], limits: tuple[int, int]) -> None:
    assert bool(step(rows, limits)) == bool(rows)


@given(ROWS, st.tuples(st.integers(1, 22), st.integers(22, 2048)))
def test_decodes_come_before_prompt_chunks(rows: list[Row], limits: tuple[int, int]) -> None:
    """In steps that hold a short row beside a starved prompt's share: 16 tokens and 5."""
    kinds = [row.remaining > SHORT_SUFFIX for row, _ in step(rows, limits)]
    assert kinds == sorted(kinds)


@given(ROWS, LIMITS)
def test_first_come_first_served_within_a_kind(rows: list[Row], limits: tuple[int, int]) -> None:
    chosen = [row for row, _ in step(rows, limits)]
    for kind in (lambda row: row.remaining == 1, lambda row: row.remaining > SHORT_SUFFIX):
        places = [rows.index(row) for row in chosen if kind(row)]
        alike = [at for at, row in enumerate(rows) if kind(row)]
        assert places == alike[: len(places)]


@given(ROWS, LIMITS)
def test_only_the_last_prompt_is_cut(rows: list[Row], limits: tuple[int, int]) -> None:
    chosen = step(rows, limits)
    cut = [at for at, (row, tokens) in enumerate(chosen) if tokens < row.remaining]
    assert cut in ([], [len(chosen) - 1])


@given(st.integers(1, 100), LIMITS)
def test_a_prompt_that_waited_gets_a_quarter(decodes: int, limits: tuple[int, int]) -> None:
    prompt = Row(100_000, NOW - STARVED_AFTER_NS)
    rows = [prompt] + [Row(1) for _ in range(decodes)]
    shares = {id(row): tokens for row, tokens in step(rows, limits)}
    assert shares[id(prompt)] >= max(1, limits[1] // 4)


def test_a_prompt_that_just_came_waits_for_the_decodes() -> None:
    prompt = Row(100, NOW - STARVED_AFTER_NS + 1)
    decodes = [Row(1) for _ in range(8)]
    assert [row for row, _ in step([prompt, *decodes], (8, 8))] == decodes
    assert step([prompt, *decodes], (9, 20))[-1] == (prompt, 12)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 8, 15, 16, 17, 32])
def test_every_size_of_row_gets_through_every_size_of_step(max_tokens: int) -> None:
    """Arrivals never end, and still each row is computed: nobody is never taken."""
    for size in range(1, 2 * SHORT_SUFFIX + 2):
        waiting = Row(size, NOW)
        for turn in range(1000):
            now = NOW + turn * 100 * MS
            others = [Row(1 + turn % 20, now) for _ in range(2)]
            chosen = choose_step([waiting, *others], max_rows=2, max_tokens=max_tokens, now_ns=now)
            taken = {id(row): tokens for row, tokens in chosen}
            waiting.remaining -= taken.get(id(waiting), 0)
            if waiting.remaining == 0:
                break
        assert waiting.remaining == 0, f"{size} tokens in steps of {max_tokens}"


@given(st.integers(1, 60), st.integers(1, 20), st.booleans())
def test_decodes_that_are_too_many_take_turns(decodes: int, max_rows: int, prompt: bool) -> None:
    """As fair as can be: none has two rows more than another, whoever else is in the step."""
    rows, turns = [Row(1) for _ in range(decodes)], Turns()
    waiting = [Row(10**6, NOW - STARVED_AFTER_NS)] if prompt else []
    counts = dict.fromkeys(map(id, rows), 0)
    limits = {"max_rows": max_rows, "max_tokens": 64, "now_ns": NOW}
    for _ in range(50):
        for row, _ in choose_step([*rows, *waiting], turns=turns, **limits):
            if row in rows:
                counts[id(row)] += 1
    assert max(counts.values()) - min(counts.values()) <= 1
