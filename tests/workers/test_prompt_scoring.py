"""Prompts are scored once, by whoever computes them first, whatever happens meanwhile."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.workers.fakes import VOCAB, World, hash_route, hash_token, reference, router_class, world
from trserve.gateway.slots import Slot
from trserve.ipc.annotations import AnnotationBook
from trserve.ipc.baton import Finish


def top_ids(w: World, slot: Slot, prompt: Sequence[int]) -> list[int]:
    book = AnnotationBook(w.slab, slot.index, first=0, tops=1)
    assert book.scored == (len(prompt) if len(prompt) > 1 else 0)
    return [record.top_ids[0] for record in book.read(1, len(prompt))]


def expected(prompt: Sequence[int], model: int = 0) -> list[int]:
    return [hash_token(model, prompt[:at]) for at in range(1, len(prompt))]


def submit(w: World, prompt: Sequence[int], limit: int, entry: int = 0) -> Slot:
    return w.submit(prompt, limit=limit, entry=entry, tops=1, scores_prompt=True, eos_token_ids=())


@given(st.integers(0, 2**32), st.sampled_from([4, 7, 64]), st.sampled_from([18, 40]))
@example(1, 4, 18)
def test_every_prompt_token_is_scored_by_the_entry_model(
    seed: int, max_tokens: int, num_blocks: int
) -> None:
    """In chunks, under pressure, beside a prefix cache, with handoffs and workers that end."""
    dice = random.Random(seed)
    decide = hash_route(1, 50)
    shared = [dice.randrange(VOCAB) for _ in range(12)]
    prompts = [shared[:n] + [dice.randrange(VOCAB)] * 3 for n in (0, 4, 8, 12)] + [[5]]
    settings = {"router": router_class(decide), "num_blocks": num_blocks, "max_tokens": max_tokens}
    with world(slots=5, max_rows=4, **settings) as w:
        slots = [submit(w, p, limit=30, entry=n % 2) for n, p in enumerate(prompts)]
        for _ in range(40):
            index = dice.randrange(2)
            w.workers[index].turn()
            if dice.random() < 0.1:
                w.workers[index] = w.create(index)
                w.workers[index].table.rescan()
        w.run(*slots)
        for number, (slot, prompt) in enumerate(zip(slots, prompts, strict=True)):
            entry = number % 2
            outcome = reference(prompt, limit=30, models=2, decide=decide, entry=entry, stop_ids=())
            assert w.outcome(slot).row == outcome.row
            assert top_ids(w, slot, prompt) == expected(prompt, entry)


def test_a_second_identical_prompt_is_scored_from_its_beginning() -> None:
    with world(slots=3, workers=1) as w:
        prompt = list(range(20, 40))
        first = w.submit(prompt, limit=22)
        w.run(first)
        computed = sum(map(sum, w.workers[0].runner.batches))
        again = submit(w, prompt, limit=22)
        w.run(again)
        assert top_ids(w, again, prompt) == expected(prompt)
        assert sum(map(sum, w.workers[0].runner.batches)) == 2 * computed
        with_cache = w.submit(prompt, limit=22, eos_token_ids=())
        assert w.slots.num_free == 0
        w.run(with_cache)
        assert sum(map(sum, w.workers[0].runner.batches)) < 3 * computed


@pytest.mark.parametrize("tops", [0, 20])
@pytest.mark.parametrize("length", [1, 3, 40])
def test_a_prompt_alone_is_an_answer(length: int, tops: int) -> None:
    """A limit that leaves nothing to write: scored, and over, and nothing past the last page."""
    with world(slots=1, row_tokens=99) as w:
        slot = w.submit([9] * length, limit=length, tops=tops, scores_prompt=True)
        w.run(slot)
        outcome = w.outcome(slot)
        assert (outcome.row, outcome.finish) == ([9] * length, Finish.LENGTH)
        w.check_nothing_held()


def test_logits_that_are_not_finite_end_a_prompt_too() -> None:
    with world(slots=2, workers=1, token=lambda model, row: -1 if row[0] == 9 else 5) as w:
        bad = w.submit([9, 9], limit=2, tops=3, scores_prompt=True)
        good = w.submit([8, 8], limit=2, tops=3, scores_prompt=True)
        w.run(bad, good)
        assert w.outcome(bad).finish is Finish.NUMERIC_ERROR
        assert w.outcome(good).finish is Finish.LENGTH
        w.check_nothing_held()


def test_pages_are_clean_for_the_next_request() -> None:
    with world(slots=1, workers=1) as w:
        for prompt in ([1, 2, 3, 4, 5, 6], [7, 8]):
            slot = submit(w, prompt, limit=9)
            w.run(slot)
            assert top_ids(w, slot, prompt) == expected(prompt)
            w.slots.release(slot)
            w.slots.collect()
