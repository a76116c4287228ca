"""What workers note while requests travel: each handoff at both ends, steps with their rows."""

from __future__ import annotations

from collections import Counter

from tests.workers.fakes import FakeRouter, World, hash_route, router_class, world
from trserve.ipc.baton import Finish
from trserve.ipc.trace import Event, EventKind, TraceReader, TraceWriter
from trserve.router_lib.base import RequestView
from trserve.workers.tracing import WorkerTrace

PROMPT = [3, 1, 4, 1, 5]


def traced(running: World) -> list[TraceReader]:
    words = [running.slab.trace_words(worker.index) for worker in running.workers]
    for worker, ring in zip(running.workers, words, strict=True):
        worker.table.trace = WorkerTrace(TraceWriter(ring))
    return [TraceReader(ring) for ring in words]


def of(kind: EventKind, events: list[Event]) -> list[tuple[int, int, int]]:
    return [(event.slot, event.gen, event.value) for event in events if event.kind == kind]


def test_every_handoff_is_sent_received_and_resumed() -> None:
    router = router_class(hash_route(1, 50))
    with world(router=router, slots=4) as running:
        readers = traced(running)
        slots = [running.submit([*PROMPT, n], limit=30) for n in range(4)]
        running.run(*slots)
        sent, received = Counter(), Counter()
        for reader in readers:
            events = reader.read()
            assert reader.lost == 0
            came = of(EventKind.HANDOFF_RECEIVED, events)
            assert Counter(of(EventKind.RESUMED, events)) == Counter(came)
            sent.update(of(EventKind.HANDOFF_SENT, events))
            received.update(came)
        assert sent == received
        hops = {slot.index: running.outcome(slot).hops for slot in slots}
        assert sum(hops.values()) > 0
        assert sum(sent.values()) == sum(hops.values())
        assert set(sent.values()) == {1}


def test_a_life_begins_and_ends_once() -> None:
    with world(router=router_class(hash_route(1, 30)), slots=2) as running:
        readers = traced(running)
        slot = running.submit(PROMPT, limit=20)
        running.run(slot)
        events = [event for reader in readers for event in reader.read()]
        outcome = running.outcome(slot)
        admitted, finished = of(EventKind.ADMITTED, events), of(EventKind.FINISHED, events)
        assert admitted == [(slot.index, slot.gen, len(PROMPT))]
        assert finished == [(slot.index, slot.gen, outcome.finish)]
        assert outcome.finish in (Finish.STOP, Finish.LENGTH)


def test_one_that_ends_before_its_step_is_no_longer_waited_for() -> None:
    """A request comes, but all rows are taken, and it is cancelled: its note is given up."""
    router = router_class(lambda model, row: int(model == 0))
    with world(router=router, slots=4, max_rows=1) as running:
        traced(running)
        slots = [running.submit([*PROMPT, n], limit=60) for n in range(3)]
        large = running.workers[1].table.trace
        assert large is not None
        for _ in range(8):
            for worker in running.workers:
                worker.turn()
            if large.unresumed:
                break
        assert large.unresumed, "some must still wait for a row"
        for slot in slots:
            running.slots.cancel(slot)
        running.run(*slots)
        extra = running.submit([9, 9], limit=12)
        running.run(extra)
        assert large.unresumed == {}


class Doorman(FakeRouter):
    """The first model's worker never takes a step."""

    def admit(self, req: RequestView) -> int:
        return 1


def test_who_only_says_where_requests_go_remembers_none_of_them() -> None:
    with world(router=Doorman, slots=4) as running:
        traced(running)
        for number in range(300):
            slot = running.submit(PROMPT, limit=8, tops=1 if number % 2 else None)
            running.run(slot)
            running.slots.release(slot)
            assert running.slots.collect()
        for worker in running.workers:
            assert worker.table.trace is not None
            assert len(worker.table.trace.unresumed) <= 4
            assert len(worker.cycle._arrivals.annotated) <= 4
