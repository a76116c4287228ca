"""What a worker's meter says of handoffs: phases that are moments apart, and what was computed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.workers.fakes import World, hash_route, router_class, world
from trserve.ipc.meter import Meter, MeterWriter, read_meter
from trserve.ipc.slab import Slab
from trserve.ipc.trace import TraceWriter
from trserve.workers.metering import FOLD_AFTER_NS, LEARN_AFTER, WorkerMeter
from trserve.workers.tracing import WorkerTrace

PROMPT = [3, 1, 4, 1, 5]


class Clocked:
    """A world whose steps take 40 time units, 10 apart, and are noted as a loop notes them."""

    def __init__(self, running: World) -> None:
        self.running = running
        self.now = 1000
        self.sent = Counter[tuple[int, int]]()
        for worker in running.workers:
            writer = MeterWriter(worker.slab, worker.index)
            worker.meter = WorkerMeter(writer, worker.slab, worker.index, lambda: math.nan)
            words = worker.slab.trace_words(worker.index)
            worker.table.trace = WorkerTrace(TraceWriter(words), worker.meter)
            self._watch(worker)

    def _watch(self, worker: Any) -> None:
        hand_off = worker.table.hand_off

        def watched(request: Any, model: int, **more: Any) -> None:
            self.sent[worker.index, model] += 1
            hand_off(request, model, **more)

        worker.table.hand_off = watched

    def meters(self) -> list[Meter]:
        for worker in self.running.workers:
            worker.cycle.note()
            worker.meter.fold()
        return [read_meter(self.running.slab, worker.index) for worker in self.running.workers]

    def turn(self) -> None:
        for worker in self.running.workers:
            worker.take_in(worker.drain())
            ready = bool(worker.table.runnable)
            self.now += 10
            began = self.now
            worker.cycle.run(began)
            self.now += 40
            worker.outbox.flush()
            if ready:
                width, rows = worker.cycle.width, worker.cycle.rows
                worker.table.trace.step(width, rows, began, self.now)
            worker.cycle.note()

    def run(self, *slots: Any) -> None:
        for _ in range(4000):
            if all(self.running.outcome(slot).finish for slot in slots):
                return
            self.turn()
        raise AssertionError("it does not end")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Whoever asks a worker's table or cycle for the time gets that of the world in the list."""
    worlds: list[Any] = []
    now = lambda: worlds[0].now if worlds else 1  # noqa: E731
    monkeypatch.setattr("trserve.workers.table.time", SimpleNamespace(monotonic_ns=now))
    monkeypatch.setattr("trserve.workers.step_cycle.monotonic_ns", now)
    yield worlds


def total(histograms: list[Any]) -> tuple[int, float]:
    return sum(sum(each.counts) for each in histograms), sum(each.total for each in histograms)


@pytest.mark.parametrize("models", [2, 3])
@pytest.mark.parametrize("keeps", [None, 1])
def test_every_handoff_is_in_every_phase(clock: list[Any], models: int, keeps: Any) -> None:
    decide = hash_route(models - 1, 50)
    router = router_class(decide, None if keeps is None else lambda model, row: 1)
    with world(router=router, slots=4, workers=models) as running:
        clocked = Clocked(running)
        clock.append(clocked)
        slots = [running.submit([*PROMPT, n], limit=60, eos_token_ids=()) for n in range(4)]
        clocked.run(*slots)
        meters = clocked.meters()
        assert sum(clocked.sent.values()) == sum(running.outcome(s).hops for s in slots) > 20
        for (one, other), number in clocked.sent.items():
            assert sum(meters[one].by_peer["send"][other].counts) == number
            phases = [meters[other].by_peer[p][one] for p in ("admission", "exec", "total")]
            assert [sum(each.counts) for each in phases] == [number] * 3
            admission, step, whole = phases
            assert step.total == 40 * number
            assert whole.total == admission.total + step.total
        kinds = [m.counters[k] for m in meters for k in ("first", "resume", "append", "reprefill")]
        assert sum(kinds) == sum(clocked.sent.values())
        visits = total([m.single["visit_tokens"] for m in meters])
        outputs = sum(len(running.outcome(s).sources) for s in slots)
        assert visits[0] == sum(clocked.sent.values())
        assert outputs - 60 < visits[1] <= outputs
        arrivals = total([m.single["arrival"] for m in meters])
        assert arrivals[0] == sum(clocked.sent.values()) + len(slots)
        assert sum(m.counters["busy_ns"] for m in meters) % 40 == 0


