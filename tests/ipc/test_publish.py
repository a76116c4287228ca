"""The phases of a publication: what a reader may rely on when it sees a word."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ipc.memory import Memory, memory
from trserve.ipc import publish
from trserve.ipc.baton import Finish, SlotState, pack
from trserve.ipc.rings import Descriptor, Kind, RingProducer

LIVE = pack(9, 1, SlotState.LIVE, Finish.NONE, 0, 1)
DONE = pack(9, 0, SlotState.DONE, Finish.STOP, 0, 1)


class Logged:
    """An array whose stores go into a log, by name."""

    def __init__(self, target: Any, name: str, log: list[tuple[str, Any]]) -> None:
        self.target, self.name, self.log = target, name, log

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, at: Any) -> Any:
        return self.target[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        self.log.append((self.name, at))
        self.target[at] = value


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    log: list[tuple[str, Any]] = []
    monkeypatch.setattr(publish, "ring", lambda fd: log.append(("bell", fd)))
    monkeypatch.setattr(publish, "store_fence", lambda: log.append(("fence", None)))
    return log


def logged_outbox(shared: Memory, log: list[tuple[str, Any]]) -> publish.Outbox:
    """Worker 0's, in a world of three workers."""
    slab = shared.slab()
    slab.baton = Logged(slab.baton, "baton", log)  # type: ignore[assignment]
    slab.closed[0] = Logged(slab.closed[0], "closed", log)  # type: ignore[call-overload]
    rings = {
        worker: RingProducer(Logged(slab.ring_words(0, worker), f"ring {worker}", log))  # type: ignore[arg-type]
        for worker in (1, 2)
    }
    return publish.Outbox(slab, rings, shared.bells, worker=0)


def test_batons_then_closed_then_tails_then_bells(log: list[tuple[str, Any]]) -> None:
    with memory(workers=3) as shared:
        outbox = logged_outbox(shared, log)
        outbox.send(2, Descriptor(Kind.DONE, 1, 5, 1))
        outbox.close(1, 5)
        outbox.store_baton(1, DONE)
        outbox.send(1, Descriptor(Kind.RUN, 0, 6, 1))
        outbox.store_baton(0, LIVE)
        assert log == []  # nothing is visible before the flush
        outbox.flush()
        names = [name for name, _ in log]
        phases = list(dict.fromkeys("ring" if name[:4] == "ring" else name for name in names))
        assert phases == ["fence", "baton", "closed", "ring", "bell"]
        # A fence before the batons (tokens first) and one between them and the tails.
        assert names.index("fence") < names.index("baton")
        last_word = max(at for at, name in enumerate(names) if name in ("baton", "closed"))
        first_ring = next(at for at, name in enumerate(names) if name.startswith("ring"))
        assert "fence" in names[last_word:first_ring]


def test_every_consumer_is_rung_once_a_step(log: list[tuple[str, Any]]) -> None:
    with memory(workers=3) as shared:
        outbox = logged_outbox(shared, log)
        for gen in range(4):
            outbox.send(1, Descriptor(Kind.RUN, gen, gen + 1, 0))
            outbox.close(gen, gen + 1)
        outbox.flush()
        bells = [fd for name, fd in log if name == "bell"]
        assert sorted(bells) == sorted([shared.bells[1], shared.bells[3]])
        tails = [at for name, at in log if name == "ring 1" and at < 24]
        assert len(tails) == 1


def test_nothing_is_published_twice(log: list[tuple[str, Any]]) -> None:
    with memory(workers=3) as shared:
        outbox = logged_outbox(shared, log)
        outbox.store_baton(0, LIVE)
        outbox.close(1, 5)
        outbox.send(1, Descriptor(Kind.RUN, 0, 6, 1))
        outbox.flush()
        log.clear()
        outbox.flush()
        assert [name for name, _ in log if name != "fence"] == []


def test_a_full_ring_is_rung_and_the_rest_goes_out(log: list[tuple[str, Any]]) -> None:
    with memory(slots=1, workers=3) as shared:
        outbox = logged_outbox(shared, log)
        for gen in range(3):  # the ring holds two
            outbox.send(1, Descriptor(Kind.RUN, 0, gen, 0))
        outbox.send(2, Descriptor(Kind.RUN, 0, 9, 0))
        outbox.flush()
        assert {fd for name, fd in log if name == "bell"} == set(shared.bells[1:3])
        slab = shared.slab()
        consumer = shared.consumers(slab, 2)[0]
        assert consumer.drain() == [Descriptor(Kind.RUN, 0, 9, 0)]


def bells(log: list[tuple[str, Any]]) -> list[Any]:
    found = [fd for name, fd in log if name == "bell"]
    log.clear()
    return found


def test_who_streams_may_be_rung_later(log: list[tuple[str, Any]]) -> None:
    """The words are out, and whoever has something to do is rung; the gateway once, when asked."""
    with memory(workers=3) as shared:
        outbox = logged_outbox(shared, log)
        for length in (9, 10):
            outbox.store_baton(0, pack(length, 1, SlotState.LIVE, Finish.NONE, 0, 1))
            outbox.send(1, Descriptor(Kind.RUN, 0, 6, length))
            outbox.flush(hold=True)
            assert ("baton", 0) in log
            assert bells(log) == [shared.bells[1]]
        outbox.ring_held()
        assert bells(log) == [shared.bells[3]]
        outbox.ring_held()
        outbox.flush()
        assert bells(log) == []


def test_whoever_has_something_to_do_is_not_rung_again(log: list[tuple[str, Any]]) -> None:
    """An edge port streams, and requests come back to it."""
    with memory(slots=4, workers=3) as shared:
        outbox = logged_outbox(shared, log)
        outbox.also_ring(2, 0)
        outbox.store_baton(0, LIVE)
        outbox.send(2, Descriptor(Kind.RUN, 0, 6, 1))
        outbox.flush(hold=True)
        assert bells(log) == [shared.bells[2]]
        outbox.ring_held()
        assert bells(log) == [shared.bells[3]]


def test_a_publication_that_holds_nothing_rings_what_was_held(log: list[tuple[str, Any]]) -> None:
    with memory(workers=3) as shared:
        outbox = logged_outbox(shared, log)
        outbox.store_baton(0, LIVE)
        outbox.flush(hold=True)
        assert bells(log) == []
        outbox.flush()
        assert bells(log) == [shared.bells[3]]


def test_an_end_waits_for_nothing(log: list[tuple[str, Any]]) -> None:
    """Whoever streams is then rung with it, once."""
    with memory(slots=4, workers=3) as shared:
        outbox = logged_outbox(shared, log)
        outbox.also_ring(2, 0)
        outbox.store_baton(0, LIVE)
        outbox.flush(hold=True)
        assert bells(log) == []
        outbox.store_baton(1, DONE)
        outbox.close(1, 5)
        outbox.flush(hold=True)
        assert sorted(bells(log)) == sorted([shared.bells[2], shared.bells[3]])
        outbox.ring_held()
        assert bells(log) == []
