"""One endpoint in front of groups that are played by small servers of their own."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import orjson
import pytest

from tests.cluster.stage import (
    BOSS,
    BOUND_S,
    EVENTS,
    FakeGroup,
    Stage,
    on_stage,
    raw,
    readiness,
    status_of,
)
from trserve.cluster import groups, standing
from trserve.cluster.front_server import _watched_socket
from trserve.endpoint_plan import EndpointPlan
from trserve.gateway import connection
from trserve.keys import digest


def test_a_stream_passes_as_it_is() -> None:
    async def act(stage: Stage) -> None:
        for group in stage.groups:
            group.hold.set()
        async with stage.post("/v1/completions?x=1", {"prompt": "a"}) as reply:
            assert await reply.read() == b"".join(EVENTS)
            assert reply.headers["x-mine"] == "1"
            group = stage.groups[int(reply.headers["x-trserve-group"])]
        assert group.asked[0].query_string == "x=1"
        assert group.bodies == [b'{"prompt":"a"}']
        assert stage.front.app.open_requests == 0

    on_stage(act)


def test_sessions_and_prompts_stay_where_they_were() -> None:
    async def act(stage: Stage) -> None:
        async def group_of(prompt: str, session: str = "") -> str:
            headers = {"x-session-affinity": session} if session else {}
            async with stage.post("/v1/embeddings", {"prompt": prompt}, **headers) as reply:
                return reply.headers["x-trserve-group"]

        first = await group_of("x" * 1000, "me")
        assert {await group_of(str(n), "me") for n in range(5)} == {first}
        assert await group_of("x" * 1000 + "more") == first
        assert stage.front.app.choices == {"load": 1, "session": 5, "prefix": 1}

    on_stage(act)


def test_a_client_that_leaves_ends_the_work() -> None:
    async def act(stage: Stage) -> None:
        for group in stage.groups:
            group.never_ends = True
        reply = await stage.post("/v1/completions", {"prompt": "a"})
        assert EVENTS[0] in await reply.content.readany()
        reply.close()
        waits = [asyncio.create_task(group.left.wait()) for group in stage.groups]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        while stage.front.app.open_requests:
            await asyncio.sleep(0.01)

    on_stage(act)


STREAM = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


def test_a_client_that_closes_is_noticed_while_its_stream_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "PROBE_EVERY_S", 0.02)

    async def act(stage: Stage) -> None:
        reader, writer = await asyncio.open_connection(*stage.address)
        writer.write(STREAM)
        await reader.readuntil(EVENTS[0])
        writer.write_eof()
        await reader.readuntil(b"\r\n: keep-alive\n\n\r\n")
        writer.close()
        while stage.front.app.open_requests:
            await asyncio.sleep(0.01)

    on_stage(act)


@pytest.mark.parametrize("begins", [EVENTS[0], EVENTS[0] + b"data: {"])
def test_a_client_that_only_stopped_sending_gets_its_stream_with_whole_events(
    begins: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PROBE_EVERY_S", 0.02)

    async def act(stage: Stage) -> None:
        for group in stage.groups:
            group.begins = begins
        reader, writer = await asyncio.open_connection(*stage.address)
        writer.write(STREAM)
        writer.write_eof()
        await reader.readuntil(begins)
        await asyncio.sleep(0.1)
        for group in stage.groups:
            group.hold.set()
        rest = await reader.read()
        assert (b"keep-alive" in rest) is (begins == EVENTS[0])
        assert rest.endswith(EVENTS[-1] + b"\r\n0\r\n\r\n")
        writer.close()

    on_stage(act)


def test_one_that_cannot_be_reached_is_another_ones_work() -> None:
    async def act(stage: Stage) -> None:
        await stage.groups[0].stop()
        for _ in range(4):
            async with stage.post("/v1/embeddings", {"input": "a"}) as reply:
                assert (reply.status, await reply.json()) == (200, {"by": "one"})
        lost = stage.front.groups.all[0]
        assert (lost.ready, lost.losses) == (False, 1)
        async with stage.client.get(stage.url + "/readyz") as reply:
            assert (reply.status, (await reply.json())["status"]) == (200, "degraded")

    on_stage(act)


def test_a_stream_whose_group_goes_away_says_so_and_ends() -> None:
    async def act(stage: Stage) -> None:
        for group in stage.groups:
            group.dies = True
        async with stage.post("/v1/completions", {"prompt": "a"}) as reply:
            assert await reply.content.readany() == EVENTS[0]
            for group in stage.groups:
                group.hold.set()
            rest = (await reply.read()).decode()
        assert rest.startswith('data: {"error":') and "went away" in rest and rest.endswith("\n\n")

    on_stage(act)


def test_without_any_group_the_reasons_are_told() -> None:
    async def act(stage: Stage) -> None:
        for index, group in enumerate(stage.groups):
            await group.stop()
            stage.front.groups.move(index, "", f"host {index} is lost")
        async with stage.post("/v1/completions", {"prompt": "a"}) as reply:
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
            assert "host 1 is lost" in (await reply.json())["error"]["message"]
        async with stage.client.get(stage.url + "/readyz") as reply:
            assert reply.status == 503
        async with stage.client.get(stage.url + "/livez") as reply:
            assert reply.status == 200

    on_stage(act)


def test_what_concerns_the_server_goes_to_all_groups_and_a_failure_wins() -> None:
    async def act(stage: Stage) -> None:
        async with stage.post("/flush_cache", {}) as reply:
            assert reply.status == 200
        async with stage.client.get(stage.url + "/flush_cache") as reply:
            assert reply.status == 200
        assert [len(group.asked) for group in stage.groups] == [2, 2]
        stage.groups[1].status = 403
        async with stage.post("/flush_cache", {}) as reply:
            assert (reply.status, await reply.json()) == (403, {"by": "one"})

    on_stage(act)


def test_a_request_is_found_by_its_id() -> None:
    async def act(stage: Stage) -> None:
        for name, status in ("one", 200), ("zero", 200), ("nobody", 404):
            async with stage.client.get(f"{stage.url}/v1/trserve/requests/{name}") as reply:
                assert reply.status == status

    on_stage(act)


def test_one_that_goes_away_does_not_hide_what_another_knows() -> None:
    async def act(stage: Stage) -> None:
        await stage.groups[0].stop()
        url = stage.url + "/v1/trserve/requests/"
        assert await status_of(stage.client.get(url + "one")) == 200
        assert stage.front.groups.all[0].losses == 1

    on_stage(act)


def test_what_one_that_goes_away_may_know_is_not_called_unknown() -> None:
    async def act(stage: Stage) -> None:
        await stage.groups[0].stop()
        url = stage.url + "/v1/trserve/requests/"
        assert await status_of(stage.client.get(url + "zero")) == 503

    on_stage(act)


def test_the_groups_see_the_fronts_key_and_not_the_clients() -> None:
    async def act(stage: Stage) -> None:
        async with stage.post("/v1/embeddings", {}, authorization="Bearer theirs") as reply:
            assert reply.status == 200
        (asked,) = [request for group in stage.groups for request in group.asked]
        assert asked.headers["authorization"] == "Bearer inner"

    on_stage(act, key="inner")


def test_a_drain_lets_open_answers_end_and_refuses_new_ones() -> None:
    async def act(stage: Stage) -> None:
        async with stage.post("/v1/completions", {"prompt": "a"}) as reply:
            assert await reply.content.readany() == EVENTS[0]
            stage.front.signals.put_nowait(15)
            while not stage.front.app.draining:
                await asyncio.sleep(0.01)
            async with stage.post("/v1/completions", {"prompt": "a"}) as refused:
                assert refused.status == 503
            for group in stage.groups:
                group.hold.set()
            assert await reply.read() == b"".join(EVENTS[1:])
        assert await asyncio.wait_for(asyncio.shield(stage.served), BOUND_S) == 0

    on_stage(act)


def test_metrics_and_the_list() -> None:
    async def act(stage: Stage) -> None:
        async with stage.post("/v1/embeddings", {}) as reply:
            group = reply.headers["x-trserve-group"]
        async with stage.client.get(stage.url + "/metrics") as reply:
            text = await reply.text()
        assert f'trserve_group_requests_total{{group="{group}"}} 1.0' in text
        assert 'trserve_group_ready{group="1"} 1.0' in text
        async with stage.client.get(stage.url + "/v1/trserve/groups") as reply:
            listed = await reply.json()
        assert [each["ready"] for each in listed["groups"]] == [True, True]

    on_stage(act)


def test_an_event_that_is_cut_off_is_ended_before_the_error() -> None:
    async def act(stage: Stage) -> None:
        for group in stage.groups:
            group.dies, group.begins = True, b'data: {"n'
        async with stage.post("/v1/completions", {"prompt": "a"}) as reply:
            assert await reply.content.readany() == b'data: {"n'
            for group in stage.groups:
                group.hold.set()
            assert (await reply.read()).startswith(b'\n\ndata: {"error":')

    on_stage(act)


def test_a_path_is_passed_on_as_it_was_written() -> None:
    async def act(stage: Stage) -> None:
        line = b"GET /v1/trserve/requests/a%3Fb%2F?q=%20 HTTP/1.1\r\n"
        await raw(stage, line + b"host: x\r\nconnection: close\r\n\r\n")
        asked = stage.groups[0].asked[0]
        assert asked.raw_path == "/v1/trserve/requests/a%3Fb%2F?q=%20"
        assert "accept-encoding" not in asked.headers

    on_stage(act)


def test_no_request_makes_a_group_count_as_lost() -> None:
    async def act(stage: Stage) -> None:
        for line in (b"OPTIONS * HTTP/1.1", b"GET http://[x HTTP/1.1", b"GET //@:x/ HTTP/1.1"):
            answer = await raw(stage, line + b"\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 "), line
        nested = b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}"
        async with stage.client.post(stage.url + "/v1/embeddings", data=nested) as reply:
            assert reply.status == 200
        assert [group.losses for group in stage.front.groups.all] == [0, 0]

    on_stage(act)


def test_http_1_0_gets_no_chunks() -> None:
    async def act(stage: Stage) -> None:
        for group in stage.groups:
            group.hold.set()
        head = b"POST /v1/completions HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}"
        head, _, body = (await raw(stage, head)).partition(b"\r\n\r\n")
        assert body == b"".join(EVENTS)
        assert b"transfer-encoding" not in head.lower()

    on_stage(act)


def test_what_the_endpoint_answers_itself_takes_the_key_too() -> None:
    async def act(stage: Stage) -> None:
        for path, status in ("/v1/trserve/groups", 401), ("/metrics", 401), ("/readyz", 200):
            async with stage.client.get(stage.url + path) as reply:
                assert reply.status == status
        theirs = {"authorization": "Bearer sk-theirs"}
        async with stage.client.get(stage.url + "/v1/trserve/groups", headers=theirs) as reply:
            assert reply.status == 200

    on_stage(act, endpoint=EndpointPlan(api_keys=(digest("sk-theirs"),), protect_metrics=True))


def test_the_admins_key_is_passed_on() -> None:
    async def act(stage: Stage) -> None:
        async with stage.post("/v1/trserve/routing", {}, **BOSS) as reply:
            assert reply.status == 200
        asked = [request for group in stage.groups for request in group.asked]
        assert [each.headers["authorization"] for each in asked] == ["Bearer boss"] * 2

    on_stage(act, key="inner")


def test_who_may_not_change_the_routing_keeps_nobody_waiting() -> None:
    async def act(stage: Stage) -> None:
        async with stage.front.app._standing.turn:
            for headers, status in ({}, 401), ({"authorization": "Bearer sk-theirs"}, 403):
                path = stage.url + "/v1/trserve/routing"
                async with stage.client.post(path, data=b"{}", headers=headers) as reply:
                    assert reply.status == status
        assert stage.total_asked == 0
        async with stage.client.options(stage.url + "/v1/trserve/routing") as reply:
            assert reply.status == 200, "a browser sends no key with it"

    admin, theirs = digest("boss"), digest("sk-theirs")
    on_stage(act, endpoint=EndpointPlan(api_keys=(theirs,), admin_key=admin))


async def goes_and_comes(stage: Stage, index: int, status: int = 200) -> FakeGroup:
    """A group is lost, and another begins in its place."""
    await stage.groups[index].stop()
    front = stage.front.groups
    front.lose(front.all[index], "gone")
    stage.groups[index] = group = FakeGroup("new")
    group.status = status
    return group


def test_a_group_that_comes_back_is_told_what_was_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before it serves, once, all of it; the key that it came with goes along."""
    monkeypatch.setattr(groups, "PROBE_EVERY_S", 0.01)
    changes = (
        {"router": {"tau": 0.5, "p": 0.1}, "batch_threshold": [1, 3]},
        {"router": {"tau": None}},
        {"batch_threshold": "auto"},
    )

    async def act(stage: Stage) -> None:
        async def change(body: object) -> int:
            return await status_of(stage.post("/v1/trserve/routing", body, **BOSS))

        assert await change(changes[0]) == 200
        new = await goes_and_comes(stage, 1)
        for body in changes[1:]:
            assert await change(body) == 200
        stage.groups[0].status = 400
        assert await change({"router": {"tau": "no number"}}) == 400  # in force nowhere
        stage.front.groups.move(1, await new.start(), "")
        await readiness(stage, 1)
        told = [(r.path, r.headers["authorization"]) for r in new.asked]
        assert told == [("/v1/trserve/routing", "Bearer boss")]
        assert orjson.loads(new.bodies[0]) == {
            "router": {"tau": None, "p": 0.1},
            "batch_threshold": "auto",
        }

    on_stage(act, key="inner")


