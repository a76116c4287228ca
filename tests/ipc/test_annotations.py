"""Annotation pages: what is written is read, in its own pages alone, whatever their order."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ipc.memory import memory
from trserve.ipc.annotations import Annotation, AnnotationBook
from trserve.ipc.layout import MAX_PAGES, MAX_PAGES_PER_REQUEST, PAGE_WORDS, Layout, pages_for


def record(dice: random.Random, tops: int) -> Annotation:
    values = [float(np.float32(-dice.random())) for _ in range(tops + 1)]
    score = dice.choice([None, values[0] / 2])
    ids = [dice.randrange(2**31) for _ in range(tops)]
    handoff_us = dice.choice([None, 0, 1, dice.randrange(2**30 - 2), 2**30 - 2])
    return Annotation(values[0], ids, values[1:], score, dice.random() < 0.5, handoff_us)


@given(st.integers(0, 20), st.integers(0, 30), st.integers(1, 900), st.integers(0, 2**32))
def test_records_of_two_requests_never_meet(tops: int, first: int, records: int, seed: int) -> None:
    dice = random.Random(seed)
    with memory(slots=2, row_tokens=1000) as shared:
        slab = shared.slab()
        pages = pages_for(records, tops)
        assert pages <= shared.layout.pages_per_request
        order = dice.sample(range(shared.layout.num_pages), 2 * pages)
        slab.page_table[0, :pages], slab.page_table[1, :pages] = order[:pages], order[pages:]
        written = [[record(dice, tops) for _ in range(records)] for _ in range(2)]
        for slot, all_of_it in enumerate(written):
            book = AnnotationBook(slab, slot, first=first, tops=tops)
            for at, each in enumerate(all_of_it):
                book.write(
                    first + at, each.logprob, np.array(each.top_ids), np.array(each.top_logprobs)
                )
                book.write_score(first + at, math.nan if each.score is None else each.score)
                book.write_arrival(first + at, each.handoff_us)
                if each.alone:
                    book.mark_alone(first + at)
        for slot, all_of_it in enumerate(written):
            other = AnnotationBook(shared.slab(), slot, first=first, tops=tops)
            assert other.read(first, first + records) == all_of_it


@pytest.mark.parametrize("tops", [0, 1, 5, 20])
def test_no_record_spans_two_pages(tops: int) -> None:
    per_page = PAGE_WORDS // (3 + 2 * tops)
    assert [pages_for(n, tops) for n in (0, 1, per_page, per_page + 1)] == [0, 1, 1, 2]


def test_the_pool_is_bounded() -> None:
    large = Layout(slots=4096, row_tokens=10**6, workers=2)
    assert (large.pages_per_request, large.num_pages) == (MAX_PAGES_PER_REQUEST, MAX_PAGES)
    small = Layout(slots=3, row_tokens=64, workers=1)
    assert (small.pages_per_request, small.num_pages) == (1, 3)
