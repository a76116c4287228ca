"""R2R's own way: what its two workers keep and send, and the whole of it for a moment."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from bench.closed_loop import Until
from bench.endpoint import NotAvailableError
from bench.official_r2r import (
    FINISHED,
    HANDOFFS,
    NEED,
    NEW,
    OTHERS,
    OWN,
    LargeSide,
    Message,
    SmallSide,
    Task,
    run_large,
    run_small,
)
from bench.std_official import ways_of
from bench.systems import Algorithm, Setup, official_r2r
from bench.throughput_pair import MODELS, PROFILE, setup_at
from bench.workloads import Workload


def draws(rid: int, p: float, count: int) -> list[bool]:
    dice = random.Random(f"r2r {rid}")
    return [dice.random() < p for _ in range(count)]


def detokenised(seen):
    def detokenise(ids):
        seen.append(list(ids))
        return ""

    return detokenise


def play(tasks, p, rounds=1000):
    """Both workers step by step; returns the ends, the counters and the messages."""
    counters, seen = [0, 0, 0], []
    small, large = SmallSide(p, counters), LargeSide(detokenised(seen))
    sent = [message for task in tasks for message in small.add(task)]
    ended, back, all_sent = {}, [], []
    for _ in range(rounds):
        large.receive(sent)
        all_sent += sent
        assert large.shape()[0] == sum(message.status == NEED for message in sent)
        back = large.step()
        sent, news = small.receive(back)
        if small.shape()[0]:
            more, later = small.step()
            sent, news = sent + more, news + later
        ended |= {each.rid: each.token_ids for each in news if each.token_ids is not None}
        if len(ended) == len(tasks):
            return ended, counters, all_sent + sent, seen
    raise AssertionError("it does not end")


@pytest.mark.parametrize("p", [0.0, 0.35, 1.0])
def test_every_answer_is_as_long_as_it_was_asked_for_and_every_token_counted_once(p):
    tasks = [Task(rid, [1, 2, 3 + rid], 40) for rid in range(3)]
    ended, counters, sent, _ = play(tasks, p)
    assert {rid: len(ids) for rid, ids in ended.items()} == {0: 40, 1: 40, 2: 40}
    assert counters[OWN] + counters[OTHERS] == 120
    assert counters[HANDOFFS] == 2 * counters[OTHERS]
    assert counters[OTHERS] == {0.0: 0, 1.0: 120}.get(p, counters[OTHERS])
    assert [m.rid for m in sent if m.status == NEW] == [0, 1, 2]
    assert sorted(m.rid for m in sent if m.status == FINISHED) == [0, 1, 2]


def test_a_routed_token_is_replaced_and_only_what_the_peer_lacks_is_sent():
    routed = draws(5, 0.35, 12)
    assert True in routed and False in routed
    ended, _, sent, rows = play([Task(5, [1, 2], 12)], 0.35)
    asked = [message for message in sent if message.status == NEED]
    assert len(asked) == sum(routed)
    where = [at for at, out in enumerate(routed) if out]
    row = [1, 2, *ended[5]]
    assert asked[0].token_ids == row[: 2 + where[0]]
    # Its own last token the large model has already.
    assert [len(m.token_ids) for m in asked[1:]] == [
        b - a - 1 for a, b in itertools.pairwise(where)
    ]
    assert rows == [row[: 2 + at] for at in where], "each whole row is turned into text"


def test_kv_stays_on_both_sides():
    counters = [0, 0, 0]
    small, large = SmallSide(1.0, counters), LargeSide(detokenised([]))
    small.add(Task(1, [1] * 50, 3))
    assert small.shape() == (1, 50)
    sent, _ = small.step()
    large.receive(sent)
    assert large.shape() == (1, 50)
    small.receive(large.step())
    assert small.shape() == (1, 1), "the large model's token"
    sent, _ = small.step()
    large.receive(sent)
    assert large.shape() == (1, 1), "its own"


class Ends:
    """Both workers' ends in one process: what is sent is there at once."""

    def __init__(self, tasks, other=None):
        self.given, self.other, self.inboxed = [tasks], other, []
        self.counters, self.sent, self.told, self.turns = [0, 0, 0], [], [], 0

    def tasks(self):
        self.turns += 1
        return None if self.turns > 4 else self.given.pop() if self.given else []

    def inbox(self):
        self.turns += 1
        return None if self.turns > 3 and self.other else self.inboxed and [self.inboxed.pop()]

    def send(self, messages):
        self.sent += messages

    def tell(self, news):
        self.told += news


def test_the_workers_loops_end_when_they_are_told_to():
    small = Ends([Task(0, [1, 2], 1)])
    run_small(small, PROFILE, MODELS[0], 0.0)
    assert [m.status for m in small.sent] == [NEW, FINISHED]
    assert [each.token_ids is None for each in small.told] == [True, False]
    large = Ends(None, other=small)
    large.inboxed = [Message(0, [20, 21], NEED)]
    run_large(large, PROFILE, MODELS[1])
    assert [len(m.token_ids) for m in large.sent] == [1]


def test_where_it_is_not_available_it_says_so():
    with pytest.raises(NotAvailableError, match="emulated"):
        official_r2r(Setup(("tiny", "small"), "cpu", Algorithm("r2r", (0.35,))))
    with pytest.raises(NotAvailableError, match="one-way"):
        official_r2r(Setup(MODELS, "emulated", Algorithm("me", (1, 1)), PROFILE))
    assert ways_of("r2r") == ("official-r2r",)
    assert ways_of("citer") == ("official-co-llm", "official-citer")


@pytest.mark.slow
def test_it_serves():
    up = official_r2r(setup_at(0.35))
    until = Until(least_s=2.0, most_s=2.0, warm_up_s=0.5)
    for count in (1, 4):
        window = asyncio.run(up.measure(count, Workload("short", 16, 24), until))
        assert 0.2 < window.share < 0.5
        assert window.tokens_per_s > 20 * count
        assert window.ttft_ms is not None and window.latency_s is not None
