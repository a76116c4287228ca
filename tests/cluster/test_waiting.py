"""Groups in which requests wait, as for a worker that is started again, before one endpoint."""

from __future__ import annotations

import asyncio

import pytest

from tests.cluster.stage import BOSS, FakeGroup, Stage, on_stage, readiness, status_of
from trserve.cluster import groups

RESTARTS = {"detail": "a worker is being restarted", "takes_requests": True}
LOADS = {"detail": "the models are still loading", "takes_requests": False}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "PROBE_EVERY_S", 0.01)


async def unready(stage: Stage, says: dict[str, object], *indices: int) -> None:
    for index in indices:
        stage.groups[index].says, stage.groups[index].readiness = says, 503
        await readiness(stage, index, ready=False)


def test_requests_wait_in_a_group_where_no_other_is_ready() -> None:
    async def act(stage: Stage) -> None:
        await unready(stage, RESTARTS, 0, 1)
        assert await status_of(stage.post("/v1/embeddings", {"input": "a"})) == 200
        async with stage.client.get(stage.url + "/readyz") as reply:
            assert reply.status == 503 and "being restarted" in (await reply.json())["detail"]
        for name, status in ("one", 200), ("nobody", 404):
            asked = stage.client.get(f"{stage.url}/v1/trserve/requests/{name}")
            assert await status_of(asked) == status
        assert await status_of(stage.post("/flush_cache", {})) == 200
        assert [each.losses for each in stage.front.groups.all] == [0, 0]

    on_stage(act)


def test_a_ready_group_goes_first() -> None:
    async def act(stage: Stage) -> None:
        async def by(session: str) -> str:
            async with stage.post("/v1/embeddings", {"session_id": session}) as reply:
                return str((await reply.json())["by"])

        names = [group.name for group in stage.groups]
        waits = names.index(await by("mine"))
        await unready(stage, RESTARTS, waits)
        assert {await by(str(n)) for n in range(5)} == {names[1 - waits]}
        assert waits in stage.front.app._affinity._sessions.values(), "it has lost nothing"
        stage.groups[waits].readiness = 200
        await readiness(stage, waits)
        assert await by("mine") == names[waits]

    on_stage(act)


@pytest.mark.parametrize("says", [LOADS, {"detail": "?"}, {"takes_requests": "true"}])
def test_one_that_takes_none_gets_none(says: dict[str, object]) -> None:
    async def act(stage: Stage) -> None:
        await unready(stage, says, 0, 1)
        assert await status_of(stage.post("/v1/embeddings", {})) == 503
        asked = stage.client.get(stage.url + "/v1/trserve/requests/one")
        async with asked as reply:
            assert reply.status == 503
            assert "no group of workers is ready" in (await reply.json())["error"]["message"]
        assert stage.total_asked == 0
        assert [each.losses for each in stage.front.groups.all] == [1, 1]

    on_stage(act)


def test_one_that_cannot_be_reached_takes_none_any_more() -> None:
    async def act(stage: Stage) -> None:
        await unready(stage, RESTARTS, 0, 1)
        for group in stage.groups:
            await group.stop()
        assert await status_of(stage.post("/v1/embeddings", {})) == 503
        assert not any(each.is_there for each in stage.front.groups.all)

    on_stage(act)


def test_one_that_comes_back_is_told_what_was_changed_before_requests_wait_in_it() -> None:
    async def act(stage: Stage) -> None:
        change = {"router": {"tau": 1}}
        assert await status_of(stage.post("/v1/trserve/routing", change, **BOSS)) == 200
        front = stage.front.groups
        await stage.groups[1].stop()
        front.lose(front.all[1], "gone")
        stage.groups[1] = new = FakeGroup("new")
        new.says, new.readiness, new.hangs = RESTARTS, 503, True
        front.move(1, await new.start(), "")
        while not new.asked:
            await asyncio.sleep(0.01)
        assert not front.all[1].is_there
        new.hangs = False
        while not front.all[1].waits:
            await asyncio.sleep(0.01)
        assert new.bodies == [b'{"router":{"tau":1}}']
        new.readiness = 200
        await readiness(stage, 1)
        assert len(new.bodies) == 1, "it was there all along"

    on_stage(act)
