"""Suffixes that links put on an (emulated) device: found for the right tokens, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_int32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ipc.device.worlds import World as Ends
from tests.ipc.device.worlds import relay
from tests.ipc.memory import memory
from tests.workers.fakes import HashRunner, World, hash_route, reference, router_class
from trserve.ipc.baton import Finish
from trserve.ipc.device.cpu_device import CpuDevice
from trserve.ipc.device.host_mapped import HostMappedMedium
from trserve.ipc.device.inbox_medium import InboxMedium
from trserve.workers.suffix_views import ViewedRows

MEDIA = {
    "cuda_ipc": InboxMedium,
    "host_mapped": HostMappedMedium,
}


class ReadingRunner(HashRunner):
    """Takes ids from where the step says that they lie, and nothing from the row for them."""

    def forward(self, inputs, also=None):
        if inputs.sources is not None:
            for index in range(inputs.num_tokens):
                if address := int(inputs.sources.addresses[index]):
                    assert c_int32.from_address(address).value == inputs.token_ids[index]
                    inputs.token_ids[index] = c_int32.from_address(address).value
            assert inputs.sources.hold()
        return super().forward(inputs, also)


@contextmanager
def linked_world(kind: str, *, slots: int = 6, **settings) -> Iterator[tuple[World, list]]:
    with memory(slots=slots, row_tokens=64, workers=3) as shared:
        slab = shared.slab()
        # Host memory is registered once for each process, and so for each device.
        media = [MEDIA[kind](slab, index, CpuDevice()) for index in range(3)]
        if kind == "cuda_ipc":
            device = CpuDevice()  # in one process, which cannot open its own handles
            media = [InboxMedium(slab, index, device) for index in range(3)]
            relay(media, [offer for medium in media for offer in medium.offers()])
        shared.medium = lambda slab: Ends(media)
        w = World(shared, runner=ReadingRunner, **settings)
        views = [
            ViewedRows(worker.slab, worker.index, worker.table, medium, w.max_tokens)
            for worker, medium in zip(w.workers, media, strict=True)
        ]
        yield w, views
        for medium in media:
            medium.close()


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(list(MEDIA)),
    prompts=st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=20), min_size=1, max_size=6),
    share=st.sampled_from([10, 50, 100]),
    mode=st.sampled_from(["off", "idle"]),
    max_tokens=st.sampled_from([8, 64]),
)
def test_outcomes_are_those_of_a_plain_loop(kind, prompts, share, mode, max_tokens):
    decide = hash_route(2, share)
    settings = {"router": router_class(decide), "early_prefill": mode, "max_tokens": max_tokens}
    with linked_world(kind, **settings) as (w, views):
        slots = [w.submit(prompt, limit=40) for prompt in prompts]
        w.run(*slots)
        for slot, prompt in zip(slots, prompts, strict=True):
            assert w.outcome(slot) == reference(prompt, limit=40, models=3, decide=decide)
        w.check_nothing_held()
        for each in views:
            assert each.viewed == each.came, "the emulated device is never late"


@pytest.mark.parametrize("kind", MEDIA)
def test_handoffs_are_found_once_each(kind):
    decide = hash_route(2, 50)
    with linked_world(kind, router=router_class(decide)) as (w, views):
        slots = [w.submit([n, 5, 6], limit=30) for n in range(6)]
        w.run(*slots)
        hops = sum(w.outcome(slot).hops for slot in slots)
        assert 0.5 * hops < sum(each.viewed for each in views) <= hops


def test_what_left_before_its_step_is_not_looked_for():
    with linked_world("host_mapped", router=router_class(hash_route(2, 100))) as (w, views):
        slot = w.submit([1, 2, 3], limit=40)
        w.workers[0].turn()
        target = w.workers[w.baton(slot).owner]
        assert target is not w.workers[0]
        target.take_in(target.drain())
        fresh = views[target.index]._fresh
        assert list(fresh) == [slot.index]
        target.table.finish(fresh[slot.index], Finish.ABORT)
        other = w.submit([4, 5], limit=8, entry=target.index, pinned=True)
        target.turn()
        assert views[target.index]._fresh == {} and views[target.index].came == 0
        w.run(slot, other)
        w.check_nothing_held()