def test_what_is_computed_again_is_counted(clock: list[Any]) -> None:
    router = router_class(lambda model, row: int(len(row) % 3 == 0))
    with world(router=router, slots=2, prefix_caching=False) as running:
        clocked = Clocked(running)
        clock.append(clocked)
        slot = running.submit(PROMPT, limit=40, eos_token_ids=())
        small = running.workers[0]
        while not (clocked.sent[0, 1] and slot.index not in small.table.runnable):
            clocked.turn()
        before = clocked.meters()[0].counters
        request = small.table.resident[slot.index]
        computed = request.num_computed
        small.table.drop_kv(request)
        clocked.run(slot)
        after = clocked.meters()[0].counters
        assert before["reprefill"] == 0
        assert after["reprefill"] == 1
        assert computed - 1 <= after["reprefill_tokens"] <= computed
        assert after["resume"] + after["append"] > 2
        assert after["first"] == 0
        assert clocked.meters()[1].counters["first"] == 1


def test_who_is_sent_on_at_once_was_in_no_step(clock: list[Any]) -> None:
    router = router_class(hash_route(1, 0))
    router.admit = lambda self, request: 1  # type: ignore[method-assign,assignment]
    with world(router=router, slots=2) as running:
        clocked = Clocked(running)
        clock.append(clocked)
        clocked.run(running.submit(PROMPT, limit=12, eos_token_ids=()))
        first, second = clocked.meters()
        assert total(first.by_peer["send"]) == (0, 0)
        assert total([first.single["visit_tokens"]]) == (0, 0)
        assert sum(second.by_peer["total"][0].counts) == 1
        assert second.counters["first"] == 1


def test_the_log_is_summed_up_before_it_is_full(slab_of_two: Slab) -> None:
    meter = WorkerMeter(MeterWriter(slab_of_two, 0), slab_of_two, 0, lambda: 0.5)
    trace = WorkerTrace(TraceWriter(slab_of_two.trace_words(0)), meter)
    steps = 3 * len(meter._log) // 64
    for at in range(steps):
        trace.step(1, 1, 10 * at, 10 * at + 7)
        trace.write()
        assert len(meter.events) <= LEARN_AFTER
    some = read_meter(slab_of_two, 0)
    assert some.threshold == 0.5
    assert 0 < some.counters["busy_ns"] < 7 * steps
    meter.fold()
    found = read_meter(slab_of_two, 0)
    assert found.counters["busy_ns"] == 7 * steps
    assert sum(found.single["batch_rows"].counts) == sum(found.steps[0].counts) == steps


def test_slow_steps_are_told_in_time(slab_of_two: Slab) -> None:
    meter = WorkerMeter(MeterWriter(slab_of_two, 0), slab_of_two, 0, lambda: 0.5)
    trace = WorkerTrace(TraceWriter(slab_of_two.trace_words(0)), meter)
    for at in range(1, 41):
        began = at * FOLD_AFTER_NS // 8
        trace.step(1, 1, began, began + 5)
        trace.write()
        told = read_meter(slab_of_two, 0).counters["busy_ns"] // 5
        assert at - told <= 2 * 8 + 2
    assert told > 0


@pytest.fixture
def slab_of_two() -> Iterator[Slab]:
    with world(slots=2) as running:
        yield running.slab
