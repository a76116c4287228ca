"""Requests that begin alike, in workers without weights: no output changes, and work is saved."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.fakes import (
    BLOCK,
    EOS,
    World,
    hash_route,
    hash_token,
    reference,
    router_class,
    stay,
    world,
)
from tests.workers.running import Running
from trserve.gateway.slots import Slot
from trserve.ipc.baton import Finish, SlotState
from trserve.workers.states import State


def endless(model: int, row: Sequence[int]) -> int:
    token = hash_token(model, row)
    return token + 1 if token == EOS else token


def few_tokens(model: int, row: Sequence[int]) -> int:
    """So few that answers are alike as well."""
    return hash((model, *row[-3:])) % 2


def tails(dice: random.Random, count: int) -> list[list[int]]:
    """Prompts that begin with parts of one another, cut anywhere."""
    prompts = [[dice.randrange(3) for _ in range(dice.randint(1, 20))]]
    while len(prompts) < count:
        start = dice.choice(prompts)
        tail = [dice.randrange(3) for _ in range(dice.randint(0, 8))]
        prompt = (start[: dice.randint(0, len(start))] + tail)[:30]
        prompts.append(prompt or [0])
    return prompts


@given(
    seed=st.integers(0, 2**32),
    models=st.integers(1, 3),
    share=st.sampled_from([0, 20, 60, 100]),
    blocks=st.sampled_from([12, 14, 20, 40, 100]),
    step=st.sampled_from([(1, 1), (2, 3), (4, 8), (8, 64)]),
    token=st.sampled_from([hash_token, few_tokens]),
    caching=st.booleans(),
)
def test_no_output_depends_on_the_cache(
    seed: int,
    models: int,
    share: int,
    blocks: int,
    step: tuple[int, int],
    token: Callable[[int, Sequence[int]], int],
    caching: bool,
) -> None:
    """Arrivals, aborts and turns at random; rows of up to 44 tokens take 11 blocks."""
    dice = random.Random(seed)
    decide = hash_route(models - 1, share) if models > 1 else stay
    keeps = dice.choice([None, hash_route(1, 50)])
    prompts = tails(dice, 12)
    settings = {"max_rows": step[0], "max_tokens": step[1], "num_blocks": blocks, "token": token}
    router = router_class(decide, keeps)
    with world(slots=5, workers=models, router=router, prefix_caching=caching, **settings) as w:
        play = Play(w, dice, prompts)
        play.to_the_end()
        for number, (outcome, aborted) in play.ended.items():
            expected = reference(
                prompts[number],
                limit=44,
                models=models,
                decide=decide,
                keeps=keeps,
                entry=number % models,
                token=token,
            )
            if aborted and outcome.finish is Finish.ABORT:
                assert outcome.row == expected.row[: len(outcome.row)]
            else:
                assert outcome == expected
        assert len(play.ended) == len(prompts)
        w.check_nothing_held()


class Play:
    """A gateway that submits, aborts and collects at random moments."""

    def __init__(self, w: World, dice: random.Random, prompts: list[list[int]]) -> None:
        self.world, self.dice = w, dice
        self.todo = list(enumerate(prompts))
        self.open: dict[int, Slot] = {}
        self.aborted: set[int] = set()
        self.ended: dict[int, tuple] = {}

    def to_the_end(self) -> None:
        for _ in range(20_000):
            self.gateway_turn()
            self.dice.choice(self.world.workers).turn(self.dice.choice([0, 10**18]))
            if not (self.todo or self.open):
                break
        assert not (self.todo or self.open), "no end"
        for worker in self.world.workers:
            worker.turn()

    def gateway_turn(self) -> None:
        w, dice = self.world, self.dice
        w.slots.collect()
        while self.todo and w.slots.num_free and dice.random() < 0.5:
            number, prompt = self.todo.pop(0)
            entry = number % w.memory.layout.workers
            self.open[number] = w.submit(prompt, limit=44, entry=entry)
        for number, slot in list(self.open.items()):
            if w.baton(slot).state is SlotState.DONE:
                self.ended[number] = w.outcome(slot), number in self.aborted
                w.slots.release(self.open.pop(number))
            elif dice.random() < 0.003:
                self.aborted.add(number)
                w.slots.cancel(slot)


def computed(w: World, index: int = 0) -> int:
    """Tokens that a worker has computed so far."""
    return sum(map(sum, w.workers[index].runner.batches))


def test_the_second_request_computes_its_last_block_only() -> None:
    prompt = list(range(40))
    with world(token=endless) as w:
        w.run(w.submit(prompt, limit=41))
        assert computed(w) == 40
        w.run(w.submit(prompt, limit=41))
        assert computed(w) == 40 + BLOCK
        w.run(w.submit([*prompt, 1], limit=42))
        # The one before left its last block, too: as it ended, that was no longer written.
        assert computed(w) == 40 + BLOCK + 1
        words = w.slab.workers[0]
        assert words.get("cache_queried_tokens") == 40 + 40 + 41
        assert words.get("cache_hit_tokens") == 36 + 40
        assert words.get("free_blocks") + words.get("cached_blocks") == 64


def test_a_slot_says_what_its_first_start_found() -> None:
    decide = lambda model, row: 1 if len(row) == 22 and model == 0 else 0  # noqa: E731
    with world(token=endless, router=router_class(decide), num_blocks=16) as w:
        first = w.submit([3] * 21, limit=30)
        assert w.slab.cached[first.index] == -1
        w.run(first)
        second = w.submit([3] * 21, limit=30)
        # The peer finds more than this, and so does a start after a loss of KV; neither counts.
        w.workers[0].turn()
        w.workers[0].table.drop_kv(w.workers[0].table.resident[second.index])
        w.run(second)
        assert [w.slab.cached[slot.index] for slot in (first, second)] == [0, 20]


def test_an_answer_is_a_prefix_of_the_next_turn() -> None:
    with world(token=endless) as w:
        slot = w.submit([1] * 10, limit=30)
        w.run(slot)
        before = computed(w)
        w.run(w.submit([*w.outcome(slot).row, 5, 5], limit=40))
        # 29 tokens had KV: the 30th was the last, and nobody had to read it.
        assert computed(w) == before + (32 - 28) + 7


@pytest.mark.parametrize("chunk", [8, 9, 20, 64])
def test_many_at_once_compute_their_prefix_once(chunk: int) -> None:
    prompt = list(range(32))
    with world(slots=4, token=endless, max_tokens=chunk) as w:
        slots = [w.submit([*prompt, n], limit=34) for n in range(4)]
        w.run(*slots)
        assert computed(w) == 32 + 4
        for n, slot in enumerate(slots):
            expected = reference([*prompt, n], limit=34, models=1, decide=stay, token=endless)
            assert w.outcome(slot) == expected


def test_prompts_that_begin_otherwise_do_not_wait() -> None:
    with world(slots=4, token=endless, max_tokens=64) as w:
        slots = [w.submit([n // 2] * 9 + [n], limit=11) for n in (2, 4, 3, 5)]
        w.run(*slots)
        assert w.workers[0].runner.batches == [[10, 10], [2, 2]]


def test_nobody_waits_for_one_that_gets_no_blocks() -> None:
    with world(slots=4, num_blocks=8, token=endless) as w:
        old = w.submit([1] * 17, limit=24)
        w.workers[0].turn()
        large, small = w.submit([3] * 24, limit=26), w.submit([3] * 5, limit=6)
        w.run(small)
        assert w.baton(old).state is SlotState.LIVE
        assert w.baton(large).length == 24
        w.run(old, large)


def test_who_waits_for_an_aborted_one_goes_on_alone() -> None:
    with world(slots=4, token=endless, max_tokens=8) as w:
        first, second = (w.submit([1] * 24 + [n], limit=26) for n in range(2))
        w.workers[0].turn()
        w.slots.cancel(first)
        w.run(second)
        assert w.outcome(second).finish is Finish.LENGTH
        assert computed(w) == 8 + 25 - 8


def test_kv_that_was_given_up_is_found_again() -> None:
    """A pending request loses its blocks to another one and comes back before they are reused."""
    decide = lambda model, row: 1 if row[0] == 1 and len(row) == 10 else 0  # noqa: E731
    with world(num_blocks=5, token=endless, router=router_class(decide)) as w:
        worker = w.workers[0]
        away = w.submit([1] * 9, limit=14)
        worker.turn()  # goes away with 3 blocks
        request = worker.table.resident[away.index]
        assert (request.state, request.num_blocks) == (State.PENDING, 3)
        other = w.submit([2] * 9, limit=10)
        worker.turn()
        assert request.num_blocks == 0
        assert w.baton(other).state is SlotState.DONE
        before = computed(w)
        w.run(away)
        assert w.outcome(away) == reference(
            [1] * 9, limit=14, models=2, decide=decide, token=endless
        )
        assert worker.pool.hit_tokens >= 4
        assert computed(w) - before < 13


def test_every_worker_has_a_cache_of_its_own() -> None:
    with world(token=endless) as w:
        for entry in (0, 1, 0, 1):
            w.run(w.submit([3] * 21, limit=22, entry=entry))
        assert [computed(w, index) for index in (0, 1)] == [22, 22]


def test_kv_that_gave_a_nan_is_not_kept() -> None:
    ill = [True]

    def token(model: int, row: Sequence[int]) -> int:
        return -1 if ill[0] and row[0] == 3 else endless(model, row)

    with world(token=token) as w:
        bad, good = w.submit([3] * 21, limit=30), w.submit([4] * 21, limit=30)
        w.run(bad, good)
        assert w.baton(bad).finish is Finish.NUMERIC_ERROR
        assert w.baton(good).finish is Finish.LENGTH
        ill[0] = False
        before = computed(w)
        w.run(w.submit([3] * 21, limit=22))
        assert computed(w) == before + 21


def test_nothing_discarded_is_ever_computed() -> None:
    """Worker 0 samples, discards and hands off each time: its cache knows the peer's tokens."""
    decide = lambda model, row: 1  # noqa: E731
    with world(router=router_class(decide), token=endless) as w:
        slot = w.submit([9] * 6, limit=30)
        w.run(slot)
        row = w.outcome(slot).row
        assert w.outcome(slot).sources == [1] * 24
        before = computed(w)
        w.run(w.submit(row[:29], limit=30, pinned=True))
        assert computed(w) == before + 29 - 28


