"""When a router is asked: after a step, or during it where nothing of its result matters."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from tests.workers.fakes import (
    VOCAB,
    EarlyRouter,
    FakeRouter,
    HashRunner,
    SubmittingHashRunner,
    hash_route,
    router_class,
    world,
)
from trserve.ipc.baton import Finish
from trserve.router_lib.base import StepResult
from trserve.router_lib.target_share import ShareControl
from trserve.workers.routing import Routing

PROMPTS = [[11, 12, 13, 14, 15, number] for number in range(4)]
EARLY, LATE = {0}, {VOCAB}


def outcomes(router: type[FakeRouter], runner: type[HashRunner], **asked: Any) -> list[Any]:
    with world(router=router, runner=runner) as w:
        slots = [w.submit(prompt, limit=50, ignore_eos=True, **asked) for prompt in PROMPTS]
        w.run(*slots)
        w.check_nothing_held()
        return [w.outcome(slot) for slot in slots]


@pytest.mark.parametrize("share", [0, 5, 40, 100])
def test_who_looks_at_no_result_is_asked_while_the_device_computes(share: int) -> None:
    """Seldom routed rows stay the same from step to step, and are asked early as well."""
    router = router_class(hash_route(1, share), base=EarlyRouter)
    early = outcomes(router, SubmittingHashRunner)
    assert set(router.columns) == EARLY
    router.columns.clear()
    assert outcomes(router, HashRunner) == early
    assert set(router.columns) == LATE


def test_with_a_trace_it_is_asked_when_its_scores_are_written() -> None:
    router = router_class(hash_route(1, 30), base=EarlyRouter)
    traced = outcomes(router, SubmittingHashRunner, trace=True)
    assert set(router.columns) == LATE
    assert traced == outcomes(router, SubmittingHashRunner)


class LooksAfterAll(EarlyRouter):
    """Overrides ``route``, and does not say that it decides early."""

    shown: ClassVar[set[int]] = set()

    def route(self, result: StepResult) -> Any:
        self.shown.add(result.logits.shape[1])
        return [int(token % 5 == 0) for token in result.token_ids.tolist()]


class LooksNoMore(LooksAfterAll):
    decides_early = True
    shown: ClassVar[set[int]] = set()


def test_a_promise_does_not_hold_for_whoever_overrides_what_it_is_about() -> None:
    outcomes(LooksAfterAll, SubmittingHashRunner)
    assert LooksAfterAll.shown == LATE
    outcomes(LooksNoMore, SubmittingHashRunner)
    assert LooksNoMore.shown == EARLY


def test_who_moves_the_threshold_after_the_step_asks_after_it() -> None:
    router = EarlyRouter(world_context())
    assert Routing(router).decides_early
    assert not Routing(router, ShareControl.__new__(ShareControl)).decides_early


def world_context() -> Any:
    with world() as w:
        return w.workers[0].router.context


class FailsForOne(EarlyRouter):
    """For the request whose prompt ends with 2, once it has written three tokens."""

    decides_early = True

    def route(self, result: StepResult) -> Any:
        for request in result.requests:
            row = request.token_ids
            if row[5] == 2 and request.committed_len == 9:
                raise ZeroDivisionError("nine")
        return [0] * len(result.requests)


def test_who_fails_early_fails_that_request_alone() -> None:
    found = outcomes(FailsForOne, SubmittingHashRunner)
    finishes = [outcome.finish for outcome in found]
    assert finishes == [Finish.LENGTH, Finish.LENGTH, Finish.ROUTER_ERROR, Finish.LENGTH]
    assert len(found[2].row) == 9
