"""Steps of an unchanged batch against the same steps chosen and filled anew: nothing may differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.fakes import (
    BLOCK,
    EOS,
    EarlyRouter,
    FakeRouter,
    SubmittingHashRunner,
    Worker,
    World,
    hash_route,
    hash_token,
    router_class,
    world,
)
from trserve.gateway.slots import Slot
from trserve.ipc.baton import Finish, SlotState
from trserve.router_lib.base import StepResult
from trserve.router_lib.parameters import Parameter
from trserve.workers.steady import SteadyRows
from trserve.workers.step_cycle import StepCycle

PROMPT = [11, 12, 13, 14, 15]


def endless(model: int, row: Sequence[int]) -> int:
    token = hash_token(model, row)
    return token + 1 if token == EOS else token


def sometimes_not_finite(model: int, row: Sequence[int]) -> int:
    return -1 if hash((5, *row)) % 150 == 0 else endless(model, row)


@dataclass
class Twins:
    """Two worlds that are told the same; only the first has steps of an unchanged batch."""

    worlds: list[World]
    slots: list[list[Slot]] = field(default_factory=list)
    steady_steps: int = 0

    def submit(self, prompt: Sequence[int], **wishes: Any) -> None:
        self.slots.append([w.submit(prompt, **wishes) for w in self.worlds])

    def cancel(self, at: int, *, told: bool) -> None:
        """By the word and a descriptor, or by the word alone."""
        for w, slot in zip(self.worlds, self.slots[at % len(self.slots)], strict=True):
            if told:
                w.slots.cancel(slot)
            elif w.baton(slot).state is SlotState.LIVE:
                w.slab.cancel[slot.index] = slot.gen

    def turn(self) -> None:
        first, second = self.worlds
        for index in range(len(first.workers)):
            before = first.workers[index].cycle._steady
            first.workers[index].turn()
            self.steady_steps += before is not None and before._turn != 0
            with mock.patch.object(StepCycle, "_can_be_steady", lambda self, plan: False):
                second.workers[index].turn()
            self.compare(index)

    def compare(self, index: int) -> None:
        first, second = self.worlds
        for name in ("baton", "sent", "cached"):
            assert list(getattr(first.slab, name)) == list(getattr(second.slab, name)), name
        for name in ("tokens", "source", "pages"):
            mine, its = getattr(first.slab, name), getattr(second.slab, name)
            # Of records that are not finite, only that they are not.
            assert mine.tobytes() == its.tobytes(), name
        workers = [w.workers[index] for w in self.worlds]
        assert first.slab.closed[index].tolist() == second.slab.closed[index].tolist()
        assert workers[0].runner.batches == workers[1].runner.batches
        header = [w.slab.workers[index].words.tolist() for w in self.worlds]
        assert header[0] == header[1]
        assert requests_of(workers[0]) == requests_of(workers[1])

    def finish(self) -> None:
        for _ in range(2000):
            if all(w.baton(s).state is SlotState.DONE for w, s in zip(*self._last(), strict=True)):
                break
            self.turn()
        self.turn()
        for w in self.worlds:
            w.check_nothing_held()

    def _last(self) -> tuple[list[World], list[Slot]]:
        pairs = [(w, s) for pair in self.slots for w, s in zip(self.worlds, pair, strict=True)]
        return [w for w, _ in pairs], [s for _, s in pairs]


def requests_of(worker: Worker) -> list[Any]:
    """What the requests of a worker say, as far as it does not depend on the time."""
    return [
        (
            slot,
            request.state,
            request.length,
            request.num_computed,
            request.num_cached,
            request.committed_here,
            request.block_table[: request.num_blocks].tolist(),
            request.token_ids.tolist(),
            list(request.peer_locs),
            slot in worker.table.runnable,
        )
        for slot, request in worker.table.resident.items()
    ]


@contextmanager
def twins(**settings: Any) -> Iterator[Twins]:
    with ExitStack() as stack:
        yield Twins([stack.enter_context(world(**settings)) for _ in range(2)])


WISHES = st.fixed_dictionaries(
    {"limit": st.integers(24, 60)},
    optional={
        "temperature": st.just(1.0),
        "seed": st.integers(0, 2**64 - 1),
        "top_k": st.integers(1, 9),
        "min_tokens": st.integers(1, 20),
        "stop_token_ids": st.just((3, 5)),
        "ignore_eos": st.booleans(),
        "presence_penalty": st.just(0.7),
        "repetition_penalty": st.just(1.3),
        "logit_bias": st.just({9: 1.5, 21: -3.0}),
        "pinned": st.booleans(),
        "tops": st.integers(0, 3),
    },
)
REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 12),  # the turn at which it comes
        st.lists(st.integers(8, 12), min_size=1, max_size=20),
        WISHES,
    ),
    min_size=1,
    max_size=6,
)
CANCELS = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5), st.booleans()), max_size=2)


@given(
    requests=REQUESTS,
    cancels=CANCELS,
    models=st.integers(1, 2),
    share=st.sampled_from([0, 0, 4, 30]),
    blocks=st.sampled_from([16, 30, 64]),
    finite=st.booleans(),
    prefix_caching=st.booleans(),
)
def test_nothing_in_the_slab_tells_which_steps_were_steady(
    requests: list[Any],
    cancels: list[Any],
    models: int,
    share: int,
    blocks: int,
    finite: bool,
    prefix_caching: bool,
) -> None:
    """Any mix of requests, after every single turn; 16 blocks are one full row."""
    with twins(
        slots=8,
        workers=models,
        router=router_class(hash_route(1, share)) if models > 1 else FakeRouter,
        token=endless if finite else sometimes_not_finite,
        num_blocks=blocks,
        prefix_caching=prefix_caching,
    ) as both:
        for turn in range(32):
            for at, prompt, wishes in requests:
                if at == turn:
                    both.submit(prompt, **wishes)
            for at, which, told in cancels:
                if at == turn and both.slots:
                    both.cancel(which, told=told)
            both.turn()
        both.finish()


@pytest.mark.parametrize("models", [1, 2])
def test_an_unchanged_batch_is_not_chosen_anew(models: int) -> None:
    """In 40 steps of three requests, but for the first two and what follows an end."""
    with twins(workers=models, token=endless) as both:
        for at, limit in enumerate((40, 44, 50)):
            both.submit(PROMPT[: 3 + at], limit=limit, ignore_eos=True)
        with mock.patch.object(
            SteadyRows, "__init__", autospec=True, side_effect=SteadyRows.__init__
        ) as made:
            for _ in range(30):
                both.turn()
        assert made.call_count == 1
        assert both.steady_steps > 15
        both.finish()


def test_a_cancel_an_arrival_and_an_end_are_met_in_their_step() -> None:
    with twins(workers=1, token=endless) as both:
        both.submit(PROMPT, limit=30, ignore_eos=True)
        both.submit(PROMPT[:3], limit=20, ignore_eos=True)
        for _ in range(8):
            both.turn()
        both.submit([1, 2, 3, 4], limit=30, ignore_eos=True)
        both.turn()
        w = both.worlds[0]
        assert w.baton(both.slots[2][0]).length == 5
        for _ in range(5):
            both.turn()
        assert w.workers[0].cycle._steady is not None
        both.cancel(0, told=False)
        length = w.baton(both.slots[0][0]).length
        both.turn()
        assert (w.baton(both.slots[0][0]).finish, w.baton(both.slots[0][0]).length) == (
            Finish.ABORT,
            length,
        )
        both.finish()
        assert w.baton(both.slots[1][0]).length == 20


def test_a_token_that_ends_only_another_request_ends_nothing() -> None:
    with twins(workers=1, token=lambda model, row: 30 + len(row) % 4) as both:
        both.submit(PROMPT, limit=40, stop_token_ids=(77,))
        both.submit(PROMPT, limit=40, stop_token_ids=(32,), min_tokens=20)
        both.finish()
        rows = [both.worlds[0].outcome(pair[0]) for pair in both.slots]
        assert (len(rows[0].row), rows[0].finish) == (40, Finish.LENGTH)
        assert (rows[1].row[-1], rows[1].finish) == (32, Finish.STOP)


def test_a_router_sees_a_steady_step_as_any_other() -> None:
    seen: list[Any] = []

    class Router(FakeRouter):
        def route(self, result: StepResult) -> Any:
            for at, request in enumerate(result.requests):
                token = int(result.token_ids[at])
                assert request.token_ids[-1] == token
                assert len(request.token_ids) == request.committed_len + 1
                assert not request.finished
                with pytest.raises(ValueError):
                    request.token_ids[0] = 1
            seen.append((result.is_prefill.tolist(), [r.rid for r in result.requests]))
            return [0] * len(result.requests)

    with world(router=Router, token=endless) as w:
        slots = [w.submit(PROMPT[: 3 + at], limit=20, ignore_eos=True) for at in range(2)]
        for _ in range(10):
            w.workers[0].turn()
        assert w.workers[0].cycle._steady is not None
        rids = [slot.gen for slot in slots]
        assert seen == [([True, True], rids)] + [([False, False], rids)] * 9


class Writes(EarlyRouter):
    """Into all that it is shown, after it has noted what that is."""

    parameters = (Parameter("bar", "a bound", default=0.5),)
    decides_early = False
    shown: ClassVar[list[Any]] = []

    def route(self, result: StepResult) -> Any:
        bars, prefill = result.params["bar"], result.is_prefill
        self.shown.append((bars.tolist(), prefill.tolist()))
        for tensor in (result.logits, result.hidden):
            tensor.zero_()
        result.token_ids.clamp_(max=1)
        bars -= 0.125
        prefill.logical_not_()
        return [0] * len(result.requests)


class WritesEarly(Writes):
    decides_early = True


@pytest.mark.parametrize("router", [Writes, WritesEarly])
def test_what_a_router_writes_into_is_its_own(router: type[Writes]) -> None:
    """Neither the rows nor the blocks, which are checked in each turn, nor what it sees next."""
    outcomes = []
    for each in (FakeRouter, router):
        router.shown.clear()
        settings: Any = {"config": {"bar": 0.5}, "token": endless, "runner": SubmittingHashRunner}
        with world(router=each, **settings) as w:
            slots = [w.submit(PROMPT[: 3 + n], limit=30, ignore_eos=True) for n in range(2)]
            for _ in range(12):
                w.workers[0].turn()
            assert w.workers[0].cycle._steady is not None
            w.run(*slots)
            outcomes.append([w.outcome(slot) for slot in slots])
    assert outcomes[0] == outcomes[1]
    bars = [bar for found, _ in router.shown for bar in found]
    assert len(bars) > 50 and set(bars) == {0.5}
    assert [any(prefill) for _, prefill in router.shown] == [True] + [False] * (
        len(router.shown) - 1
    )


def test_the_last_token_of_a_long_row_leaves_no_rest_to_steady_steps() -> None:
    """The batch threshold counts for them."""
    settings: Any = {"row_tokens": 128, "max_tokens": 8, "prefix_caching": False}
    with world(token=endless, **settings) as w:
        slot = w.submit(PROMPT, limit=100, ignore_eos=True)
        worker = w.workers[0]
        while w.baton(slot).length < 41:
            worker.turn()
        worker.table.drop_kv(worker.table.resident[slot.index])
        for _ in range(5):
            worker.turn()
        assert worker.cycle.has_rest and worker.cycle._steady is None
        worker.turn()
        assert worker.cycle._steady is not None, "the row's last token is the first step of many"
        assert not worker.cycle.has_rest


def test_a_block_that_another_request_had_first_takes_the_place_of_the_own() -> None:
    """Two rows that are the same write the same blocks; each ends up with the cached one."""
    with twins(workers=1, token=lambda model, row: 20 + len(row)) as both:
        for _ in range(2):
            both.submit([1, 2, 3], limit=40)
        for _ in range(20):
            both.turn()
        tables = [r.block_table.tolist() for r in both.worlds[0].workers[0].table.resident.values()]
        shared = both.worlds[0].baton(both.slots[0][0]).length // BLOCK - 1
        assert tables[0][:shared] == tables[1][:shared]
        inputs = both.worlds[0].workers[0].cycle._inputs
        assert np.array_equal(inputs.block_tables[0, :shared], inputs.block_tables[1, :shared])
        assert both.worlds[0].workers[0].cycle._steady is not None
        both.finish()