@pytest.fixture
def idle() -> Running:
    with world(token=endless) as w:
        running = Running(w)
        yield running
        running.close()


def test_an_idle_worker_recounts_and_repairs(
    idle: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = idle.world
    away = router_class(lambda model, row: 1 if model == 0 else 0)
    monkeypatch.setattr(type(w.workers[0].router), "decide", away.decide)
    slot = w.submit([1] * 9, limit=20)
    w.workers[0].turn()
    table, pool = w.workers[0].table, w.workers[0].pool
    pool._drop(int(table.resident[slot.index].block_table[0]))
    with pytest.raises(AssertionError):
        table.check_blocks(strict=True)
    with caplog.at_level(logging.ERROR):
        table.check_blocks(strict=False)
    assert "do not add up" in caplog.text
    assert table.kv_repairs == 1
    pool.check(table.resident.values())
    table.check_blocks(strict=True)
    idle.start()
    idle.until(lambda: idle.done(slot))
    assert w.outcome(slot).row[:9] == [1] * 9


def test_the_recount_comes_once_after_each_busy_time(
    idle: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trserve.workers import loop

    monkeypatch.setattr(loop, "BELT_S", 0.01)
    counts = [0, 0]
    for index, worker in enumerate(idle.world.workers):

        def check(*, strict: bool, index: int = index) -> None:
            assert strict
            counts[index] += 1

        worker.table.check_blocks = check
    idle.start()
    for n in (1, 2):
        slot = idle.world.submit([n] * 5, limit=9)
        idle.until(lambda slot=slot: idle.done(slot))
        deadline = 500
        while counts[0] < n and deadline:
            deadline -= 1
            idle.threads[0].join(0.01)
        idle.threads[0].join(0.05)
        assert counts == [n, 0]