@pytest.mark.parametrize("status", [400, 503])
def test_a_group_that_does_not_take_the_change(
    status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked again where it cannot yet; where it refuses, it serves and the log says so."""
    monkeypatch.setattr(groups, "PROBE_EVERY_S", 0.01)

    async def act(stage: Stage) -> None:
        async with change(stage) as reply:
            assert reply.status == 200
        new = await goes_and_comes(stage, 1, status)
        stage.front.groups.move(1, await new.start(), "")
        if status == 503:
            while len(new.asked) < 3:
                await asyncio.sleep(0.01)
            assert not stage.front.groups.all[1].ready
            new.status = 200
        await readiness(stage, 1)

    on_stage(act)
    errors = [each for each in caplog.records if each.levelname == "ERROR"]
    assert len(errors) == (status == 400)
    assert not errors or "group 1 refuses the routing change" in errors[0].getMessage()


def change(stage: Stage) -> aiohttp.client._RequestContextManager:
    return stage.post("/v1/trserve/routing", {"router": {"tau": 1}}, **BOSS)


async def is_asked(group: FakeGroup) -> None:
    while not group.asked:
        await asyncio.sleep(0.01)


def test_a_group_that_comes_back_during_the_first_change_is_told_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groups, "PROBE_EVERY_S", 0.01)

    async def act(stage: Stage) -> None:
        new = await goes_and_comes(stage, 1)
        stage.groups[0].hangs = True
        asks = asyncio.create_task(status_of(change(stage)))
        await is_asked(stage.groups[0])
        stage.front.groups.move(1, await new.start(), "")
        await asyncio.sleep(0.2)
        assert not stage.front.groups.all[1].ready, "it waits for the change to be over"
        stage.groups[0].hangs = False
        assert await asks == 200
        await readiness(stage, 1)
        assert new.bodies == [b'{"router":{"tau":1}}']

    on_stage(act)


def test_a_change_outlives_whoever_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One group took it, and the other went away instead: the next one there is told."""
    monkeypatch.setattr(groups, "PROBE_EVERY_S", 0.01)

    async def act(stage: Stage) -> None:
        stage.groups[1].hangs = True
        asks = asyncio.create_task(status_of(change(stage)))
        await is_asked(stage.groups[1])
        asks.cancel()
        await asyncio.gather(asks, return_exceptions=True)
        new = await goes_and_comes(stage, 1)
        stage.front.groups.move(1, await new.start(), "")
        await readiness(stage, 1)
        assert stage.groups[0].bodies == new.bodies == [b'{"router":{"tau":1}}']

    on_stage(act)


def test_a_group_that_could_not_change_serves_when_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "PROBE_EVERY_S", 0.01)

    async def act(stage: Stage) -> None:
        late = stage.groups[1]
        late.status = 503
        assert await status_of(change(stage)) == 503
        lost = stage.front.groups.all[1]
        assert not lost.ready and "did not change" in lost.detail
        late.status = 200
        await readiness(stage, 1)
        assert late.bodies[0] == late.bodies[-1] == b'{"router":{"tau":1}}'

    on_stage(act)


