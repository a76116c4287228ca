"""The worker's loop in a thread of its own: it wakes, sleeps, counts what its belt finds, ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.workers.fakes import (
    HashRunner,
    SubmittingHashRunner,
    hash_route,
    reference,
    router_class,
    world,
)
from tests.workers.running import LONG_S, Running
from trserve.gateway.slots import Slot
from trserve.ipc.doorbell import ring, silence
from trserve.ipc.links import ShmMedium
from trserve.ipc.rings import Descriptor, Kind
from trserve.ipc.tally import read_tally
from trserve.ipc.trace import TraceWriter
from trserve.workers import loop as loop_module
from trserve.workers.tracing import WorkerTrace

ROUTE = hash_route(1, 40)


def loops(runner: type[HashRunner] = HashRunner, **settings: Any) -> Iterator[Running]:
    with world(router=router_class(ROUTE), slots=8, runner=runner, **settings) as w:
        running = Running(w)
        yield running
        running.close()


@pytest.fixture
def running() -> Iterator[Running]:
    yield from loops()


@pytest.fixture
def submitting() -> Iterator[Running]:
    yield from loops(SubmittingHashRunner)


@pytest.mark.parametrize("which", ["running", "submitting"])
def test_requests_go_through_two_loops(which: str, request: pytest.FixtureRequest) -> None:
    running: Running = request.getfixturevalue(which)
    w = running.world
    running.start()
    prompts = [[n, n + 1, n + 2] for n in range(8)]
    slots = [w.submit(prompt, limit=40) for prompt in prompts]
    running.until(lambda: running.done(*slots))
    for slot, prompt in zip(slots, prompts, strict=True):
        assert w.outcome(slot) == reference(prompt, limit=40, models=2, decide=ROUTE)
        w.slots.release(slot)

    def collected() -> bool:
        w.slots.collect()
        return w.slots.num_free == 8

    running.until(collected)
    assert [loop.belt_finds for loop in running.loops] == [0, 0]


def test_what_was_published_before_the_start_is_found(running: Running) -> None:
    w = running.world
    slots = [w.submit([n], limit=10) for n in range(3)]
    for worker in w.workers:
        worker.drain()
    for bell in w.memory.bells:
        silence(bell)
    running.start()
    running.until(lambda: running.done(*slots))


def test_a_full_ring_makes_the_worker_rescan(running: Running) -> None:
    w = running.world
    slots = [w.submit([n], limit=10) for n in range(2)]
    for worker in w.workers:
        worker.drain()
    producer = ShmMedium(w.slab).sender(w.memory.layout.gateway, 0)
    assert not producer.push([Descriptor(Kind.RUN, 0, 0, 0)] * 17)  # the ring holds 16
    ring(w.memory.bells[0])
    running.start()
    running.until(lambda: running.done(*slots))


def test_a_new_epoch_makes_the_worker_rescan(running: Running) -> None:
    """What a worker that was reaped had still to send is lost with it."""
    w = running.world
    running.start()
    running.until(lambda: all(words.get("heartbeat") for words in w.slab.workers))
    slots = [w.submit([n], limit=10, pinned=True) for n in range(2)]
    running.until(lambda: running.done(*slots))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(w.slots._outbox, "send", lambda worker, descriptor: None)
        unhinted = w.submit([5], limit=10, pinned=True)
    time.sleep(0.1)
    assert not running.done(unhinted), "the test must lose the hint"
    w.slab.epoch += 1
    ring(w.memory.bells[0])
    running.until(lambda: running.done(unhinted))


@pytest.mark.parametrize("rung", [False, True])
def test_what_the_belt_finds_is_counted(
    running: Running, rung: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what no bell announced: one that rings while the belt ends the sleep is no miss."""
    w, loop = running.world, running.loops[0]
    slot = w.submit([1, 2, 3], limit=5)
    silence(w.memory.bells[0])
    if rung:
        ring(w.memory.bells[0])
    loop._take_in(by_belt=True)
    assert list(w.workers[0].table.runnable) == [slot.index]
    assert loop.belt_finds == (0 if rung else 1)
    running.start()


