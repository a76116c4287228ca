"""Suspects run alone, once; and what was in a step is listed while it runs, and not after."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.fakes import HashRunner, World, reference, stay, world

PROMPTS = [[5 + n, 6, 7] for n in range(3)]


def listed(w: World, worker: int = 0) -> list[int]:
    count, *slots = w.slab.in_step[worker].tolist()
    return slots[:count]


def watch_steps(w: World, seen: list[list[int]]) -> None:
    runner = w.workers[0].runner
    forward = runner.forward

    def watched(inputs: Any, also: Any = None) -> Any:
        seen.append(sorted(listed(w)))
        return forward(inputs, also)

    runner.forward = watched  # type: ignore[method-assign]


def test_the_batch_is_listed_while_a_step_runs_and_not_after() -> None:
    with world(workers=1) as w:
        slots = [w.submit(prompt, limit=30, pinned=True, ignore_eos=True) for prompt in PROMPTS]
        seen: list[list[int]] = []
        watch_steps(w, seen)
        w.run(*slots)
        assert len(seen) == 27
        assert seen[0] == seen[-1] == sorted(slot.index for slot in slots)
        assert listed(w) == []


class DeadlyError(Exception):
    """The worker is gone."""


class Deadly(HashRunner):
    def forward(self, inputs: Any, also: Any = None) -> Any:
        raise DeadlyError


@pytest.mark.parametrize("turns", [1, 3, 9], ids=["prompt", "chosen anew", "steady"])
def test_what_was_in_the_step_stays_listed_if_the_worker_ends(turns: int) -> None:
    with world(workers=1) as w:
        slots = [w.submit(prompt, limit=60, pinned=True, ignore_eos=True) for prompt in PROMPTS]
        for _ in range(turns - 1):
            w.workers[0].turn()
        w.workers[0].runner.forward = Deadly(0, w.workers[0].pool).forward  # type: ignore[method-assign]
        with pytest.raises(DeadlyError):
            w.workers[0].turn()
        assert sorted(listed(w)) == sorted(slot.index for slot in slots)


@pytest.mark.parametrize("max_tokens", [64, 4], ids=["whole rows", "in chunks"])
def test_suspects_run_alone_until_they_are_a_token_further(max_tokens: int) -> None:
    with world(workers=1, max_tokens=max_tokens) as w:
        slots = [w.submit(prompt, limit=20, pinned=True, ignore_eos=True) for prompt in PROMPTS]
        for _ in range(8):
            w.workers[0].turn()
        lengths = {slot.index: w.baton(slot).length for slot in slots}
        suspects = slots[:2]
        for slot in suspects:
            w.slab.suspect[slot.index] = slot.gen
        w.slab.suspect[slots[2].index] = slots[2].gen - 1  # of an earlier use of the slot
        w.workers[0] = w.create(0)
        w.workers[0].table.rescan()
        w.workers[0].cycle.look_around()
        seen: list[list[int]] = []
        watch_steps(w, seen)
        w.run(*slots)
        chunks = [-(-lengths[slot.index] // max_tokens) for slot in suspects]
        alone = seen[: sum(chunks)]
        assert all(len(step) == 1 for step in alone)
        assert {step[0] for step in alone} == {slot.index for slot in suspects}
        assert max(map(len, seen[sum(chunks) :])) > 1
        for slot, prompt in zip(slots, PROMPTS, strict=True):
            expected = reference(prompt, limit=20, models=1, decide=stay, stop_ids=())
            assert w.outcome(slot) == expected


def test_a_steady_batch_is_left_for_a_suspect() -> None:
    with world(workers=1) as w:
        slots = [w.submit(prompt, limit=40, pinned=True, ignore_eos=True) for prompt in PROMPTS]
        for _ in range(6):
            w.workers[0].turn()
        w.slab.suspect[slots[1].index] = slots[1].gen
        w.workers[0].cycle.look_around()
        seen: list[list[int]] = []
        watch_steps(w, seen)
        for _ in range(3):
            w.workers[0].turn()
        everyone = sorted(slot.index for slot in slots)
        assert seen == [[slots[1].index], everyone, everyone]
