"""Invariant 1 as a property: what a request gets depends on nothing but the request.

Mixes of requests of every kind, in pools that hold hardly more than the longest row, in steps of
any size, with and without the prefix cache, while requests are aborted, KV is taken away and
workers end and are replaced at random moments. Every request must get exactly the tokens, finish
reason and log probabilities that it gets alone in a pool with room for everything; an aborted one
the beginning of these. At the end all blocks are free or cached.

The model has no weights: its logits, different at every token of the vocabulary, are a function
of a hash of what its KV cache holds.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import FULL
from tests.workers.fakes import (
    VOCAB,
    EarlyRouter,
    FakeRouter,
    HashRunner,
    Outcome,
    SubmittingHashRunner,
    World,
    hash_route,
    router_class,
    stay,
)
from tests.workers.fakes import world as make_world
from trserve.gateway.slots import Slot
from trserve.ipc.annotations import Annotation, AnnotationBook
from trserve.ipc.baton import Finish, SlotState
from trserve.router_lib.base import BaseRouter

ROW = 64
LATER = 10**18
HASHES = 997
ILL = 15
"""Below this, a hash gives logits that are NaN: about one step in seventy."""
EXAMPLES = settings.default.max_examples * (6 if FULL else 1)
"""Without weights a mix takes a twentieth of a second."""
MOST_ROUNDS = 4
TURNS = 50_000
TURNS_WITH_ACCIDENTS = 20_000
"""A long prompt, a token a step, may lose its KV for ever; left in peace it must come to an end."""

TABLE = np.random.default_rng(0).normal(0.0, 2.0, (HASHES, VOCAB)).astype(np.float32)
TABLE[:ILL] = np.nan
BEGINNINGS = np.random.default_rng(1).integers(VOCAB, size=(2, 24)).tolist()


class DenseRunner(HashRunner):
    """Hashes to a row of ``TABLE`` instead of a token."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(TABLE[hidden[:, 0].int().numpy()])


class SubmittingRunner(DenseRunner, SubmittingHashRunner):
    """The same on a device."""


def hashed(model: int, row: Sequence[int]) -> int:
    return hash((model, *row)) % HASHES


@dataclass(frozen=True)
class Job:
    """A request: its prompt, how many tokens it may write, and all that it asks for."""

    prompt: list[int]
    max_tokens: int
    entry: int
    options: dict[str, Any] = field(default_factory=dict)

    def submit(self, w: World) -> Slot:
        entry = self.entry % w.memory.layout.workers
        limit = len(self.prompt) + self.max_tokens
        return w.submit(self.prompt, limit=limit, entry=entry, **self.options)


@dataclass(frozen=True)
class Result:
    """What came of a request; ``records`` are those of its row from ``first`` on."""

    outcome: Outcome
    first: int
    records: list[Annotation]

    @classmethod
    def of(cls, w: World, slot: Slot, job: Job) -> Result:
        outcome, tops = w.outcome(slot), job.options["tops"]
        if tops is None:
            return cls(outcome, len(outcome.row), [])
        scores = job.options["scores_prompt"]
        book = AnnotationBook(w.slab, slot.index, first=0 if scores else len(job.prompt), tops=tops)
        first = len(job.prompt)
        if scores and outcome.finish is not Finish.ABORT:
            assert book.scored == (len(job.prompt) if len(job.prompt) > 1 else 0)
            first = 1
        records = book.read(first, len(outcome.row))
        # What is said of traced requests alone was not asked for.
        records = [r._replace(score=None, alone=False, handoff_us=None) for r in records]
        return cls(outcome, first, records)

    def begins(self, whole: Result) -> bool:
        """Whether this is as far as an abort let ``whole`` come."""
        length = len(self.outcome.row)
        start, stop = self.first - whole.first, length - whole.first
        same = not self.records or self.records == whole.records[start:stop]
        rows = self.outcome.row == whole.outcome.row[:length]
        count = len(self.outcome.sources)
        return same and rows and self.outcome.sources == whole.outcome.sources[:count]


def one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


