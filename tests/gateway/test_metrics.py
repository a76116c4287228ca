"""What is counted of answers however they end, and what is written behind their end."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.stack import ListSink, completion, new_plan
from tests.gateway.test_http import Gateway, get, play
from tests.machine_speed import slowness
from tests.workers.fakes import EOS, World, hash_token, router_class, world
from trserve.endpoint_plan import EndpointPlan
from trserve.errors import RequestError
from trserve.gateway.dispatcher import Dispatcher
from trserve.gateway.exposition import Exposition
from trserve.gateway.metrics import Histogram, Metrics
from trserve.gateway.process_memory import resident_bytes
from trserve.gateway.routing_metrics import _Shares
from trserve.gateway.service import Service
from trserve.ipc.baton import Finish
from trserve.ipc.estimates import write_matrices, write_numbers
from trserve.ipc.meter import MeterWriter

LEAVES = router_class(lambda model, row: len(row) % 2, keeps=lambda model, row: 1)


def endless(model: int, row: Any) -> int:
    token = hash_token(model, row)
    return token + 1 if token == EOS else token


class Front:
    """Service and dispatcher over a world."""

    def __init__(self, w: World, folder: Path) -> None:
        self.w = w
        self.service = Service(new_plan(folder), w.slab)
        self.dispatcher = Dispatcher(w.slab, w.slots, w.memory.bells[-1])
        self.exposition = Exposition(self.service, w.slab, w.slots, self.dispatcher)

    @property
    def metrics(self) -> Metrics:
        return self.service.metrics

    async def submit(self, **fields: Any) -> Any:
        """Greedy unless it says otherwise: a drawn end would make a story end by chance."""
        sink = ListSink()
        body = completion(**{"temperature": 0, **fields})
        jobs = self.service.prepare_all(body, lambda index, prompt: sink)
        (generation,) = await self.dispatcher.submit_all(jobs)
        return generation

    def work(self, turns: int) -> None:
        for _ in range(turns):
            for worker in self.w.workers:
                worker.turn()
            self.dispatcher.on_bell()

    def sample(self, name: str, **labels: str) -> float:
        return next(
            sample.value
            for family in self.exposition.collect()
            for sample in family.samples
            if sample.name == f"trserve_{name}" and sample.labels == labels
        )


def run(story: Any, folder: Path, **settings: Any) -> None:
    async def whole() -> None:
        with world(token=endless, **settings) as w:
            await story(Front(w, folder))

    asyncio.run(asyncio.wait_for(whole(), 30))


def test_bounds_are_inclusive_and_weights_count() -> None:
    histogram = Histogram((1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 1), (2.5, 3)):
        histogram.observe(value, times)
    assert histogram.counts == [3, 1, 3]
    assert histogram.total == pytest.approx(0.5 + 2.0 + 1.5 + 7.5)


def test_tokens_of_a_running_answer_are_counted_once(tmp_path: Path) -> None:
    async def story(f: Front) -> None:
        await f.submit(max_tokens=8)
        seen = [f.sample("generation_tokens_total", model="m0")]
        while f.dispatcher.num_live:
            f.work(1)
            seen.append(f.sample("generation_tokens_total", model="m0"))
        assert seen == sorted(seen)
        assert (seen[0], seen[-1]) == (0, 8)
        assert len(set(seen)) == 9
        assert f.metrics.generation_tokens == [8, 0]
        assert f.metrics.finished == {"length": 1}

    run(story, tmp_path)


def test_a_failure_counts_its_tokens_and_no_latency(tmp_path: Path) -> None:
    async def story(f: Front) -> None:
        generation = await f.submit(max_tokens=8)
        f.work(3)
        generation.fail(RequestError("gone", status=503))
        generation.fail(RequestError("again", status=503))
        generation.abandon()
        assert f.metrics.finished == {"error": 1}
        assert sum(f.metrics.generation_tokens) == 3
        assert sum(f.metrics.latency.counts) == 0
        assert sum(f.metrics.time_to_first_token.counts) == 1

    run(story, tmp_path)


def test_what_follows_the_end_is_overshoot_by_its_writer(tmp_path: Path) -> None:
    async def story(f: Front) -> None:
        generation = await f.submit(max_tokens=20)
        f.work(2)
        for worker in f.w.workers:  # two tokens more, which the gateway has not seen
            worker.turn()
            worker.turn()
        length = f.w.baton(generation.slot).length
        sources = f.w.slab.source[generation.slot.index, generation.counted_length : length]
        expected = [sources.tolist().count(model) for model in range(2)]
        f.dispatcher.cancel(generation)
        f.work(3)
        assert f.w.slots.num_free == f.w.memory.layout.slots
        assert sum(expected) > 0
        assert f.w.slots.overshoot == expected
        assert [f.sample("overshoot_tokens_total", model=m) for m in ("m0", "m1")] == expected

    run(story, tmp_path, router=LEAVES)


def test_an_answer_that_ended_by_itself_has_no_overshoot(tmp_path: Path) -> None:
    async def story(f: Front) -> None:
        generation = await f.submit(max_tokens=5)
        f.work(8)
        assert generation.ended
        assert f.w.slots.overshoot == [0, 0]
        assert f.w.slots.num_free == f.w.memory.layout.slots

    run(story, tmp_path)


def test_time_in_the_queue_is_no_time_in_a_slot(tmp_path: Path) -> None:
    async def story(f: Front) -> None:
        await f.submit(max_tokens=3)
        waiting = asyncio.ensure_future(f.submit(max_tokens=3))
        await asyncio.sleep(0.05)
        assert f.sample("num_requests_waiting") == 1
        assert sum(f.metrics.queue_time.counts) == 1
        f.work(5)
        await waiting
        assert f.metrics.queue_time.total > 0.05
        assert f.metrics.prompt_tokens == 6

    run(story, tmp_path, slots=1)


def test_finish_reasons_of_workers_are_all_counted(tmp_path: Path) -> None:
    async def story(f: Front) -> None:
        generation = await f.submit(max_tokens=3)
        baton = f.w.baton(generation.slot)
        generation.advance(baton._replace(finish=Finish.NUMERIC_ERROR).pack())
        assert f.metrics.finished == {"error": 1}
        assert f.sample("requests_total", finish_reason="error") == 1
        assert f.sample("requests_total", finish_reason="stop") == 0

    run(story, tmp_path)


def test_refusals_are_counted_by_status_and_code(tmp_path: Path) -> None:
    async def story(g: Gateway) -> None:
        for _ in range(2):
            assert (await get(g, "/nowhere"))[0] == 404
        assert g.service.metrics.errors == {(404, "not_found"): 2}
        status, body = await get(g, "/metrics")
        families = text_string_to_metric_families(body.decode())
        (errors,) = (each for each in families if each.name == "trserve_request_errors")
        assert [(each.labels, each.value) for each in errors.samples] == [
            ({"status": "404", "code": "not_found"}, 2.0)
        ]
        assert status == 200

    play(story, tmp_path)


def test_a_scrape_takes_little(tmp_path: Path) -> None:
    async def story(f: Front) -> None:
        f.exposition.render("")
        started = time.perf_counter()
        for _ in range(10):
            f.exposition.render("")
        took_s = (time.perf_counter() - started) / 10
        assert took_s < 0.05 * slowness()

    run(story, tmp_path)


def test_this_process_has_memory() -> None:
    found = resident_bytes()
    assert found["gateway"] > 1e6
    assert found["launcher"] > 1e5


def test_gates_and_routes_are_what_the_workers_did(tmp_path: Path) -> None:
    async def story(f: Front) -> None:
        await f.submit(max_tokens=12)
        f.work(20)
        moved = {
            (model, to): f.sample("routed_requests_total", model=model, to=to)
            for model in ("m0", "m1")
            for to in ("m0", "m1")
        }
        # Twelve tokens, one for each time that a step was over, and every handoff is one of them.
        assert sum(moved.values()) == 12
        assert moved["m0", "m1"] + moved["m1", "m0"] == f.sample("handoffs_total") > 0
        for model, worker in zip(("m0", "m1"), f.w.slab.workers, strict=True):
            worker.set("gate_threshold", 5)
            worker.set("gate_nobody_runs", 4)
            worker.set("gate_timeout", 3)
            worker.set("gate_drain", 2)
            worker.set("batch_threshold", 7)
            counts = [
                f.sample("gate_openings_total", model=model, reason=reason)
                for reason in ("threshold", "nobody-runs", "timeout", "drain")
            ]
            assert counts == [5, 4, 3, 2]
            assert f.sample("batch_threshold", model=model) == 7

    run(story, tmp_path, router=LEAVES)


def test_steps_by_their_rows(tmp_path: Path) -> None:
    async def story(f: Front) -> None:
        words = np.frombuffer(f.w.slab.tally_words(1), np.int64)
        widths = 1 + f.w.slab.layout.slots
        steps = words[4 : 4 + widths]
        steps[1], steps[3] = 5, 2
        upto = [f.sample("step_rows_bucket", model="m1", le=le) for le in ("1.0", "2.0", "4.0")]
        assert upto == [5, 5, 7]
        assert f.sample("step_rows_count", model="m1") == 7
        assert f.sample("step_rows_sum", model="m1") == 11
        assert f.sample("step_rows_count", model="m0") == 0

    run(story, tmp_path)


def test_routing_is_shown_as_the_workers_measured_it(tmp_path: Path) -> None:
    """Handoffs by who sent and who received them; buckets as at launch."""

    async def story(f: Front) -> None:
        bounds = (0.001, 0.25)
        plan = f.service.plan
        endpoint = EndpointPlan(handoff_buckets_s=bounds)
        models = [
            msgspec.structs.replace(m, active_parameters=n)
            for m, n in zip(plan.models, (2, 3), strict=True)
        ]
        f.service.plan = msgspec.structs.replace(plan, endpoint=endpoint, models=models)
        f.exposition = Exposition(f.service, f.w.slab, f.w.slots, f.dispatcher)
        first, second = (MeterWriter(f.w.slab, model, bounds) for model in range(2))
        first.send[1].observe(np.array([500_000, 2_000_000]))
        second.admission[0].observe(np.array([10**9]))
        for le, count in (("0.001", 1), ("0.25", 2), ("+Inf", 2)):
            labels = {"src": "m0", "dst": "m1", "phase": "send", "le": le}
            assert f.sample("handoff_seconds_bucket", **labels) == count
        for src, dst, phase, total in (
            ("m0", "m1", "send", 0.0025),
            ("m0", "m1", "admission", 1.0),
            ("m1", "m0", "admission", 0.0),
        ):
            labels = {"src": src, "dst": dst, "phase": phase}
            assert f.sample("handoff_seconds_sum", **labels) == total
        first.threshold(0.5)
        assert f.sample("threshold", router=f.service.router_name) == 0.5
        first.count("failed_send", 3)
        failed = {"router": f.service.router_name, "model": "m0"}
        assert f.sample("router_errors_total", **failed, hook="send") == 3
        assert f.sample("router_errors_total", **failed, hook="route") == 0
        moved = np.frombuffer(f.w.slab.tally_words(1), np.int64)
        moved[:4] = 9, 1, 4, 1  # of nine that went to m0, five left no token
        assert f.sample("tokens_total", model="m1", kind="discarded") == 5
        assert f.sample("cost_units_total", model="m1") == 5 * 3 / 1e9

    run(story, tmp_path)


def test_shares_of_time_are_those_since_the_look_before() -> None:
    shares = _Shares(1)
    shares._at_s = 100.0
    assert shares.at(100.5, [0.4]) == [0.0], "too soon to tell"
    assert shares.at(102.0, [1.5]) == [0.75]
    assert shares.at(102.5, [1.9]) == [0.75]
    assert shares.at(104.0, [9.0]) == [1.0]


def test_the_solvers_report_is_shown(tmp_path: Path) -> None:
    async def story(f: Front) -> None:
        assert f.sample("predicted_tokens_per_second") == 0
        slab = f.w.slab
        numbers = {"live": 3.5, "predicted_tokens_per_s": 208.0, "eager_tokens_per_s": 187.0}
        write_numbers(slab, **numbers, measured_tokens_per_s=201.0, solutions=4, changes=1)
        routing, tokens = np.array([[0.65, 0.35], [1, 0]]), np.array([[1.0, 0], [0.5, 0.25]])
        write_matrices(slab, routing, tokens, [6.0, 27.9])
        for name, value in (
            ("predicted_tokens_per_second", 208),
            ("eager_predicted_tokens_per_second", 187),
            ("measured_tokens_per_second", 201),
            ("live_requests_mean", 3.5),
            ("solutions_total", 4),
            ("routing_changes_total", 1),
        ):
            assert f.sample(name) == value
        assert f.sample("routing_probability", model="m0", to="m1") == 0.35
        assert f.sample("committed_tokens_per_step", model="m1", to="m0") == 0.5
        assert f.sample("step_latency_seconds", model="m1") == pytest.approx(0.0279)

    run(story, tmp_path)
