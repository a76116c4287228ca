"""Making a router and asking it: configuration, per-request parameters, what its users may do."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.workers.fakes import EOS, VOCAB, FakeRouter, World, hash_route, router_class, world
from trserve.errors import ConfigError
from trserve.gateway.slots import Slot
from trserve.ipc.annotations import AnnotationBook
from trserve.ipc.slab import WorkerStatus
from trserve.limited_log import MOST_LINES
from trserve.router_lib.base import BaseRouter, RouterContext, StepResult
from trserve.router_lib.parameters import Parameter
from trserve.router_lib.r_stitch import RStitch
from trserve.workers.routing import Routing, create_router

CONTEXT = RouterContext(model=0, models=("a", "b"), tokenizer_size=VOCAB, config={})


def context(**config: float) -> RouterContext:
    return RouterContext(model=0, models=("a", "b"), tokenizer_size=VOCAB, config=config)


class Parametrised(FakeRouter):
    parameters = (
        Parameter("bar", "must be given", minimum=0.0),
        Parameter("baz", "has a default", default=0.5),
    )


class Broken(FakeRouter):
    def __init__(self, context: RouterContext) -> None:
        raise OSError("no checkpoint")


class Explained(FakeRouter):
    def __init__(self, context: RouterContext) -> None:
        raise ConfigError("checkpoint /x: not a tensor")


NAME = f"{__name__}:Parametrised"


def test_a_configuration_is_completed_with_defaults() -> None:
    router = create_router(NAME, context(bar=2.0))
    assert router.context.config == {"bar": 2.0, "baz": 0.5}
    assert router.peers == (1,)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        (NAME, {}, "bar"),
        (NAME, {"bar": -1.0}, "bar"),
        (NAME, {"bar": 1.0, "tau": 1.0}, "'tau'"),
        (f"{__name__}:Broken", {}, "no checkpoint"),
        (f"{__name__}:CONTEXT", {}, "BaseRouter"),
        (f"{__name__}:Missing", {}, "Missing"),
        ("no_such_module:X", {}, "no_such_module"),
        ("rstitch", {}, "unknown router"),
    ],
)
def test_what_cannot_be_made_names_the_flag(
    name: str, config: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        create_router(name, context(**config))
    assert "--router" in str(raised.value)


def test_what_a_router_says_of_its_configuration_is_what_a_person_reads() -> None:
    name = f"{__name__}:Explained"
    with pytest.raises(ConfigError) as raised:
        create_router(name, context())
    assert str(raised.value) == f"--router {name}: checkpoint /x: not a tensor"


def test_parameters_are_described_in_json() -> None:
    described = Routing(create_router(NAME, context(bar=1.0))).describe()
    assert [each["name"] for each in json.loads(json.dumps(described, allow_nan=False))] == [
        "bar",
        "baz",
    ]


def test_a_request_may_have_its_own_parameters() -> None:
    seen: list[dict[str, list[float]]] = []

    class Router(Parametrised):
        def route(self, result: StepResult) -> Any:
            seen.append({name: values.tolist() for name, values in result.params.items()})
            return [0] * len(result.requests)

    with world(router=Router, config={"bar": 1.0, "baz": 0.5}) as w:
        slots = [w.submit([1, 2], limit=3), w.submit([3, 4], limit=3, router={"baz": 0.25})]
        w.run(*slots)
    assert seen == [{"bar": [1.0, 1.0], "baz": [0.5, 0.25]}]


def test_other_values_hold_from_the_next_step_on_in_an_unchanged_batch_too() -> None:
    seen: list[list[float]] = []

    class Router(Parametrised):
        def route(self, result: StepResult) -> Any:
            seen.append(result.params["bar"].tolist())
            return [0] * len(result.requests)

    with world(
        router=Router, config={"bar": 1.0, "baz": 0.5}, token=lambda model, row: EOS + 1
    ) as w:
        slots = [w.submit([1, 2], limit=20), w.submit([3, 4], limit=20, router={"bar": 0.25})]
        for _ in range(5):  # so that its rows are kept from step to step
            w.workers[0].turn()
        before = len(seen)
        Routing(w.workers[0].router).configure({"bar": 2.0})
        w.workers[0].table.version += 1
        assert w.workers[0].router.context.config == {"bar": 2.0, "baz": 0.5}
        w.run(*slots)
    assert seen[:before] == [[1.0, 0.25]] * before
    assert len(seen) > before > 2
    assert seen[before:] == [[2.0, 0.25]] * (len(seen) - before)


def test_a_step_result_has_the_shapes_that_are_promised() -> None:
    seen: list[StepResult] = []

    class Router(FakeRouter):
        def route(self, result: StepResult) -> Any:
            seen.append(result)
            return torch.zeros(len(result.requests), dtype=torch.long)

    with world(router=Router, token=lambda model, row: EOS + 1) as w:
        slots = [w.submit([n] * 3, limit=5) for n in range(3)]
        w.run(*slots)
    first, second = seen
    assert first.logits.shape == (3, VOCAB) and first.logits.dtype == torch.float32
    assert first.hidden.shape[0] == 3
    assert first.token_ids.dtype == torch.int64
    assert first.is_prefill.tolist() == [True] * 3
    assert second.is_prefill.tolist() == [False] * 3
    row = first.row(1)
    assert (row.logits.shape[0], len(row.requests), row.is_prefill.tolist()) == (1, 1, [True])


def test_only_overridden_hooks_are_called() -> None:
    assert not Routing(FakeRouter(CONTEXT)).asks_admit

    class Admits(FakeRouter):
        def admit(self, req: Any) -> int:
            return 0

    assert Routing(Admits(CONTEXT)).asks_admit
    assert BaseRouter.admit(FakeRouter(CONTEXT), None) == 0  # type: ignore[arg-type]


class OwnStitch(RStitch):
    """Somebody's, whatever it is derived from."""


