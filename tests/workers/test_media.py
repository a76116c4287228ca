"""Whole requests over a medium that is no ring: the workers need no change for it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ipc.socket_medium import SocketMedium
from tests.workers.fakes import World, hash_route, reference, router_class, world
from trserve.ipc.layout import Layout


@contextmanager
def socket_world(buffer_bytes: int | None = None, **settings) -> Iterator[World]:
    medium = SocketMedium(Layout(slots=6, row_tokens=64, workers=3), buffer_bytes)
    try:
        with world(slots=6, workers=3, medium=lambda slab: medium, **settings) as w:
            yield w
    finally:
        medium.close()


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=20), min_size=1, max_size=6),
    share=st.sampled_from([10, 50, 100]),
    mode=st.sampled_from(["off", "idle"]),
)
def test_outcomes_are_those_of_a_plain_loop(prompts, share, mode):
    decide = hash_route(2, share)
    with socket_world(router=router_class(decide), early_prefill=mode) as w:
        slots = [w.submit(prompt, limit=40) for prompt in prompts]
        w.run(*slots)
        for slot, prompt in zip(slots, prompts, strict=True):
            assert w.outcome(slot) == reference(prompt, limit=40, models=3, decide=decide)
        w.check_nothing_held()


@pytest.mark.parametrize("lost", [1, 3])
def test_pushes_that_find_no_room_lose_nothing(lost, monkeypatch):
    """Every so many pushes are refused: the other end rescans, and all requests end as ever."""
    from tests.ipc.socket_medium import SocketSender

    pushes, push = [0], SocketSender.push

    def failing(self, descriptors):
        pushes[0] += 1
        if pushes[0] % lost:
            return push(self, descriptors)
        return push(self, [descriptors[0]] * 10_000)  # more than any socket takes

    monkeypatch.setattr(SocketSender, "push", failing)
    decide = hash_route(2, 50)
    with socket_world(router=router_class(decide)) as w:
        slots = [w.submit([n, 5, 6], limit=30) for n in range(6)]
        for _ in range(2000):
            for worker in w.workers:
                if any(ring.overflowed() for ring in worker.consumers):
                    worker.table.rescan()
                worker.turn()
        w.run(*slots)
        for n, slot in enumerate(slots):
            assert w.outcome(slot) == reference([n, 5, 6], limit=30, models=3, decide=decide)
        w.check_nothing_held()
