"""Log probabilities against torch's: always finite, and committed with their tokens."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from tests.ipc.memory import memory
from tests.workers.fakes import VOCAB, hash_route, hash_token, reference, router_class, world
from trserve.ipc.annotations import Annotation, AnnotationBook
from trserve.workers.logprobs import FLOOR, Wanted, write_logprobs


def annotate(logits: torch.Tensor, tokens: list[int], tops: list[int]) -> list[Annotation]:
    with memory(slots=len(tokens), row_tokens=8) as shared:
        slab = shared.slab()
        slab.page_table[:, 0] = range(len(tokens))
        books = [AnnotationBook(slab, n, first=0, tops=k) for n, k in enumerate(tops)]
        wanted = [Wanted(b, 3, t, k) for b, t, k in zip(books, tokens, tops, strict=True)]
        write_logprobs(logits.numpy(), wanted)
        return [book.read(3, 4)[0] for book in books]


def test_values_are_the_log_softmax() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 5
    logits[:, 45:] = -torch.inf
    expected = logits.double().log_softmax(-1)
    found = annotate(logits, [7, 44, int(logits[2].argmax()), 0], [0, 3, 20, 1])
    for row, (token, tops) in enumerate([(7, 0), (44, 3), (int(logits[2].argmax()), 20), (0, 1)]):
        best = expected[row].topk(tops)
        assert found[row].logprob == pytest.approx(float(expected[row, token]), abs=1e-6)
        assert found[row].top_ids == best.indices.tolist()
        assert found[row].top_logprobs == pytest.approx(best.values.tolist(), abs=1e-6)
    assert found[2].logprob == found[2].top_logprobs[0], "the same float in both places"


def test_equal_logits_come_in_the_order_of_their_ids() -> None:
    logits = torch.zeros(1, 30)
    logits[0, [3, 9, 27]] = 1.0
    assert annotate(logits, [9], [3])[0].top_ids == [3, 9, 27]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, 3e38])
def test_nothing_is_ever_infinite(broken: float) -> None:
    logits = torch.zeros(2, 8)
    logits[0, 2] = broken
    logits[1, :] = -torch.inf
    for found in annotate(logits, [2, 2], [8, 8]):
        values = [found.logprob, *found.top_logprobs]
        assert all(FLOOR <= value <= 0.0 for value in values)


def test_records_are_those_of_whoever_committed_the_token() -> None:
    """With handoffs, discarded tokens, losses of KV and workers that end."""
    dice = random.Random(2)
    decide = hash_route(1, 40)
    prompts = [[dice.randrange(VOCAB) for _ in range(n)] for n in (1, 6, 11)]
    with world(slots=3, num_blocks=20, router=router_class(decide)) as w:
        slots = [w.submit(p, limit=40, eos_token_ids=(), tops=2) for p in prompts]
        for turn in range(50):
            for index, worker in enumerate(w.workers):
                worker.turn()
                if turn % 9 == 4 + index:
                    w.workers[index] = w.create(index)
                    w.workers[index].table.rescan()
        w.run(*slots)
        for slot, prompt in zip(slots, prompts, strict=True):
            expected = reference(prompt, limit=40, models=2, decide=decide, stop_ids=())
            assert w.outcome(slot).row == expected.row
            book = AnnotationBook(w.slab, slot.index, first=len(prompt), tops=2)
            records = book.read(len(prompt), 40)
            for at, (record, source) in enumerate(zip(records, expected.sources, strict=True)):
                token = hash_token(source, expected.row[: len(prompt) + at])
                assert record.top_ids == [token, (token + 1) % VOCAB]
                norm = math.log(math.exp(2.0) + math.exp(1.0) + VOCAB - 2)
                assert record.top_logprobs == pytest.approx([2.0 - norm, 1.0 - norm], abs=1e-6)
                assert record.logprob == record.top_logprobs[0]


def test_only_those_who_ask_get_any() -> None:
    with world(slots=2) as w:
        asks, other = w.submit([1, 2], limit=9, tops=0), w.submit([3, 4], limit=9)
        before = w.slab.pages.copy()
        w.run(asks, other)
        changed = np.unique((w.slab.pages != before).nonzero()[0]).tolist()
        assert changed == [w.slab.page_table[asks.index, 0]]
