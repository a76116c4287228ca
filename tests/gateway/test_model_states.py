"""Models that are down or lost: readiness, where requests begin, and what their answers say."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.gateway.stack import ListSink, completion, new_plan
from tests.gateway.test_http import Gateway, get, play
from tests.workers.fakes import EOS, hash_token, world
from trserve.edge.reachability import Reachability
from trserve.errors import RequestError
from trserve.gateway.app import Phase
from trserve.gateway.dispatcher import Dispatcher
from trserve.gateway.model_links import ModelLinks
from trserve.gateway.model_states import ModelStates
from trserve.gateway.service import Service
from trserve.ipc.slab import Reach, WorkerStatus


def message(kind: str, model: int, text: str = "") -> dict[str, Any]:
    return {"type": kind, "model": model, "message": text}


def endless(model: int, row: Any) -> int:
    token = hash_token(model, row)
    return token + 1 if token == EOS else token


def test_an_answer_that_met_an_outage_says_so_whenever_it_began(tmp_path: Path) -> None:
    with world() as w:
        plan = new_plan(tmp_path)
        first, second = plan.models
        remote = [first, structs.replace(second, remote="far:1")]
        plan = structs.replace(plan, models=remote, on_peer_loss="degrade")
        links, words = ModelLinks(plan, w.slab), w.slab.workers[1]
        reach = Reachability(words, "degrade", 1.0, lambda: None)
        reach.begin(connected=True)
        before = links.watch([0, 1])
        here_alone = links.watch([0])
        assert not before()
        reach.rest(0.0, 1.0)
        assert words.get("reach") == Reach.ALONE
        meanwhile = links.watch([0, 1])
        reach.update(9.0, connected=True)
        after = links.watch([0, 1])
        assert before() and meanwhile()
        assert not after() and not here_alone()


def test_a_model_goes_down_and_comes_back() -> None:
    states = ModelStates(["a", "b"])
    assert states.unready is None
    assert states.on_message(message("worker_down", 1, "b was killed"))
    assert states.unready == "b was killed"
    assert [states.status(model) for model in (0, 1)] == ["up", "restarting"]
    assert states.place(1, fixed=True) == 1, "requests wait for it"
    assert states.on_message({"type": "worker_up", "model": 1})
    assert states.unready is None
    assert states.restarts == [0, 1]


def test_a_start_is_no_restart() -> None:
    states = ModelStates(["a"])
    states.on_message({"type": "worker_up", "model": 0})
    assert states.restarts == [0]


def test_a_lost_model_is_replaced_where_nobody_named_it() -> None:
    states = ModelStates(["a", "b", "c"])
    states.on_message(message("worker_down", 0, "killed"))
    states.on_message(message("worker_lost", 0, "killed three times"))
    assert states.unready is None
    assert states.status(0) == "lost"
    assert states.place(0, fixed=False) == 1
    assert states.place(2, fixed=False) == 2
    with pytest.raises(RequestError, match=r"'a' is not available: killed three times") as refused:
        states.place(0, fixed=True)
    assert (refused.value.status, refused.value.code) == (503, "model_unavailable")
    states.on_message(message("worker_lost", 1, "b too"))
    states.on_message(message("worker_lost", 2, "c too"))
    with pytest.raises(RequestError):
        states.place(0, fixed=False)


def test_other_messages_are_not_its_own() -> None:
    assert not ModelStates(["a"]).on_message({"type": "drain"})


def test_a_gateway_that_missed_the_messages_reads_the_slab() -> None:
    with world(workers=3) as w:
        states = ModelStates(["a", "b", "c"])
        w.slab.workers[0].set("status", WorkerStatus.UP)
        w.slab.workers[1].set("status", WorkerStatus.RESTARTING)
        w.slab.workers[2].set("status", WorkerStatus.LOST)
        states.read(w.slab)
        assert [states.status(model) for model in range(3)] == ["up", "restarting", "lost"]
        states.on_message({"type": "worker_up", "model": 1})
        assert states.unready is None


@pytest.mark.parametrize("member", ["only", "entry_model"])
def test_a_lost_model_cannot_be_named(tmp_path: Path, member: str) -> None:
    with world() as w:
        service = Service(new_plan(tmp_path), w.slab)
        service.states.on_message(message("worker_lost", 1, "gone"))
        with pytest.raises(RequestError) as refused:
            service.prepare_all(completion(**{member: "m1"}), lambda index, prompt: ListSink())
        assert (refused.value.status, refused.value.code) == (503, "model_unavailable")
        service.prepare_all(completion(**{member: "m0"}), lambda index, prompt: ListSink())


def test_the_entry_is_chosen_when_the_slot_is_there(tmp_path: Path) -> None:
    """A request may wait in the queue while its model is lost."""

    async def story() -> None:
        with world(token=endless) as w:
            service = Service(new_plan(tmp_path), w.slab)
            dispatcher = Dispatcher(w.slab, w.slots, w.memory.bells[-1], service.states.place)
            sinks = [ListSink(), ListSink()]
            free, pinned = (
                service.prepare_all(completion(**fields), lambda index, prompt, n=n: sinks[n])
                for n, fields in enumerate([{}, {"only": "m0"}])
            )
            service.states.on_message(message("worker_lost", 0, "gone"))
            (generation,) = await dispatcher.submit_all(free)
            assert w.baton(generation.slot).owner == 1
            before = w.slots.num_free
            with pytest.raises(RequestError, match="gone"):
                await dispatcher.submit_all(pinned)
            assert w.slots.num_free == before

    asyncio.run(asyncio.wait_for(story(), 30))


@pytest.mark.parametrize(
    ("fields", "lost", "degraded"),
    [({}, 1, True), ({"only": "m0"}, 1, False), ({"only": "m1"}, 0, False), ({}, None, False)],
)
def test_who_might_have_visited_it_is_degraded(
    tmp_path: Path, fields: dict[str, Any], lost: int | None, degraded: bool
) -> None:
    async def story() -> None:
        with world(token=endless) as w:
            service = Service(new_plan(tmp_path), w.slab)
            dispatcher = Dispatcher(w.slab, w.slots, w.memory.bells[-1], service.states.place)
            sink = ListSink()
            request = completion(max_tokens=3, temperature=0.0, **fields)
            jobs = service.prepare_all(request, lambda i, p: sink)
            (generation,) = await dispatcher.submit_all(jobs)
            if lost is not None:
                service.states.on_message(message("worker_lost", lost, "gone"))
            w.run(generation.slot)
            dispatcher.on_bell()
            assert sink.finish_reason == "length"
            assert sink.usage()["trserve"]["degraded"] is degraded
            for model in (0, 1):
                service.states.on_message(message("worker_lost", model, "later"))
            assert sink.usage()["trserve"]["degraded"] is degraded

    asyncio.run(asyncio.wait_for(story(), 30))


def test_readiness_says_why_and_liveness_stays(tmp_path: Path) -> None:
    async def story(g: Gateway) -> None:
        async def look() -> list[Any]:
            answers = [await get(g, path) for path in ("/readyz", "/health")]
            assert answers[0] == answers[1]
            status, body = answers[0][0], json.loads(answers[0][1])
            assert body["takes_requests"] is True, "they wait"
            return [status, body["status"], body["detail"], body["models"][1]["status"]]

        assert await look() == [200, "ok", "serving", "up"]
        g.service.states.on_message(message("worker_down", 1, "worker 1 was killed"))
        assert await look() == [503, "unavailable", "worker 1 was killed", "restarting"]
        assert (await get(g, "/livez"))[0] == 200
        g.service.states.on_message({"type": "worker_up", "model": 1})
        assert await look() == [200, "ok", "serving", "up"]
        g.service.states.on_message(message("worker_lost", 1, "worker 1 is gone"))
        assert await look() == [200, "degraded", "serving; worker 1 is gone", "lost"]
        g.app.phase = Phase.DRAINING
        status, said = await get(g, "/readyz")
        assert (status, json.loads(said)["takes_requests"]) == (503, False)

    play(story, tmp_path)