def test_only_what_the_library_is_made_of_is_trusted_with_the_tensors_of_the_engine() -> None:
    made = {each.name: each.default for each in RStitch.parameters}
    assert not Routing(RStitch(context(**made))).may_write
    assert Routing(OwnStitch(context(**made))).may_write
    assert Routing(FakeRouter(CONTEXT)).may_write


class Scored(FakeRouter):
    """Its score is the sampled token; it fails for a batch that holds a 9."""

    def score(self, result: StepResult) -> torch.Tensor:
        if 9 in result.token_ids:
            raise ZeroDivisionError("a bug")
        return result.token_ids / 2


def records(w: World, slot: Slot, prompt: int) -> list[float | None]:
    book = AnnotationBook(w.slab, slot.index, first=prompt, tops=0)
    return [record.score for record in book.read(prompt, w.baton(slot).length)]


def test_scores_stand_beside_the_tokens_of_traced_requests() -> None:
    with world(slots=3, workers=2, router=Scored, token=lambda _, row: 20 + len(row)) as w:
        traced = w.submit([1, 2], limit=6, trace=True)
        pinned = w.submit([3, 4], limit=6, trace=True, pinned=True)
        w.run(traced, pinned, w.submit([5], limit=3))
        assert records(w, traced, 2) == [11.0, 11.5, 12.0, 12.5]
        assert records(w, pinned, 2) == [None] * 4, "nobody decided"


def test_a_score_that_fails_costs_the_trace_alone() -> None:
    with world(slots=1, workers=2, router=Scored, token=lambda _, row: 9) as w:
        slot = w.submit([1, 2], limit=6, trace=True)
        w.run(slot)
        assert w.outcome(slot).row == [1, 2, 9, 9, 9, 9]
        assert records(w, slot, 2) == [None] * 4


def test_a_request_knows_how_long_it_was_when_each_peer_last_had_it() -> None:
    """From the first call on, also in workers that were started anew."""
    left: dict[int, list[int]] = {}
    checked: list[list[int]] = []
    decide = hash_route(2, 60)

    class Router(FakeRouter):
        def route(self, result: StepResult) -> Any:
            for request in result.requests:
                others = [left[request.rid][peer] for peer in self.peers]
                assert list(request.peer_locs) == [0, *others]
                checked.append(others)
            return [decide(self.model, r.token_ids.tolist()) for r in result.requests]

    with world(workers=3, router=Router) as w:
        for reused in range(2):  # what is said of a request is not said of the next in its slot
            slots = [w.submit([n + reused, 9], limit=60, ignore_eos=True) for n in range(4)]
            batons = {slot.gen: w.baton(slot) for slot in slots}
            left |= {slot.gen: [0] * 3 for slot in slots}
            for turn in range(200):
                w.workers[turn % 3].turn()
                for slot in slots:
                    before, baton = batons[slot.gen], w.baton(slot)
                    if baton.hop > before.hop:
                        left[slot.gen][before.owner] = baton.length
                    batons[slot.gen] = baton
                if turn % 20 == 19:
                    w.workers[turn % 3] = w.create(turn % 3)
                    w.workers[turn % 3].table.rescan()
            w.run(*slots)
            for slot in slots:
                w.slots.release(slot)
            w.slots.collect()
    assert sum(all(others) for others in checked) > 200


@pytest.mark.parametrize("trace", [True, False])
def test_tokens_that_wait_for_no_lost_peer_are_marked(trace: bool) -> None:
    decide = hash_route(1, 40)
    with world(router=router_class(decide)) as w:
        w.slab.workers[1].set("status", WorkerStatus.LOST)
        w.workers[0].cycle.look_around()
        for _ in range(2):  # the second has the pages of the first
            slot = w.submit([1, 2], limit=40, ignore_eos=True, trace=trace, tops=0)
            w.run(slot)
            row = w.outcome(slot).row
            said = AnnotationBook(w.slab, slot.index, first=2, tops=0).read(2, 40)
            wanted = [decide(0, row[: at + 1]) == 1 for at in range(2, 40)]
            assert [each.alone for each in said] == [trace and w for w in wanted]
            assert any(wanted) and not all(wanted)
            w.slots.release(slot)
            w.slots.collect()


@pytest.mark.parametrize("trace", [True, False])
def test_the_first_token_after_a_handoff_says_how_long_that_took(trace: bool) -> None:
    with world(router=router_class(hash_route(1, 40))) as w:
        slot = w.submit([1, 2], limit=40, ignore_eos=True, trace=trace, tops=0)
        w.run(slot)
        writers = [0, *w.outcome(slot).sources]
        said = AnnotationBook(w.slab, slot.index, first=2, tops=0).read(2, 40)
        times = [each.handoff_us for each in said]
        assert any(time is not None for time in times) == trace
        assert None in times
        assert all(0 <= time < 10**7 for time in times if time is not None)
        # One that came back with nothing committed has a time, too, and the same writer.
        for (before, after), time in zip(pairwise(writers), times, strict=True):
            assert time is not None or before == after or not trace


def test_a_router_that_fails_in_every_step_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = []

    class OneByOne(FakeRouter):
        def route(self, result: StepResult) -> Any:
            if len(result.requests) > 1:
                failures.append(1)
                raise ValueError("one at a time, please")
            return super().route(result)

    with world(router=OneByOne, row_tokens=256) as w:
        slots = [w.submit([n + 1], limit=200, eos_token_ids=()) for n in range(2)]
        w.run(*slots)
        assert [w.baton(slot).length for slot in slots] == [200, 200]
    assert len(failures) > 100 and 1 <= len(caplog.records) <= MOST_LINES