def test_a_missed_bell_costs_one_belt_and_no_request(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "BELT_S", 0.05)
    w = running.world
    monkeypatch.setattr("trserve.ipc.publish.ring", lambda bell: None)
    running.start()
    slot = w.submit([1, 2, 3], limit=20)
    deadline = time.monotonic() + LONG_S
    while not running.done(slot):
        assert time.monotonic() < deadline
        os.sched_yield()
    assert w.outcome(slot) == reference([1, 2, 3], limit=20, models=2, decide=ROUTE)
    assert sum(loop.belt_finds for loop in running.loops) > 0


def test_the_loop_ends_with_the_launcher(running: Running) -> None:
    running.start()
    os.close(running.launcher_end)  # readable, as the pidfd of a process that ended
    running.join()
    running.launcher_end = os.dup(running.launcher)


def test_an_idle_worker_sleeps(running: Running) -> None:
    """Nothing to do is one poll a second, not a spin."""
    polls: list[float] = []
    loop = running.loops[0]
    real = loop._poller

    class Counted:
        def poll(self, timeout: float) -> list[tuple[int, int]]:
            polls.append(timeout)
            return real.poll(timeout)

    loop._poller = Counted()  # type: ignore[assignment]
    slot = running.world.submit([1, 2], limit=4, pinned=True)
    running.start()
    running.until(lambda: running.done(slot))
    steps = len(running.world.workers[0].runner.batches)
    assert polls[-1] >= 0.0
    assert len(polls) <= steps + 4


def rung(running: Running) -> bool:
    return silence(running.world.memory.bells[-1])


def test_the_gateway_is_rung_once_the_next_step_is_under_way(submitting: Running) -> None:
    """Not before, as it would cost the step's time; by then the steps before are noted."""
    w, loop = submitting.world, submitting.loops[0]
    worker = w.workers[0]
    slot = w.submit([1, 2, 3], limit=15, pinned=True, eos_token_ids=())
    rung(submitting)
    seen: list[tuple[int, bool, int]] = []
    computed: list[int] = []
    inner = worker.runner.on_submitted  # type: ignore[attr-defined]

    def on_submitted() -> None:
        inner()
        timed = int(read_tally(w.slab, 0).steps.sum())
        seen.append((w.baton(slot).length, rung(submitting), timed))
        computed.append(worker.table.runnable[slot.index].num_computed)

    worker.runner.on_submitted = on_submitted  # type: ignore[attr-defined]
    for length in range(4, 15):
        assert loop.turn()
        assert w.baton(slot).length == length, "published at once"
        assert not rung(submitting), "but no bell yet"
    assert loop.turn()
    assert submitting.done(slot) and rung(submitting), "the end is nothing to wait with"
    # Twice each step. The first, which had the prompt, is not timed.
    assert seen[::2] == [(3 + n, n > 0, max(0, n - 1)) for n in range(12)]
    assert not any(bell for _, bell, _ in seen[1::2])
    assert computed[:6] == [3, 3, 4, 4, 5, 5], "before rows are known, a step is counted meanwhile"
    submitting.start()