def test_what_no_group_took_holds_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "PROBE_EVERY_S", 0.01)

    async def act(stage: Stage) -> None:
        for group in stage.groups:
            group.status = 503
        assert await status_of(change(stage)) == 503
        assert all(group.ready for group in stage.front.groups.all)
        new = await goes_and_comes(stage, 1)
        stage.front.groups.move(1, await new.start(), "")
        await readiness(stage, 1)
        assert new.asked == []

    on_stage(act)


def test_one_that_takes_long_to_come_back_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others are asked meanwhile whether they are there, and it is lost like any that ends then."""
    monkeypatch.setattr(groups, "PROBE_EVERY_S", 0.01)
    monkeypatch.setattr(standing, "TELL_S", 0.5)

    async def act(stage: Stage) -> None:
        assert await status_of(change(stage)) == 200
        slow = await goes_and_comes(stage, 1)
        slow.hangs = True
        stage.front.groups.move(1, await slow.start(), "")
        await is_asked(slow)
        stage.groups[0].says = ["hello"]
        await readiness(stage, 0, ready=False)
        assert len(slow.asked) == 1, "within the time that it has for the first answer"
        slow.hangs = False
        await readiness(stage, 1)

    on_stage(act)


def test_a_group_that_comes_back_unchanged_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "PROBE_EVERY_S", 0.01)

    async def act(stage: Stage) -> None:
        new = await goes_and_comes(stage, 0)
        stage.front.groups.move(0, await new.start(), "")
        await readiness(stage, 0)
        assert new.asked == []

    on_stage(act)


def test_a_host_that_vanishes_is_given_up() -> None:
    """Nothing is sent to it while it answers, so that only the kernel's own question finds out."""
    with _watched_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ())) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        named = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle, every, count = (made.getsockopt(socket.IPPROTO_TCP, name) for name in named)
        assert idle + every * count <= 30
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000


def test_whoever_answers_strangely_is_no_group_and_ends_no_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another program may have got the port of a group that is gone."""
    monkeypatch.setattr(groups, "PROBE_EVERY_S", 0.01)

    async def act(stage: Stage) -> None:
        strange, front = stage.groups[1], stage.front.groups.all
        strange.says = ["hello"]
        while front[1].ready:
            await asyncio.sleep(0.01)
        assert front[0].ready
        strange.says = {"detail": "serving"}
        while not front[1].ready:
            await asyncio.sleep(0.01)

    on_stage(act)