PROMPTS = st.builds(
    lambda which, shared, own: (BEGINNINGS[which][:shared] + own) or [0],
    st.integers(0, 1),
    one_of(0, 0, 3, 8, 17, 24),
    st.lists(st.integers(0, VOCAB - 1), max_size=14),
)

SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "temperature": one_of(0.0, 0.3, 1.0, 2.0),
        "top_k": one_of(0, 1, 3, 40),
        "top_p": one_of(1.0, 0.9, 0.3),
        "min_p": one_of(0.0, 0.05, 0.5),
        "seed": st.integers(0, 2**64 - 1),
        "repetition_penalty": one_of(1.0, 1.5, 0.8),
        "presence_penalty": one_of(0.0, 1.2, -0.5),
        "frequency_penalty": one_of(0.0, 0.6, -0.2),
        "logit_bias": st.dictionaries(
            st.integers(0, VOCAB - 1), one_of(-100.0, -2.0, 1.5, 100.0), max_size=4
        ),
        "min_tokens": st.integers(0, 9),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=6).map(tuple),
        "ignore_eos": st.booleans(),
        "pinned": st.booleans(),
        "trace": st.booleans(),
    },
)

ANNOTATIONS = one_of((None, False), (None, False), (0, False), (3, False), (0, True), (2, True))


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    """One request, or several choices of it, which differ in their seeds alone."""
    prompt, entry, options = draw(PROMPTS), draw(st.integers(0, 2)), draw(SAMPLING)
    tops, scores_prompt = draw(ANNOTATIONS)
    options |= {"tops": tops, "scores_prompt": scores_prompt}
    max_tokens = draw(st.integers(0 if scores_prompt else 1, 24))
    choices = draw(one_of(1, 1, 1, 2, 3))
    seed = options.get("seed", 0)
    each = [options | {"seed": (seed + number) % 2**64} for number in range(choices)]
    return [Job(prompt, max_tokens, entry, own) for own in each]


MIXES = st.lists(jobs(), min_size=1, max_size=7).map(
    lambda many: [job for each in many for job in each]
)

SERVERS = st.fixed_dictionaries(
    {
        "steps": one_of((1, 1), (2, 3), (3, 8), (4, 20), (8, 64), (16, 200)),
        "block_size": one_of(1, 2, 4, 8, 16),
        "spare_blocks": one_of(0, 1, 3, 8, 200),
        "prefix_caching": st.booleans(),
        "submits": st.booleans(),
    }
)


def alone(mix: Sequence[Job], router: type[BaseRouter], models: int) -> list[Result]:
    """Each request by itself, with room for everything and nothing kept of those before it."""
    results = []
    options = {"prefix_caching": False, "num_blocks": 4 * ROW, "max_tokens": 4 * ROW}
    with make_world(
        slots=1, workers=models, router=router, token=hashed, runner=DenseRunner, **options
    ) as w:
        for job in mix:
            slot = job.submit(w)
            w.run(slot)
            results.append(Result.of(w, slot, job))
            w.slots.release(slot)
            w.slots.collect()
        w.check_nothing_held()
    return results


class Play:
    """A gateway, workers and accidents, each at its turn, as ``dice`` say."""

    def __init__(self, w: World, mix: Sequence[Job], dice: random.Random) -> None:
        self.world, self.dice = w, dice
        self.todo = list(enumerate(mix))
        self.open: dict[int, tuple[Slot, Job]] = {}
        self.results: dict[int, Result] = {}
        self.aborted: set[int] = set()
        self.deaths = 0
        # Not all at once: a mix without accidents shows most of what pressure alone does.
        self.abort_share, self.drop_share, self.death_share = (
            dice.choice((0.0, 0.0, share)) for share in (0.02, 0.05, 0.05)
        )

    def to_the_end(self) -> None:
        for turn in range(TURNS):
            self._gateway()
            index = self.dice.randrange(len(self.world.workers))
            if turn < TURNS_WITH_ACCIDENTS:
                self._accident(index)
            self.world.workers[index].turn(self.dice.choice((0, LATER)))
            if not (self.todo or self.open):
                break
        assert not (self.todo or self.open), "no end"
        for worker in self.world.workers:
            worker.turn()

    def _gateway(self) -> None:
        w, dice = self.world, self.dice
        w.slots.collect()
        while self.todo and w.slots.num_free and dice.random() < 0.6:
            number, job = self.todo.pop(0)
            self.open[number] = job.submit(w), job
        for number, (slot, job) in list(self.open.items()):
            if w.baton(slot).state is SlotState.DONE:
                self.results[number] = Result.of(w, slot, job)
                w.slots.release(slot)
                del self.open[number]
            elif dice.random() < self.abort_share:
                self.aborted.add(number)
                w.slots.cancel(slot)

    def _accident(self, index: int) -> None:
        table = self.world.workers[index].table
        holders = [request for request in table.resident.values() if request.num_blocks]
        if holders and self.dice.random() < self.drop_share:
            table.drop_kv(self.dice.choice(holders))
        if self.dice.random() < self.death_share:
            self.deaths += 1
            self.world.workers[index] = self.world.create(index)
            self.world.workers[index].table.rescan()


