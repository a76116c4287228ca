"""The gate: what it says case by case, and that no sequence of events can hang the system."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trserve.sched.gate import Decision, Reason, decide, default_max_wait_ms, opener
from trserve.sched.table import ThresholdTable


def ask(worker=0, **more) -> Decision:
    told = {
        "buffered": [1, 0],
        "running": [0, 1],
        "thresholds": [3, 3],
        "live": 4,
        "waited": 0,
        "max_wait": 100,
    }
    return decide(worker, **(told | more))


def test_it_is_closed_while_others_may_come():
    assert ask(waited=30) == Decision(None, 70)


def test_the_threshold_opens_it():
    assert ask(buffered=[3, 0]).reason is Reason.THRESHOLD
    assert ask(buffered=[4, 0]).reason is Reason.THRESHOLD
    assert ask(buffered=[1, 0], thresholds=[1, 9]).reason is Reason.THRESHOLD
    assert ask(buffered=[1, 0], thresholds=[0, 0]).reason is Reason.THRESHOLD


def test_nothing_buffered_opens_nothing():
    idle = ask(buffered=[0, 2], waited=1000, draining=True, running=[0, 0], live=2)
    assert idle == Decision(None, None)


def test_when_nobody_runs_the_fullest_opens():
    quiet = {"buffered": [1, 2], "running": [0, 0], "thresholds": [3, 4], "live": 3}
    assert ask(0, **quiet) == Decision(None, 100, opener=1)
    assert ask(1, **quiet).reason is Reason.NOBODY_RUNS


def test_a_request_in_a_ring_or_a_step_is_waited_for():
    quiet = {"buffered": [1, 2], "running": [0, 0], "thresholds": [3, 4], "live": 4}
    assert not ask(1, **quiet).is_open
    assert not ask(1, **(quiet | {"live": 3, "running": [1, 0]})).is_open


def test_a_cancelled_request_that_is_still_buffered_does_not_hide_that_nobody_runs():
    assert ask(buffered=[2, 0], running=[0, 0], live=1).reason is Reason.NOBODY_RUNS


def test_the_safety_net_opens_at_its_time_not_before():
    assert ask(waited=99) == Decision(None, 1)
    assert ask(waited=100).reason is Reason.TIMEOUT


def test_draining_opens_it():
    assert ask(draining=True).reason is Reason.DRAIN


@pytest.mark.parametrize(
    ("buffered", "thresholds", "worker"),
    [([1, 1], [2, 2], 0), ([1, 2], [2, 3], 1), ([2, 3], [4, 6], 0), ([0, 1], [1, 9], 1)],
)
def test_the_opener_is_the_largest_share_then_the_lower_index(buffered, thresholds, worker):
    assert opener(buffered, thresholds) == worker


def test_the_default_wait_is_four_slow_steps_and_at_least_20_ms():
    assert default_max_wait_ms(27.9) == pytest.approx(111.6)
    assert default_max_wait_ms(1.0) == 20


class Server:
    """Workers that step, send through rings and look at their gates, tick by tick.

    Words are read as they are, or ``stale`` ticks late: each worker then decides on what the
    others had stored before.
    """

    def __init__(self, rng, models, tables, max_wait, stale):
        self.rng, self.models, self.tables = rng, models, tables
        self.max_wait, self.stale = max_wait, stale
        self.buffers = [[] for _ in range(models)]
        self.batches = [[] for _ in range(models)]
        self.left = [0] * models
        self.rings = []
        self.cancelled = set()
        self.live = set()
        self.now = self.made = 0
        self.words = []
        self.opened = Counter()
        self.draining = False

    def arrive(self):
        self.made += 1
        self.live.add(self.made)
        self.send(self.made, self.rng.randrange(self.models))

    def send(self, request, model):
        self.rings.append((self.now + self.rng.randrange(3), model, request))

    def cancel(self):
        if self.live:
            request = self.rng.choice(sorted(self.live))
            self.live.discard(request)
            self.cancelled.add(request)

    def tick(self):
        self.now += 1
        for model in range(self.models):
            if self.batches[model]:
                self.left[model] -= 1
                if self.left[model] == 0:
                    self.complete(model)
        # Every worker drains its rings, and notices cancels, before it looks at its gate.
        due = [ring for ring in self.rings if ring[0] <= self.now]
        self.rings = [ring for ring in self.rings if ring[0] > self.now]
        for _, model, request in due:
            if request in self.live:
                self.buffers[model].append((self.now, request))
        for model in range(self.models):
            if not self.batches[model]:
                self.buffers[model] = [b for b in self.buffers[model] if b[1] in self.live]
        self.words.append(([len(b) for b in self.buffers], [len(b) for b in self.batches]))
        for model in range(self.models):
            if not self.batches[model]:
                self.look(model)

    def complete(self, model):
        batch, self.batches[model] = self.batches[model], []
        for request in batch:
            if request not in self.live:
                continue
            if self.rng.random() < 0.05:
                self.live.discard(request)
            else:
                self.send(request, self.rng.choices(range(self.models), self.weights(model))[0])

    def weights(self, model):
        return [1 + 5 * ((model + other) % 3 == 0) for other in range(self.models)]

    def look(self, model):
        buffered, running = self.words[max(0, len(self.words) - 1 - self.stale)]
        if not self.stale:
            buffered = [len(b) for b in self.buffers]
            running = [len(b) for b in self.batches]
        buffered = [*buffered]
        # A worker's own words are never late to itself.
        buffered[model] = len(self.buffers[model])
        oldest = self.buffers[model][0][0] if self.buffers[model] else self.now
        decision = decide(
            model,
            buffered=buffered,
            running=running,
            # Each worker may hold another table for a while: rows go out one after the other.
            thresholds=self.tables[model].row(len(self.live))
            if isinstance(self.tables[model], ThresholdTable)
            else self.tables[model],
            live=len(self.live),
            waited=self.now - oldest,
            max_wait=self.max_wait,
            draining=self.draining,
        )
        if decision.is_open:
            self.opened[decision.reason] += 1
            self.batches[model] = [request for _, request in self.buffers[model]]
            self.buffers[model] = []
            self.left[model] = self.rng.randrange(1, 9)
        elif self.buffers[model]:
            assert self.now - oldest < self.max_wait, "somebody waits past max_wait"
            assert decision.wait == self.max_wait - (self.now - oldest)

    @property
    def is_stuck(self):
        return bool(self.live) and not self.rings and not any(self.batches)


NEVER = 10**9


@st.composite
def servers(draw, max_wait=None, stale=0):
    models = draw(st.integers(2, 4))
    vector = st.tuples(*[st.integers(1, 40)] * models)
    kind = draw(st.sampled_from(["one", "table", "disagree"]))
    if kind == "one":
        tables = [draw(vector)] * models
    elif kind == "table":
        tables = [ThresholdTable.fixed(draw(vector))] * models
    else:
        tables = [draw(vector) for _ in range(models)]
    rng = random.Random(draw(st.integers(0, 2**32)))
    wait = draw(st.integers(5, 60)) if max_wait is None else max_wait
    return Server(rng, models, tables, wait, draw(st.integers(0, stale))), kind


def play(server, ticks=400, arrivals=0.1, cancels=0.02):
    for _ in range(server.rng.randrange(1, 30)):
        server.arrive()
    for _ in range(ticks):
        if server.rng.random() < arrivals:
            server.arrive()
        if server.rng.random() < cancels:
            server.cancel()
        server.tick()
        yield


@given(servers(stale=4))
def test_nobody_waits_past_max_wait_whatever_the_words_say(made):
    server, _ = made
    for _ in play(server):
        pass
    # N shrinks to nothing: every request ends, through whatever gates there are.
    for _ in range(60 * 200):
        if not server.live:
            break
        server.tick()
    assert not server.live


@given(servers(max_wait=NEVER))
def test_with_one_vector_it_never_deadlocks_even_without_the_safety_net(made):
    server, kind = made
    if kind == "disagree":
        # Workers that hold different vectors may name different openers; the net is for that.
        server.tables = [server.tables[0]] * server.models
    for _ in play(server):
        assert not server.is_stuck
    assert server.opened[Reason.TIMEOUT] == 0
    assert server.opened


@given(servers(max_wait=NEVER))
def test_a_feasible_table_in_a_closed_system_opens_by_threshold_alone(made):
    server, _ = made
    vector = tuple(server.rng.randrange(1, 5) for _ in range(server.models))
    server.tables = [ThresholdTable.fixed(vector)] * server.models
    for _ in range(server.rng.randrange(1, 20)):
        server.arrive()
    server.complete = lambda model: _move_all(server, model)
    for _ in range(400):
        server.tick()
        assert not server.is_stuck
    assert set(server.opened) == {Reason.THRESHOLD}


def _move_all(server, model):
    batch, server.batches[model] = server.batches[model], []
    for request in batch:
        server.send(request, server.rng.randrange(server.models))


@given(servers())
def test_draining_waits_for_nobody(made):
    server, _ = made
    server.draining = True
    for _ in play(server, ticks=100):
        for model in range(server.models):
            assert server.batches[model] or not server.buffers[model]
