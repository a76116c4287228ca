"""Steps of workers without weights: what is committed, where requests go, how they end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.fakes import (
    EOS,
    Decide,
    FakeRouter,
    hash_route,
    hash_token,
    reference,
    router_class,
    stay,
    world,
)
from trserve.ipc.baton import Finish, SlotState
from trserve.ipc.extras import read_extras
from trserve.router_lib.base import PeerReq, RequestView, StepResult
from trserve.workers.rows import FEW_ROWS

PROMPT = [11, 12, 13, 14, 15]


def other_than_eos(model: int, row: Sequence[int]) -> int:
    token = hash_token(model, row)
    return token + 1 if token == EOS else token


def always(destination: int) -> Decide:
    return lambda model, row: destination


def only_from(model: int, destination: int = 1) -> Decide:
    return lambda at, row: destination if at == model else 0


@given(
    models=st.integers(1, 3),
    share=st.sampled_from([0, 10, 50, 100]),
    prompts=st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=20), min_size=1, max_size=4),
    kept=st.sampled_from([None, 0, 50]),
    steps=st.sampled_from([(1, 1), (2, 3), (4, 8), (8, 64)]),
    blocks=st.sampled_from([16, 20, 64]),
)
def test_outcomes_are_those_of_a_plain_loop(
    models: int,
    share: int,
    prompts: list[list[int]],
    kept: int | None,
    steps: tuple[int, int],
    blocks: int,
) -> None:
    """At any batch, chunk and pool: a row of 64 tokens takes all 16 blocks of the smallest."""
    decide = hash_route(models - 1, share) if models > 1 else stay
    keeps = None if kept is None else hash_route(1, kept)
    with world(
        workers=models,
        router=router_class(decide, keeps),
        max_rows=steps[0],
        max_tokens=steps[1],
        num_blocks=blocks,
    ) as w:
        entry = [at % models for at in range(len(prompts))]
        slots = [w.submit(p, limit=40 + at, entry=entry[at]) for at, p in enumerate(prompts)]
        w.run(*slots)
        for at, (slot, prompt) in enumerate(zip(slots, prompts, strict=True)):
            assert w.outcome(slot) == reference(
                prompt, limit=40 + at, models=models, decide=decide, keeps=keeps, entry=entry[at]
            )
        w.check_nothing_held()


@pytest.mark.parametrize("share", [0, 20])
def test_outcomes_of_many_rows_are_those_of_a_plain_loop(share: int) -> None:
    """So many that their inputs are filled by vector operations."""
    decide = hash_route(1, share)
    with world(
        slots=20, router=router_class(decide), max_rows=20, num_blocks=400, token=other_than_eos
    ) as w:
        prompts = [[at, *range(8, 10 + at % 5)] for at in range(20)]
        slots = [w.submit(prompt, limit=40 + len(prompt)) for prompt in prompts]
        w.run(*slots)
        for slot, prompt in zip(slots, prompts, strict=True):
            assert w.outcome(slot) == reference(
                prompt,
                limit=40 + len(prompt),
                models=2,
                decide=decide,
                token=other_than_eos,
            )
        assert max(len(batch) for batch in w.workers[0].runner.batches) > FEW_ROWS
        w.check_nothing_held()


def test_a_discarded_eos_ends_nothing() -> None:
    def token(model: int, row: Sequence[int]) -> int:
        return EOS if model == 0 else 20 + len(row)

    with world(router=router_class(always(1)), token=token) as w:
        slot = w.submit(PROMPT, limit=9)
        w.run(slot)
        # Model 0's EOS never counts; model 1's tokens do, and it sends back each time.
        assert w.outcome(slot).row == [*PROMPT, 25, 26, 27, 28]
        assert w.outcome(slot).finish is Finish.LENGTH


def test_a_kept_eos_ends_the_request_wherever_it_was_to_go() -> None:
    with world(router=router_class(always(1)), token=lambda model, row: EOS) as w:
        slot = w.submit(PROMPT, limit=30, entry=1)
        w.run(slot)
        assert w.outcome(slot).row == [*PROMPT, EOS]
        assert (w.baton(slot).finish, w.baton(slot).owner) == (Finish.STOP, 1)
        assert w.slab.sent[slot.index] == 0b10  # model 0 never heard of it


def test_stop_ids_end_and_ignore_eos_ignores_both() -> None:
    def token(model: int, row: Sequence[int]) -> int:
        return [30, 31, EOS, 33, 34, 35][len(row) - len(PROMPT)]

    with world(token=token) as w:
        stop = w.submit(PROMPT, limit=11, stop_token_ids=(31,))
        deaf = w.submit(PROMPT, limit=11, stop_token_ids=(31,), ignore_eos=True)
        plain = w.submit(PROMPT, limit=11)
        w.run(stop, deaf, plain)
        assert w.outcome(stop).row[5:] == [30, 31]
        assert w.outcome(deaf).row[5:] == [30, 31, EOS, 33, 34, 35]
        assert w.outcome(deaf).finish is Finish.LENGTH
        assert w.outcome(plain).row[5:] == [30, 31, EOS]
        assert w.outcome(plain).finish is Finish.STOP


def test_min_tokens_keeps_ends_away_until_then() -> None:
    with world(token=lambda model, row: EOS) as w:
        slot = w.submit(PROMPT, limit=30, min_tokens=3)
        w.run(slot)
        assert w.outcome(slot).row[5:] == [EOS + 1] * 3 + [EOS]


def test_the_length_limit_is_met_exactly() -> None:
    with world(token=other_than_eos) as w:
        slots = [w.submit(PROMPT, limit=limit) for limit in (6, 7, 64)]
        w.run(*slots)
        assert [w.baton(slot).length for slot in slots] == [6, 7, 64]
        assert {w.baton(slot).finish for slot in slots} == {Finish.LENGTH}


def test_two_hops_in_a_row_never_both_commit_nothing() -> None:
    """Everybody sends everything away and keeps nothing: whoever is asked second must write."""
    with world(router=router_class(always(1), always(0)), token=other_than_eos) as w:
        slot = w.submit(PROMPT, limit=20)
        w.run(slot)
        assert w.outcome(slot).sources == [1] * 15
        assert w.baton(slot).hop == 29  # there and back for each token, but for the last


def test_a_pinned_request_stays_and_a_bad_router_does_not_matter_to_it() -> None:
    class Bad(FakeRouter):
        def route(self, result: StepResult) -> Any:
            raise RuntimeError("no")

    with world(router=Bad, token=other_than_eos) as w:
        slots = [w.submit(PROMPT, limit=12, entry=1, pinned=True) for _ in range(2)]
        w.run(*slots)
        assert {w.baton(slot).finish for slot in slots} == {Finish.LENGTH}
        assert w.outcome(slots[0]).sources == [1] * 7


ROUTER_ANSWERS = {
    "list": lambda rows: rows,
    "tuple": tuple,
    "numpy": np.array,
    "tensor": torch.tensor,
    "numpy integers": lambda rows: [np.int64(row) for row in rows],
    "int32 tensor": lambda rows: torch.tensor(rows, dtype=torch.int32),
    "mask": lambda rows: torch.tensor(rows) > 0,
}


@pytest.mark.parametrize("make", ROUTER_ANSWERS.values(), ids=list(ROUTER_ANSWERS))
def test_destinations_come_in_any_form(make: Any) -> None:
    class Router(FakeRouter):
        def route(self, result: StepResult) -> Any:
            return make([1 if self.model == 0 else 0] * len(result.requests))

    with world(router=Router, token=other_than_eos) as w:
        slots = [w.submit(PROMPT, limit=8) for _ in range(2)]
        w.run(*slots)
        assert [w.outcome(slot).sources for slot in slots] == [[1, 1, 1]] * 2


def test_a_row_that_raises_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Picky(FakeRouter):
        calls = 0

        def route(self, result: StepResult) -> Any:
            type(self).calls += 1
            if any(request.prompt_len == 3 for request in result.requests):
                raise ZeroDivisionError("three")
            return [0] * len(result.requests)

    with world(router=Picky, token=other_than_eos) as w, caplog.at_level(logging.CRITICAL):
        good, bad, fine = (w.submit(PROMPT[:n], limit=10) for n in (2, 3, 4))
        w.workers[0].turn()
        assert Picky.calls == 4  # the batch, then each row once
        w.run(good, bad, fine)
        assert w.outcome(bad).finish is Finish.ROUTER_ERROR
        assert w.baton(bad).length == 3
        assert [w.baton(s).finish for s in (good, fine)] == [Finish.LENGTH] * 2
        w.check_nothing_held()


@pytest.mark.parametrize("value", [2, -1, 1.0, None, "1", [1]])
def test_a_value_that_is_no_destination_fails_its_request(value: object) -> None:
    class Router(FakeRouter):
        def route(self, result: StepResult) -> Any:
            return [value if r.prompt_len == 3 else 0 for r in result.requests]

    with world(router=Router, token=other_than_eos) as w:
        good, bad = w.submit(PROMPT, limit=9), w.submit(PROMPT[:3], limit=9)
        w.run(good, bad)
        assert (w.baton(good).finish, w.baton(bad).finish) == (Finish.LENGTH, Finish.ROUTER_ERROR)


def test_a_route_of_the_wrong_length_is_asked_row_by_row() -> None:
    class Router(FakeRouter):
        def route(self, result: StepResult) -> Any:
            return [0]

    with world(router=Router, token=other_than_eos) as w:
        slots = [w.submit(PROMPT, limit=9) for _ in range(3)]
        w.run(*slots)
        assert {w.baton(slot).finish for slot in slots} == {Finish.LENGTH}


@pytest.mark.parametrize("hook", ["send", "receive", "admit"])
def test_each_hook_that_raises_fails_its_request_only(hook: str) -> None:
    def fail(self: FakeRouter, request: Any, *rest: Any) -> Any:
        if request.rid == 2:
            raise RuntimeError(hook)
        return getattr(super(Router, self), hook)(request, *rest)

    Router = type("Router", (FakeRouter,), {hook: fail, "decide": staticmethod(only_from(0))})
    with world(router=Router, token=other_than_eos) as w:
        slots = [w.submit(PROMPT, limit=9) for _ in range(3)]
        w.run(*slots)
        finishes = [w.baton(slot).finish for slot in slots]
        assert finishes == [Finish.LENGTH, Finish.ROUTER_ERROR, Finish.LENGTH]
        w.check_nothing_held()


@pytest.mark.parametrize("size", [64, 65])
def test_extras_travel_and_too_many_fail_the_request(size: int) -> None:
    class Router(FakeRouter):
        decide = staticmethod(only_from(0))

        def send(self, req: RequestView, token: int) -> PeerReq:
            peer_req = super().send(req, token)
            peer_req.extras = bytes(range(size))
            return peer_req

        def receive(self, peer_req: PeerReq) -> None:
            if self.model == 1:
                assert peer_req.extras == bytes(range(64))
                assert peer_req.loc == 5

    with world(router=Router, token=other_than_eos) as w:
        slot = w.submit(PROMPT, limit=9)
        w.run(slot)
        expected = Finish.LENGTH if size == 64 else Finish.ROUTER_ERROR
        assert w.baton(slot).finish is expected


@pytest.mark.parametrize("extras", ["hop", [1, 2], 8, None])
def test_extras_that_are_no_bytes_fail_their_request_only(extras: Any) -> None:
    class Router(FakeRouter):
        decide = staticmethod(only_from(0))

        def send(self, req: RequestView, token: int) -> PeerReq:
            peer_req = super().send(req, token)
            if req.rid == 2:
                peer_req.extras = extras
            return peer_req

    with world(router=Router, token=other_than_eos) as w:
        slots = [w.submit([*PROMPT, n], limit=9) for n in range(4)]
        w.run(*slots)
        finishes = [w.baton(slot).finish for slot in slots]
        assert finishes == [Finish.LENGTH, Finish.ROUTER_ERROR, Finish.LENGTH, Finish.LENGTH]
        w.check_nothing_held()


@pytest.mark.parametrize(
    "extras", [bytearray(b"hop"), memoryview(b"hop"), np.frombuffer(b"hop", np.uint8)]
)
def test_extras_may_be_any_bytes(extras: Any) -> None:
    class Router(FakeRouter):
        decide = staticmethod(only_from(0))

        def send(self, req: RequestView, token: int) -> PeerReq:
            peer_req = super().send(req, token)
            peer_req.extras = extras
            return peer_req

        def receive(self, peer_req: PeerReq) -> None:
            assert self.model == 0 or peer_req.extras == b"hop".ljust(64, b"\0")

    with world(router=Router, token=other_than_eos) as w:
        slot = w.submit(PROMPT, limit=9)
        w.run(slot)
        assert w.outcome(slot).finish is Finish.LENGTH


def test_logits_that_are_not_finite_end_their_row_alone() -> None:
    def token(model: int, row: Sequence[int]) -> int:
        return -1 if len(row) == 7 else other_than_eos(model, row)

    with world(token=token) as w:
        good, bad = w.submit([1] * 8, limit=12), w.submit([1] * 5, limit=12)
        w.run(good, bad)
        assert w.outcome(bad).finish is Finish.NUMERIC_ERROR
        assert w.baton(bad).length == 7
        assert w.outcome(good).finish is Finish.LENGTH
        w.check_nothing_held()


def test_admit_moves_a_request_before_any_prefill() -> None:
    class Router(FakeRouter):
        def admit(self, req: RequestView) -> int:
            return 1

    with world(router=Router, token=other_than_eos) as w:
        slot, named = w.submit(PROMPT, limit=9), w.submit(PROMPT, limit=9, admit=False)
        w.workers[0].turn()
        assert w.workers[0].runner.batches == [[5]]  # only the one that names its entry model
        assert (w.baton(slot).owner, w.baton(slot).hop) == (1, 1)
        extras = read_extras(w.slab.extras(slot.index, w.baton(slot).bank))
        assert not extras.empty  # a hop without a token does not count as one
        w.run(slot, named)
        assert w.outcome(slot).sources == [1] * 4
        assert w.outcome(named).sources == [0] * 4


@pytest.mark.parametrize("model", [1, np.int64(1), np.array(1), torch.tensor(1)])
def test_admit_says_a_model_in_any_form(model: Any) -> None:
    Router = type("Router", (FakeRouter,), {"admit": lambda self, req: model})
    with world(router=Router, token=other_than_eos) as w:
        slot = w.submit(PROMPT, limit=9)
        w.run(slot)
        assert w.outcome(slot).sources == [1] * 4


@pytest.mark.parametrize(
    "model", [-1, 2, "m1", None, 1.0, torch.tensor(1.0), np.array([1, 1]), torch.ones(2)]
)
def test_admit_to_no_model_fails_the_request(model: Any) -> None:
    Router = type("Router", (FakeRouter,), {"admit": lambda self, req: model})
    with world(router=Router) as w:
        slot = w.submit(PROMPT, limit=9)
        w.run(slot)
        assert w.baton(slot).finish is Finish.ROUTER_ERROR


def test_views_are_read_only_and_show_the_sampled_token() -> None:
    seen: list[tuple[int, int, bool]] = []

    class Router(FakeRouter):
        def route(self, result: StepResult) -> Any:
            for request, token in zip(result.requests, result.token_ids.tolist(), strict=True):
                ids = request.token_ids
                seen.append((len(ids), request.committed_len, int(ids[-1]) == token))
                with pytest.raises(ValueError):
                    ids[0] = 1
            return [0] * len(result.requests)

    with world(router=Router, token=other_than_eos) as w:
        slot = w.submit(PROMPT, limit=8)
        w.run(slot)
        assert w.baton(slot).state is SlotState.DONE
    assert seen == [(6, 5, True), (7, 6, True), (8, 7, True)]