def check(mix: Sequence[Job], play: Play) -> None:
    w = play.world
    expected = alone(mix, w.router, len(w.workers))
    assert len(play.results) == len(mix)
    for number, found in play.results.items():
        if number in play.aborted and found.outcome.finish is Finish.ABORT:
            assert found.begins(expected[number]), mix[number]
        else:
            assert found == expected[number], mix[number]


def what_happened(play: Play) -> Counter[str]:
    """What put the mix to the test."""
    seen = Counter(result.outcome.finish.name for result in play.results.values())
    seen["handoffs"] = sum(result.outcome.hops for result in play.results.values())
    seen["records"] = sum(len(result.records) for result in play.results.values())
    seen["deaths"] = play.deaths
    for worker in play.world.workers:
        seen["KV lost"] += worker.table.kv_drops - worker.table.kv_repairs
        seen["cache hits"] += worker.pool.hit_tokens
        seen["evictions"] += worker.pool.evictions
    return seen


EVERYTHING = {
    *("STOP", "LENGTH", "ABORT", "NUMERIC_ERROR", "handoffs", "records", "deaths"),
    *("KV lost", "cache hits", "evictions"),
}


def test_what_a_request_gets_depends_on_nothing_else() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES)
    @given(
        mix=MIXES,
        server=SERVERS,
        models=st.integers(1, 3),
        share=one_of(0, 10, 40, 100),
        kept=one_of(None, 0, 50),
        base=one_of(FakeRouter, EarlyRouter),
        seed=st.integers(0, 2**32),
    )
    def holds_for(
        mix: list[Job],
        server: dict[str, Any],
        models: int,
        share: int,
        kept: int | None,
        base: type[FakeRouter],
        seed: int,
    ) -> None:
        keeps = None if kept is None else hash_route(1, kept)
        router = router_class(hash_route(models - 1, share) if models > 1 else stay, keeps, base)
        with server_for(mix, router, models, **server) as w:
            play = Play(w, mix, random.Random(seed))
            play.to_the_end()
            w.check_nothing_held()
            check(mix, play)
            seen.update(what_happened(play))

    # Guards the guard: requests end in every way, and all that can happen to them happens. What is
    # rare may not be among the mixes of one round.
    for _ in range(MOST_ROUNDS):
        holds_for()
        if not (missing := {event for event in EVERYTHING if not seen[event]}):
            break
    assert not missing, f"never seen: {missing} ({seen})"
    print(", ".join(f"{count} x {event}" for event, count in seen.most_common()))


def server_for(
    mix: Sequence[Job],
    router: type[BaseRouter],
    models: int,
    *,
    steps: tuple[int, int],
    block_size: int,
    spare_blocks: int,
    prefix_caching: bool,
    submits: bool,
) -> AbstractContextManager[World]:
    """A world whose smallest pool holds the longest row and nothing beside it."""
    longest = max(len(job.prompt) + job.max_tokens for job in mix)
    return make_world(
        slots=6,
        workers=models,
        router=router,
        token=hashed,
        runner=SubmittingRunner if submits else DenseRunner,
        max_rows=steps[0],
        max_tokens=steps[1],
        block_size=block_size,
        num_blocks=-(-longest // block_size) + spare_blocks,
        prefix_caching=prefix_caching,
    )
