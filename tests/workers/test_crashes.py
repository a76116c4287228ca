"""Workers that end between any two stores, and hints that are lost, doubled or late.

All workers of a slab run in this process; each store of a worker into shared memory burns a fuse,
and a worker whose fuse is out ends there and then. Its successor has the same memory and nothing
else. What the launcher does in between is its own code.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.ipc.memory import memory
from tests.workers.fakes import Worker, World, hash_route, reference, router_class
from trserve.gateway.slots import Slot
from trserve.ipc import publish
from trserve.ipc.baton import Finish, SlotState, unpack
from trserve.ipc.doorbell import ring
from trserve.ipc.rings import Descriptor
from trserve.ipc.slab import Slab
from trserve.worker_loss import StandIn

LIMIT = 28
GATEWAY = -1
MAX_TURNS = 3000


class CrashError(Exception):
    """The worker ended at this store."""


class Fuse:
    """Counts the stores of one worker; None never burns out."""

    def __init__(self) -> None:
        self.left: int | None = None

    def burn(self) -> None:
        if self.left is not None:
            if self.left == 0:
                raise CrashError
            self.left -= 1


class Shared:
    """Memory whose stores burn the fuse, and that only the baton holder of a slot may write."""

    def __init__(self, target: Any, fuse: Fuse, check: Any = None) -> None:
        self._target, self._fuse, self._check = target, fuse, check

    def __len__(self) -> int:
        return len(self._target)

    def __getitem__(self, at: Any) -> Any:
        return self._target[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        self._fuse.burn()
        if self._check is not None:
            for slot in _slots(at):
                self._check(slot)
        self._target[at] = value

    def view(self) -> Any:
        return self._target.view()

    def reshape(self, length: int) -> Shared:
        """All rows one after the other."""
        row = self._target.shape[1]
        return Shared(self._target.reshape(length), self._fuse, lambda at: self._check(at // row))


def _slots(at: Any) -> list[int]:
    first = at[0] if isinstance(at, tuple) else at
    if isinstance(first, np.ndarray):
        return first.tolist()
    return first if isinstance(first, list) else [first]


def watched_slab(shared: Any, index: int, fuse: Fuse) -> Slab:
    """Worker ``index``'s view, in which a store by anybody but the holder fails the test."""
    slab: Any = shared.slab()
    words = slab.baton

    def check(slot: int) -> None:
        baton = unpack(words[slot])
        assert baton.state is SlotState.LIVE, f"worker {index} wrote into a slot that is not live"
        assert baton.owner == index, f"worker {index} wrote without the baton"

    for name in ("baton", "sent", "tokens", "source", "cached"):
        setattr(slab, name, Shared(getattr(slab, name), fuse, check))
    slab.closed[index] = Shared(slab.closed[index], fuse)
    extras = slab.extras

    def watched_extras(slot: int, bank: int) -> Any:
        return Shared(extras(slot, bank), fuse, lambda _: check(slot))

    ring_words = slab.ring_words
    slab.extras = watched_extras
    slab.ring_words = lambda *ends: Shared(ring_words(*ends), fuse)
    return slab


class Chaos(World):
    """A world that goes wrong as its random numbers say."""

    def __init__(self, dice: random.Random, **settings: Any) -> None:
        self.dice = dice
        self.calm = False
        self.crashes = 0
        self.turning = GATEWAY
        super().__init__(**settings)
        self.late: list[list[Descriptor]] = [[] for _ in self.workers]
        self.lost = [False] * len(self.workers)

    def create(self, index: int) -> Worker:
        fuse = Fuse()
        worker = Worker(self, index, watched_slab(self.memory, index, fuse))
        worker.fuse = fuse
        return worker

    def ring(self, bell: int) -> None:
        if self.turning != GATEWAY:
            self.workers[self.turning].fuse.burn()
        ring(bell)

    def hints(self, index: int) -> list[Descriptor]:
        """What worker ``index`` gets of what was sent to it, and what came late."""
        found = self.workers[index].drain() + self.late[index]
        self.late[index] = []
        if self.calm:
            return found
        self.dice.shuffle(found)
        taken: list[Descriptor] = []
        for descriptor in found:
            fate = self.dice.random()
            if fate < 0.1:
                self.lost[index] = True  # as if the ring had been full: a rescan will follow
            elif fate < 0.3:
                self.late[index].append(descriptor)
            else:
                taken += [descriptor] * (2 if fate > 0.8 else 1)
        return taken

    def bury(self, index: int) -> None:
        """What the launcher does; one that remembers no suspects, so that none is found guilty."""
        StandIn(self.slab, self.memory.bells).take_over(index)

    def chaotic_turn(self, index: int) -> None:
        self.turning = index
        worker = self.workers[index]
        armed = not self.calm and self.dice.random() < 0.15
        if armed:
            worker.fuse.left = self.dice.randrange(25)
        try:
            outdated = self.lost[index] or worker.table.outdated
            if outdated and (self.calm or self.dice.random() < 0.3):
                self.lost[index] = False
                worker.table.rescan()
                worker.cycle.look_around()
            worker.take_in(self.hints(index))
            worker.cycle.run(0)
            worker.outbox.flush()
        except CrashError:
            self.crashes += 1
            self.late[index] = []
            self.bury(index)
            self.workers[index] = self.create(index)
        else:
            worker.check_blocks()
            if armed:
                worker.fuse.left = None