def test_what_is_to_be_said_is_said_before_it_is_much(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a worker that hands on whatever comes, and something always comes."""
    w, loop = running.world, running.loops[0]
    worker = w.workers[0]
    monkeypatch.setattr(loop_module, "QUIET_TURNS", 10)
    monkeypatch.setattr(worker.cycle._arrivals._routing, "asks_on_arrival", True)
    monkeypatch.setattr(worker.cycle._arrivals._routing, "asks_admit", True)
    monkeypatch.setattr(worker.router, "admit", lambda request: 1)
    trace = worker.table.trace = WorkerTrace(TraceWriter(w.slab.trace_words(0)))
    most = 0
    for _ in range(50):
        slot = w.submit([1, 2, 3], limit=4, eos_token_ids=())
        assert loop.turn()
        while w.baton(slot).owner == 0:
            assert loop.turn()
        most = max(most, len(trace._remembered))
        while not running.done(slot):
            w.workers[1].turn()
        assert loop.turn()
        w.slots.release(slot)
        assert w.slots.collect()
    assert 0 < most <= 10
    running.start()


def test_where_no_step_follows_the_gateway_is_rung_at_once(submitting: Running) -> None:
    """A request that left leaves nothing to do here."""
    w, loop = submitting.world, submitting.loops[0]
    w.workers[0].router.decide = lambda row: 1  # type: ignore[attr-defined]
    slot = w.submit([1, 2, 3], limit=9)
    rung(submitting)
    assert loop.turn()
    assert w.baton(slot).owner == 1 and not w.workers[0].table.runnable
    assert rung(submitting)
    submitting.start()


def test_a_closed_gate_does_not_keep_the_gateway_waiting(submitting: Running) -> None:
    """One step held the bell, and before the next the gate closes."""
    w, loop = submitting.world, submitting.loops[0]
    slot = stepped_once(submitting)
    loop._gate = Closed()  # type: ignore[assignment]
    assert loop.turn()
    assert rung(submitting)
    assert w.baton(slot).length == 4
    loop._gate = w.workers[0].gate
    submitting.start()


def stepped_once(running: Running, **options: Any) -> Slot:
    """A request that goes on, and whose last token the gateway was not rung for yet."""
    slot = running.world.submit([1, 2, 3], limit=9, pinned=True, eos_token_ids=(), **options)
    rung(running)
    assert running.loops[0].turn() and not rung(running)
    return slot


def test_a_turn_that_submits_nothing_keeps_nobody_waiting(submitting: Running) -> None:
    loop = submitting.loops[0]
    stepped_once(submitting)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submitting.world.workers[0].cycle, "_step", lambda now_ns: None)
        assert loop.turn()
    assert rung(submitting)
    submitting.start()


def test_the_gateway_is_rung_before_somebody_elses_code_runs(
    submitting: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that looks at what arrives, say; and before the worker looks around."""
    w, loop = submitting.world, submitting.loops[0]
    stepped_once(submitting)
    arrivals, seen = w.workers[0].cycle._arrivals, list[bool]()
    monkeypatch.setattr(arrivals._routing, "asks_on_arrival", True)
    monkeypatch.setattr(arrivals, "_ask", lambda request: seen.append(rung(submitting)))
    w.submit([4, 5], limit=9, pinned=True)
    silence(w.memory.bells[-1])
    assert loop.turn()
    assert seen == [True]
    rung(submitting)
    loop._rescan()
    assert rung(submitting), "for the step that followed"
    submitting.start()


def test_the_gateway_is_rung_before_a_control_message_is_heeded(submitting: Running) -> None:
    loop = submitting.loops[0]
    stepped_once(submitting)
    seen: list[bool] = []

    def on_control() -> bool:
        seen.append(rung(submitting))
        os.read(submitting.control, 1)
        return True

    heeds, loop._on_control = loop._on_control, on_control
    os.write(submitting.say, b"x")
    assert loop.turn()
    assert seen == [True]
    loop._on_control = heeds
    submitting.start()


def test_the_last_token_before_the_end_is_rung_for(submitting: Running) -> None:
    loop = submitting.loops[0]
    slot = stepped_once(submitting)
    turns = iter([True, False])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "turn", lambda: next(turns))
        loop._outbox.store_baton(slot.index, submitting.world.slab.baton[slot.index])
        loop._outbox.flush(hold=True)
        loop.run()
    assert rung(submitting)
    submitting.start()


class Closed:
    """A gate that stays closed for ten milliseconds at a time."""

    def wait_s(self, buffered: int, now_ns: int) -> float:
        return 0.01

    def rest(self, buffered: int) -> None:
        """Nothing to note."""

    def note_step(self, nanoseconds: int) -> None:
        """Nothing to note."""
