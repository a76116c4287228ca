"""KV pressure: who gives blocks up, that somebody always goes on, that no output changes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.workers.fakes import EOS, hash_route, hash_token, reference, router_class, stay, world
from trserve.ipc.baton import Finish, SlotState
from trserve.workers.memory import fit_to_memory
from trserve.workers.states import State


def endless(model: int, row: Sequence[int]) -> int:
    token = hash_token(model, row)
    return token + 1 if token == EOS else token


@given(
    prompts=st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=20), min_size=1, max_size=6),
    blocks=st.integers(6, 14),
    share=st.sampled_from([0, 20, 60]),
    max_tokens=st.sampled_from([4, 8, 64]),
)
def test_pressure_changes_no_output(
    prompts: list[list[int]], blocks: int, share: int, max_tokens: int
) -> None:
    """Pools that hold one row of 24 tokens (6 blocks), or two, but not all."""
    decide = hash_route(1, share)
    settings = {"num_blocks": blocks, "max_rows": 4, "max_tokens": max_tokens}
    with world(slots=6, router=router_class(decide), token=endless, **settings) as w:
        slots = [w.submit(prompt, limit=24) for prompt in prompts]
        w.run(*slots)
        for slot, prompt in zip(slots, prompts, strict=True):
            assert w.outcome(slot) == reference(
                prompt, limit=24, models=2, decide=decide, token=endless
            )
        w.check_nothing_held()


def test_a_request_that_cannot_fit_alone_ends_with_length() -> None:
    with world(num_blocks=3, token=endless) as w:
        big, small = w.submit([1] * 5, limit=40), w.submit([2] * 5, limit=12)
        w.run(big, small)
        assert w.baton(big).finish is Finish.LENGTH
        assert w.baton(big).length == 12 + 1  # 12 tokens of KV give the 13th token
        assert w.baton(small).length == 12
        w.check_nothing_held()


def test_a_prompt_that_cannot_fit_ends_and_the_others_go_on() -> None:
    with world(num_blocks=3, token=endless) as w:
        big, small = w.submit([1] * 30, limit=40), w.submit([2] * 5, limit=9)
        w.run(big, small)
        assert (w.baton(big).finish, w.baton(big).length) == (Finish.LENGTH, 30)
        assert (w.baton(small).finish, w.baton(small).length) == (Finish.LENGTH, 9)


def test_pending_requests_give_up_first_longest_away_before_others() -> None:
    """Two are at the peer; a third needs one block more than are free."""
    decide = lambda model, row: 1 if row[0] < 3 and model == 0 else 0  # noqa: E731
    with world(num_blocks=6, token=endless, router=router_class(decide)) as w:
        worker = w.workers[0]
        first, second = w.submit([1] * 6, limit=30), w.submit([2] * 6, limit=30)
        worker.turn()
        third = w.submit([9] * 12, limit=30)
        held = {slot: worker.table.resident[slot] for slot in (first.index, second.index)}
        assert {request.state for request in held.values()} == {State.PENDING}
        assert held[first.index].last_store_ns <= held[second.index].last_store_ns
        held[second.index].last_store_ns -= 10**9  # it has been away longer
        worker.turn()
        assert held[second.index].num_blocks == 0
        assert held[first.index].num_blocks == 2
        assert w.baton(third).length == 13


def test_the_newest_running_one_gives_up_never_an_older_one() -> None:
    with world(num_blocks=5, token=endless, max_rows=8) as w:
        worker = w.workers[0]
        old, middle, new = (w.submit([n] * 5, limit=30) for n in range(3))
        worker.turn()  # only two of the three fit
        state = {slot: worker.table.resident[slot.index] for slot in (old, middle, new)}
        assert [state[slot].num_blocks for slot in (old, middle, new)] == [2, 2, 0]
        for _ in range(12):
            worker.turn()
            assert state[old].num_blocks >= 2
        assert w.baton(old).length == 18
        w.run(old, middle, new)
        # Each at last has all 20 tokens of KV, which give the 21st token.
        assert [w.baton(slot).length for slot in (old, middle, new)] == [21] * 3


def test_short_suffixes_take_no_blocks_from_an_older_prompt() -> None:
    """They go first in a step, and would have it computed anew for ever."""
    with world(num_blocks=7, token=endless, max_tokens=18, slots=4) as w:
        worker = w.workers[0]
        prompt = w.submit([5] * 26, limit=28)
        worker.turn()
        request = worker.table.resident[prompt.index]
        assert request.num_computed == 18
        for n in range(3):
            w.submit([n] * 9, limit=12)
        worker.turn()
        assert request.num_computed > 18
        w.run(prompt)
        assert w.outcome(prompt).row[:26] == [5] * 26
        assert w.baton(prompt).length == 28


def test_nobody_loses_blocks_for_one_that_does_not_fit_anyway() -> None:
    with world(num_blocks=6, token=endless, slots=3) as w:
        worker = w.workers[0]
        old = w.submit([1] * 15, limit=40)
        worker.turn()
        middle, new = w.submit([2] * 12, limit=40), w.submit([3] * 3, limit=40)
        worker.turn()
        held = worker.table.resident
        assert [held[slot.index].num_blocks for slot in (old, middle, new)] == [4, 0, 1]
        plan = [(held[old.index], 1), (held[middle.index], 12)]
        assert fit_to_memory(plan, worker.table) == (plan[:1], None)
        assert held[new.index].num_blocks == 1


def test_somebody_goes_on_when_older_ones_outside_the_plan_hold_everything() -> None:
    with world(num_blocks=4, token=endless, max_rows=1, max_tokens=14) as w:
        worker = w.workers[0]
        prompt = w.submit([1] * 15, limit=16)
        worker.turn()
        assert worker.pool.num_available == 0
        short = w.submit([2] * 2, limit=6)
        w.run(short, prompt)
        assert w.baton(short).length == 6
        assert w.baton(prompt).length == 16
        assert w.baton(prompt).state is SlotState.DONE


def test_who_gave_its_kv_up_finds_its_prefix_again_and_not_before_there_is_room() -> None:
    """Three rows of 400 common tokens; the second newest block is one too many."""
    prefix = [5] * 400
    with world(
        num_blocks=115, token=endless, max_rows=8, slots=4, row_tokens=600, max_tokens=512
    ) as w:
        worker = w.workers[0]
        slots = [w.submit([*prefix, 1, 1, 1, 1], limit=424)]
        worker.turn()
        slots += [w.submit(prefix + [n] * 4, limit=440) for n in (2, 3)]
        w.run(*slots)
        for n, (slot, limit) in enumerate(zip(slots, (424, 440, 440), strict=True), 1):
            expected = reference(
                prefix + [n] * 4, limit=limit, models=2, decide=stay, token=endless
            )
            assert w.outcome(slot).row == expected.row
        first, *others = sorted(rows for step in worker.runner.batches for rows in step)[::-1]
        assert first == 404 and max(others) < 20, "a whole row was computed again"
        assert 1 <= worker.table.kv_drops <= 3
        w.check_nothing_held()


def test_more_streams_than_rows_take_turns() -> None:
    """Steps have four rows: none of twelve waits in mid-answer until others have ended."""
    settings = {"max_rows": 4, "slots": 12, "row_tokens": 128, "max_tokens": 64, "num_blocks": 400}
    with world(token=endless, workers=1, **settings) as w:
        slots = [w.submit([n + 1] * 20, limit=80) for n in range(12)]
        seen, progressed = [20] * 12, [0] * 12
        for turn in range(400):
            w.workers[0].turn(now_ns=time.monotonic_ns() + 10**9)  # prompts have waited long
            for n, slot in enumerate(slots):
                length = w.baton(slot).length
                if length > seen[n]:
                    assert seen[n] == 20 or turn - progressed[n] <= 8
                    seen[n], progressed[n] = length, turn
            if min(seen) == 80:
                break
        assert min(seen) == 80