@contextmanager
def chaos(dice: random.Random, *, slots: int, workers: int, **settings: Any) -> Iterator[Chaos]:
    with (
        memory(slots=slots, row_tokens=32, workers=workers) as shared,
        pytest.MonkeyPatch.context() as patch,
    ):
        world = Chaos(dice, memory=shared, **settings)
        patch.setattr(publish, "ring", world.ring)
        yield world


class Gateway:
    """Submits, cancels, looks at lengths as they grow, and takes slots back."""

    def __init__(self, world: Chaos, prompts: list[list[int]]) -> None:
        self.world = world
        self.todo = list(enumerate(prompts))
        self.open: dict[int, Slot] = {}
        self.seen: dict[int, list[int]] = {}
        self.cancelled: set[int] = set()
        self.ended: dict[int, Finish] = {}

    def turn(self) -> None:
        self.world.turning = GATEWAY
        self.world.slots.collect()
        self._submit()
        for number, slot in list(self.open.items()):
            self._look(number, slot)
        if self.open and self.world.dice.random() < 0.02:
            number = self.world.dice.choice(list(self.open))
            self.cancelled.add(number)
            self.world.slots.cancel(self.open[number])

    def _submit(self) -> None:
        while self.todo and self.world.slots.num_free:
            number, prompt = self.todo.pop()
            entry = number % self.world.memory.layout.workers
            self.open[number] = self.world.submit(prompt, limit=LIMIT, entry=entry)
            self.seen[number] = []

    def _look(self, number: int, slot: Slot) -> None:
        outcome = self.world.outcome(slot)
        before = self.seen[number]
        assert outcome.row[: len(before)] == before, "a token was taken back"
        self.seen[number] = outcome.row
        if self.world.baton(slot).state is SlotState.DONE:
            self.ended[number] = outcome.finish
            del self.open[number]
            self.world.slots.release(slot)

    @property
    def idle(self) -> bool:
        return not (self.todo or self.open or self.world.slots.num_closing)


@given(seed=st.integers(0, 2**32), models=st.integers(1, 3), share=st.sampled_from([0, 30, 90]))
@example(seed=1, models=2, share=90)
def test_no_schedule_loses_doubles_or_strands_a_token(seed: int, models: int, share: int) -> None:
    dice = random.Random(seed)
    decide = hash_route(models - 1, share) if models > 1 else hash_route(1, 0)
    keeps = hash_route(1, 50) if dice.random() < 0.5 else None
    prompts = [[dice.randrange(64) for _ in range(dice.randint(1, 20))] for _ in range(6)]
    settings = {
        "router": router_class(decide, keeps),
        "num_blocks": dice.choice([8, 11, 40]),
        "max_tokens": dice.choice([5, 64]),
        "max_rows": 3,
    }
    with chaos(dice, slots=3, workers=models, **settings) as world:
        gateway = Gateway(world, prompts)
        for turn in range(MAX_TURNS):
            world.calm = turn > 300
            gateway.turn()
            if gateway.idle:
                break
            world.chaotic_turn(dice.randrange(models))
        assert gateway.idle, f"no end: {gateway.open} {gateway.todo}"
        assert world.slots.num_free == 3
        for number, prompt in enumerate(prompts):
            expected = reference(
                prompt,
                limit=LIMIT,
                models=models,
                decide=decide,
                keeps=keeps,
                entry=number % models,
            )
            seen, finish = gateway.seen[number], gateway.ended[number]
            if number in gateway.cancelled and finish is Finish.ABORT:
                assert seen == expected.row[: len(seen)]
            else:
                assert (seen, finish) == (expected.row, expected.finish)
        for worker in world.workers:
            assert worker.table.resident == {}
            assert worker.pool.num_available == world.num_blocks


@pytest.mark.parametrize("victim", [0, 1])
def test_a_crash_at_every_single_store(victim: int) -> None:
    """One request with handoffs; the victim ends at its n-th store, for every n that there is."""
    decide = hash_route(1, 60)
    expected = reference([5, 6, 7], limit=LIMIT, models=2, decide=decide)
    for stores in itertools.count():
        settings = {"router": router_class(decide), "num_blocks": 20}
        with chaos(random.Random(0), slots=1, workers=2, **settings) as world:
            world.calm = True
            slot = world.submit([5, 6, 7], limit=LIMIT)
            world.workers[victim].fuse.left = stores
            for turn in range(500):
                world.chaotic_turn(turn % 2)
            assert world.outcome(slot) == expected
            world.check_nothing_held()
            if not world.crashes:
                break
    assert stores > 50
