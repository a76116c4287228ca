"""Prompts computed before their request comes: by whom, when, and that nothing else changes."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.fakes import World, hash_token, reference, router_class, world
from trserve.ipc.baton import Finish, SlotState
from trserve.ipc.layout import WORKER_WORDS
from trserve.ipc.rings import Kind
from trserve.workers import early_prefill
from trserve.workers.states import State

PROMPT = list(range(3, 43))


def to_peer_after(length):
    """Model 0 sends a row to its peer once it is ``length`` long; the peer sends it back."""
    return lambda model, row: int(model == 1 or len(row) > length)


def word(w: World, index: int, name: str) -> int:
    return w.slab.workers[index].words[WORKER_WORDS.index(name)]


def test_the_first_arrival_finds_the_prompt_computed():
    with world(router=router_class(to_peer_after(42)), early_prefill="idle") as w:
        slot = w.submit(PROMPT, limit=50)
        peer = w.workers[1]
        peer.turn()
        assert peer.runner.batches == [[len(PROMPT)]]
        request = peer.table.resident[slot.index]
        assert (request.state, request.num_computed) == (State.PENDING, len(PROMPT))
        assert not peer.table.ahead
        peer.runner.batches.clear()
        w.run(slot)
        assert max(max(batch) for batch in peer.runner.batches) == 2  # suffixes only
        assert word(w, 1, "early_tokens") == word(w, 1, "early_tokens_used") == len(PROMPT)
        assert w.outcome(slot) == reference(PROMPT, limit=50, models=2, decide=to_peer_after(42))
        w.check_nothing_held()


def test_what_is_here_goes_first_and_chunks_are_short(monkeypatch):
    monkeypatch.setattr(early_prefill, "CHUNK", 16)
    with world(router=router_class(lambda model, row: 0), early_prefill="idle") as w:
        peer = w.workers[1]
        own = w.submit([5, 6], limit=6, entry=1, pinned=True)
        other = w.submit(PROMPT, limit=60)
        for _ in range(4):
            peer.turn()
        assert [1] in peer.runner.batches and not any(b[0] > 2 for b in peer.runner.batches)
        assert w.baton(own).state is SlotState.DONE
        peer.runner.batches.clear()
        for _ in range(3):
            peer.turn()
        assert peer.runner.batches == [[16], [16], [8]]
        w.run(other)


def test_always_computes_beside_what_is_here():
    with world(router=router_class(lambda model, row: 0), early_prefill="always") as w:
        own = w.submit([5, 6], limit=30, entry=1, pinned=True)
        w.submit(PROMPT, limit=60)
        w.workers[1].turn()
        assert w.workers[1].runner.batches == [[len(PROMPT)], [2]]
        assert w.baton(own).state is SlotState.LIVE


def test_each_forward_is_told_when_it_was_decided(monkeypatch):
    """Emulated steps end so long after it: one of long ago would take no time."""
    monkeypatch.setattr(early_prefill, "CHUNK", 16)
    with world(router=router_class(lambda model, row: 0), early_prefill="always") as w:
        w.submit([5, 6], limit=30, entry=1, pinned=True)
        w.submit(PROMPT, limit=60)
        peer, told = w.workers[1], []
        forward = peer.runner.forward
        peer.runner.forward = lambda *inputs: (
            told.append((peer.runner.began_ns, time.monotonic_ns())),
            forward(*inputs),
        )[1]
        began = time.monotonic_ns()
        for turn in range(3):
            peer.turn(time.monotonic_ns())
            assert len(told) == 2 * (turn + 1)
        moments = [began, *(moment for pair in told for moment in pair)]
        assert moments == sorted(moments)


def test_a_pinned_request_is_nobody_elses_to_compute():
    with world(early_prefill="idle") as w:
        slot = w.submit(PROMPT, limit=50, pinned=True)
        assert w.slab.sent[slot.index] == 1
        w.run(slot)
        assert w.workers[1].runner.batches == []


def test_nobody_loses_blocks_for_it():
    """Three quarters of the blocks may go to what might come; then it is left."""
    with world(num_blocks=16, block_size=4, early_prefill="idle", row_tokens=80) as w:
        slots = [w.submit([100 + i, *PROMPT[:31]], limit=40) for i in range(3)]
        peer = w.workers[1]
        for _ in range(5):
            peer.turn()
        assert not peer.table.ahead
        assert sum(bool(r.num_blocks) for r in peer.table.resident.values()) == 1
        assert peer.table.kv_drops == 0
        w.run(*slots)
        w.check_nothing_held()


@pytest.mark.parametrize("turns_before", [0, 1])
def test_a_cancelled_request_is_computed_no_further(turns_before, monkeypatch):
    monkeypatch.setattr(early_prefill, "CHUNK", 8)
    with world(early_prefill="idle") as w:
        slot = w.submit(PROMPT, limit=60)
        peer = w.workers[1]
        for _ in range(turns_before):
            peer.turn()
        w.slots.cancel(slot)
        peer.turn()
        computed = sum(sum(batch) for batch in peer.runner.batches)
        assert computed == 8 * turns_before
        w.run(slot)
        assert w.outcome(slot).finish is Finish.ABORT
        w.check_nothing_held()


def test_hints_that_are_late_or_doubled_change_nothing():
    with world(early_prefill="idle") as w:
        slot = w.submit(PROMPT, limit=44)
        peer = w.workers[1]
        (hint,) = peer.drain()
        assert hint.kind is Kind.PREFILL
        w.workers[0].turn()
        peer.take_in([hint, hint])
        w.run(slot)
        peer.take_in([hint])
        w.check_nothing_held()
        assert w.slab.closed[1][slot.index] == slot.gen


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(3, 90), min_size=1, max_size=40), min_size=1, max_size=6),
    mode=st.sampled_from(["idle", "always"]),
    share=st.integers(2, 5),
    blocks=st.integers(20, 60),
    caching=st.booleans(),
)
def test_outcomes_are_those_of_a_plain_loop(prompts, mode, share, blocks, caching):
    decide = lambda model, row: int(sum(row) % share == 0)  # noqa: E731
    settings_ = {"early_prefill": mode, "num_blocks": blocks, "prefix_caching": caching}
    with world(slots=6, router=router_class(decide), block_size=4, **settings_) as w:
        slots = [w.submit(prompt, limit=len(prompt) + 12) for prompt in prompts]
        w.run(*slots)
        for slot, prompt in zip(slots, prompts, strict=True):
            expected = reference(
                prompt, limit=len(prompt) + 12, models=2, decide=decide, token=hash_token
            )
            assert w.outcome(slot) == expected
        w.check_nothing_held()
