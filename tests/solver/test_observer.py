"""What the solver takes from the workers' sums and the batons."""

from __future__ import annotations

import pytest

from tests.solver.loop import new_slab, set_live, write_step
from trserve.ipc.slab import WorkerStatus
from trserve.ipc.tally import TallyWriter
from trserve.sched.estimator import StepEvent
from trserve.solver import observer as module
from trserve.solver.observer import Observer


@pytest.fixture
def slab():
    with new_slab(models=3, slots=5) as slab:
        yield slab


def test_nothing_happened(slab):
    look = Observer(slab).look()
    assert look == (0, 0, False, True, [])


def test_steps_are_told_once(slab):
    write_step(slab, StepEvent(1, 9.0, 4, (1, 2, 1), (1, 2, 0)))  # before anybody looked
    observer = Observer(slab)
    write_step(slab, StepEvent(0, 6.0, 3, (2, 1, 0), (2, 0, 0)))
    write_step(slab, StepEvent(0, 8.0, 3, (3, 0, 0), (3, 0, 0)))
    write_step(slab, StepEvent(2, 30.0, 1, (1, 0, 0), (1, 0, 0)))
    look = observer.look()
    assert (look.tokens, look.moved) == (6, True)
    nothing = (0, 0, 0)
    assert look.events == [
        StepEvent(0, 0.0, 0, [5, 1, 0], [5, 0, 0]),
        StepEvent(0, 7.0, 3, nothing, nothing, steps=2),
        StepEvent(2, 0.0, 0, [1, 0, 0], [1, 0, 0]),
        StepEvent(2, 30.0, 1, nothing, nothing),
    ]
    assert not observer.look().moved


def test_only_published_and_unfinished_requests_are_live(slab):
    observer = Observer(slab)
    for count in (5, 2, 0):
        set_live(slab, count)
        assert observer.look().live == count


def test_a_worker_that_is_not_up_is_seen(slab):
    observer = Observer(slab)
    slab.workers[2].set("status", WorkerStatus.RESTARTING)
    assert not observer.look().complete


def test_sums_that_shrank_are_nobodys_report(slab):
    write_step(slab, StepEvent(0, 6.0, 3, (2, 1, 0), (2, 0, 0)))
    observer = Observer(slab)
    slab.tally_words(0)[0] = 1
    assert not observer.look().moved
    TallyWriter(slab, 0).stayed(4, 4)
    assert observer.look().tokens == 4


def test_sums_in_the_midst_of_a_steps_are_read_again(slab, monkeypatch):
    """``steps`` is written before ``nanoseconds``: half of it would be a step of no time."""
    observer = Observer(slab)
    reads = []

    def read(slab, worker, read_tally=module.read_tally):
        reads.append(worker)
        if len(reads) == 1:
            slab.tally_words(0)[2 * 3 + 2] += 1
        found = read_tally(slab, worker)
        if len(reads) == 1:
            slab.tally_words(0)[2 * 3 + 6 + 2] += 5_000_000
        return found

    monkeypatch.setattr(module, "read_tally", read)
    (event,) = observer.look().events
    assert (event.width, event.duration_ms) == (2, 5.0)
