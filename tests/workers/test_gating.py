"""Gates over real loops: they never hang, change no token, and say why they opened."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.fakes import World, hash_route, reference, router_class, world
from tests.workers.running import Running
from trserve.ipc.baton import unpack
from trserve.ipc.doorbell import ring, silence
from trserve.ipc.layout import WORKER_WORDS
from trserve.ipc.slab import Slab, WorkerStatus
from trserve.sched.gate import Reason
from trserve.sched.table import ThresholdTable
from trserve.workers.gating import WorkerGate
from trserve.workers.lockstep import LockstepGate

REASONS = ("threshold", "nobody_runs", "timeout", "drain")


def openings(w: World, worker: int) -> dict[str, int]:
    words = w.slab.workers[worker]
    return {reason: words.get(f"gate_{reason}") for reason in REASONS}


def gate(slab: Slab, index: int, thresholds: Sequence[int], **settings) -> WorkerGate:
    bells = settings.pop("bells", [0] * slab.layout.workers)
    table = ThresholdTable.fixed(thresholds)
    return WorkerGate(slab, index, bells, thresholds=table, max_rows=8, **settings)


@pytest.fixture
def quiet():
    """A world of two workers and eight live requests, of which nobody has taken any in."""
    with world(slots=8) as w:
        for n in range(8):
            w.submit([n + 1], limit=10)
        yield w


def test_eager_never_waits_and_looks_at_nobody(quiet: World) -> None:
    quiet.slab.workers[1].set("in_step", 3)
    assert gate(quiet.slab, 0, (1, 1)).wait_s(1, 5) == 0
    assert openings(quiet, 0)["threshold"] == 1


def test_it_waits_for_as_many_as_the_table_says(quiet: World) -> None:
    quiet.slab.workers[1].set("in_step", 3)
    asked = gate(quiet.slab, 0, (4, 2))
    assert asked.wait_s(3, 1000) == pytest.approx(0.02)
    assert quiet.slab.workers[0].get("buffered") == 3
    assert quiet.slab.workers[0].get("batch_threshold") == 4
    assert asked.wait_s(3, 1000 + 15_000_000) == pytest.approx(0.005)
    assert asked.wait_s(4, 1000 + 15_000_000) == 0
    assert openings(quiet, 0) == {"threshold": 1, "nobody_runs": 0, "timeout": 0, "drain": 0}
    assert quiet.slab.workers[0].get("in_step") == 4
    asked.rest(1)
    assert quiet.slab.workers[0].get("buffered") == 1
    assert asked.wait_s(1, 2**40) == pytest.approx(0.02), "the wait begins anew after a step"


def test_no_threshold_is_above_what_a_step_takes(quiet: World) -> None:
    table = ThresholdTable.fixed((5, 1))
    few = WorkerGate(quiet.slab, 0, [0, 0], thresholds=table, max_rows=3)
    assert few.wait_s(3, 1) == 0


@pytest.mark.parametrize(("slowest_ms", "wait_ms"), [(1, 20), (5, 20), (30, 120)])
def test_the_net_follows_the_slowest_model(quiet: World, slowest_ms: int, wait_ms: int) -> None:
    quiet.slab.workers[1].set("slowest_step_ns", slowest_ms * 10**6)
    asked = gate(quiet.slab, 0, (4, 2))
    assert asked.wait_s(1, 7) == pytest.approx(wait_ms / 1e3)
    assert asked.wait_s(1, 7 + wait_ms * 10**6) == 0
    assert openings(quiet, 0)["timeout"] == 1


def test_the_net_may_be_given(quiet: World) -> None:
    assert gate(quiet.slab, 0, (4, 2), max_wait_s=0.5).wait_s(1, 1) == pytest.approx(0.5)


def test_when_nobody_runs_the_opener_is_rung_or_opens(quiet: World) -> None:
    bells = quiet.memory.bells
    for bell in bells:
        silence(bell)
    lower, upper = (gate(quiet.slab, index, (4, 5), bells=bells) for index in range(2))
    quiet.slab.workers[1].set("buffered", 5)
    assert lower.wait_s(3, 1) > 0
    assert silence(bells[1]), "the other has more of what it waits for"
    assert not silence(bells[0])
    quiet.slab.workers[0].set("buffered", 3)
    upper.use(ThresholdTable.fixed((4, 5)))
    assert upper.wait_s(5, 1) == 0
    assert openings(quiet, 1)["threshold"] == 1
    upper.rest(0)
    quiet.slab.workers[1].set("buffered", 4)
    lower.rest(3)
    assert upper.wait_s(4, 1) > 0, "one request of the eight is in no buffer"
    lower.rest(4)
    assert upper.wait_s(4, 1) > 0, "the other is nearer to its threshold"
    assert silence(bells[0])
    assert lower.wait_s(4, 1) == 0


def test_draining_opens_it(quiet: World) -> None:
    quiet.slab.workers[1].set("in_step", 1)
    asked = gate(quiet.slab, 0, (4, 2))
    assert asked.wait_s(1, 1) > 0
    asked.draining = True
    assert asked.wait_s(1, 1) == 0
    assert openings(quiet, 0)["drain"] == 1


def test_new_thresholds_count_at_once_and_a_successor_starts_from_rest(quiet: World) -> None:
    words = quiet.slab.workers[0]
    words.set("in_step", 5)
    words.set("buffered", 2)
    asked = gate(quiet.slab, 0, (4, 2))
    assert (words.get("in_step"), words.get("buffered")) == (0, 0)
    quiet.slab.workers[1].set("in_step", 1)
    assert asked.wait_s(1, 1) > 0
    asked.use(ThresholdTable.eager(2))
    assert asked.wait_s(1, 1) == 0
    assert words.get("batch_threshold") == 1


def test_requests_of_a_worker_that_is_away_are_waited_for_by_nobody(quiet: World) -> None:
    asked = gate(quiet.slab, 0, (4, 2))
    for slot in range(7):
        word = quiet.slab.baton[slot]
        quiet.slab.baton[slot] = unpack(word)._replace(owner=1).pack()
    assert asked.wait_s(1, 1) > 0, "they may come"
    quiet.slab.workers[1].set("status", WorkerStatus.RESTARTING)
    assert asked.wait_s(1, 1) == 0
    assert openings(quiet, 0)["threshold"] == 1, "one request alone has a threshold of 1"


def test_a_step_that_needs_no_opening_is_seen(quiet: World) -> None:
    asked = gate(quiet.slab, 0, (4, 2))
    asked.goes_on(3)
    words = quiet.slab.workers[0]
    assert (words.get("in_step"), words.get("buffered")) == (3, 0)
    asked.rest(3)
    assert (words.get("in_step"), words.get("buffered")) == (0, 3)
    assert not any(openings(quiet, 0).values())


def test_the_wait_is_over_with_the_last_that_waited(quiet: World) -> None:
    quiet.slab.workers[1].set("in_step", 1)
    asked = gate(quiet.slab, 0, (4, 2))
    assert asked.wait_s(1, 1) == pytest.approx(0.02)
    asked.rest(0)  # its client left
    assert asked.wait_s(1, 10**12) == pytest.approx(0.02)


def test_a_process_that_was_stopped_for_a_while_is_not_slow(quiet: World) -> None:
    asked = gate(quiet.slab, 0, (4, 2))
    for _ in range(50):
        asked.note_step(10**7)
    asked.note_step(30 * 10**9)
    assert quiet.slab.workers[0].get("slowest_step_ns") < 1.3 * 10**7
    for _ in range(200):
        asked.note_step(5 * 10**7)
    assert quiet.slab.workers[0].get("slowest_step_ns") > 4.5 * 10**7


def test_every_reason_has_a_word() -> None:
    assert {f"gate_{r.name.lower()}" for r in Reason} == {
        word for word in WORKER_WORDS if word.startswith("gate_")
    }


@settings(max_examples=12, deadline=None)
@given(
    models=st.integers(2, 3),
    thresholds=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    share=st.integers(0, 100),
    requests=st.integers(1, 10),
    seed=st.integers(0, 2**16),
)
def test_no_gate_hangs_and_no_token_changes(models, thresholds, share, requests, seed) -> None:
    """Any thresholds, routing, arrivals, cancellations and a shrinking N, over real loops."""
    drawn = random.Random(seed)
    route = hash_route(models - 1, share)
    with world(
        router=router_class(route), slots=10, workers=models, thresholds=thresholds[:models]
    ) as w:
        running = Running(w)
        try:
            running.start()
            limits = [drawn.choice((4, 12, 30)) for _ in range(requests)]
            slots, cancelled = [], []
            for n, limit in enumerate(limits):
                slots.append(w.submit([n + 1, seed % 50], limit=limit))
                if drawn.random() < 0.2:
                    w.slots.cancel(slots[-1])
                    cancelled.append(slots[-1])
                time.sleep(drawn.choice((0, 0, 0.002)))
            began = time.monotonic()
            running.until(lambda: running.done(*slots))
            assert time.monotonic() - began < 5
            for n, (slot, limit) in enumerate(zip(slots, limits, strict=True)):
                if slot not in cancelled:
                    expected = reference(
                        [n + 1, seed % 50], limit=limit, models=models, decide=route
                    )
                    assert w.outcome(slot) == expected
        finally:
            running.close()


def test_thresholds_may_change_under_way() -> None:
    route = hash_route(1, 35)
    with world(router=router_class(route), slots=8, row_tokens=208, num_blocks=1000) as w:
        running = Running(w)
        running.start()
        slots = [w.submit([n + 1], limit=200) for n in range(8)]
        drawn = random.Random(5)

        def changed() -> bool:
            rows = {8: drawn.choice(((1, 1), (1, 5), (3, 3), (6, 1)))}
            for loop, bell in zip(running.loops, w.memory.bells, strict=False):
                loop._gate.use(ThresholdTable(2, rows))
                ring(bell)
            return running.done(*slots)

        running.until(changed)
        for n, slot in enumerate(slots):
            assert w.outcome(slot) == reference([n + 1], limit=200, models=2, decide=route)
        running.close()


@pytest.mark.parametrize("steps", [False, True], ids=["model-sync", "step-sync"])
@pytest.mark.parametrize("models", [2, 3])
def test_in_lockstep_no_token_changes_and_nobody_overtakes(steps: bool, models: int) -> None:
    route = hash_route(models - 1, 40)
    began: list[tuple[int, list[int]]] = []
    with world(router=router_class(route), slots=8, workers=models) as w:
        for worker in w.workers:
            worker.gate = LockstepGate(w.slab, worker.index, w.memory.bells, steps=steps)

            def noted(now_ns: int, worker=worker, run=worker.cycle.run) -> None:
                began.append((worker.index, [x.get("in_step") for x in w.slab.workers]))
                run(now_ns)

            worker.cycle.run = noted
        running = Running(w)
        running.start()
        slots = [w.submit([n + 1], limit=30) for n in range(8)]
        running.until(lambda: running.done(*slots))
        for n, slot in enumerate(slots):
            assert w.outcome(slot) == reference([n + 1], limit=30, models=models, decide=route)
        running.close()
        assert not any(openings(w, index)["timeout"] for index in range(models))
    if not steps:
        for index, in_step in began:
            assert not any(count for other, count in enumerate(in_step) if other != index)
