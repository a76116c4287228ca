"""Whose requests an abort ends, and which answers of a batch."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.test_http import Gateway, play
from trserve.endpoint_plan import EndpointPlan
from trserve.keys import digest

KEYS = EndpointPlan(
    log_requests=False, api_keys=(digest("one"), digest("two")), admin_key=digest("boss")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


async def post(g: Gateway, path: str, key: str = "one", **fields: Any) -> tuple[int, Any]:
    """Status and JSON (or text) of one request with ``key``."""
    reader, writer = await g.connect()
    data = json.dumps(fields).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {key}\r\n"
    )
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    head_bytes, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head_bytes.split()[1]), json.loads(answer) if answer[:1] in b"{[" else answer


async def abort(g: Gateway, key: str = "one", **wanted: Any) -> int:
    status, body = await post(g, "/abort_request", key, **wanted)
    assert status == 200
    count: int = body["aborted"]
    return count


async def worked(g: Gateway, task: asyncio.Task[tuple[int, Any]]) -> tuple[int, Any]:
    """The result of ``task``, the workers taking turns meanwhile."""
    while not task.done():
        g.work()
        await asyncio.sleep(0)
    return task.result()


def generate(g: Gateway, **fields: Any) -> asyncio.Task[tuple[int, Any]]:
    params = {"max_new_tokens": 9, "temperature": 0}
    return asyncio.create_task(post(g, "/generate", sampling_params=params, **fields))


def reasons(body: Any) -> list[str]:
    return [each["meta_info"]["finish_reason"]["type"] for each in body]


@pytest.mark.parametrize("wanted", [{"rid": "mine"}, {"abort_all": True}], ids=str)
def test_a_key_ends_its_own_requests_alone(folder: Path, wanted: dict[str, Any]) -> None:
    async def story(g: Gateway) -> None:
        open_one = generate(g, input_ids=[1], rid="mine")
        await g.until(lambda: g.dispatcher.num_live == 1)
        assert await abort(g, "two", **wanted) == 0
        assert await abort(g, "one", **wanted) == 1
        assert reasons([(await worked(g, open_one))[1]]) == ["abort"]
        await g.check_nothing_left()

    play(story, folder, endpoint=KEYS)


def test_the_administrator_ends_anybodys(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        open_one = generate(g, input_ids=[1])
        await g.until(lambda: g.dispatcher.num_live == 1)
        assert await abort(g, "boss", abort_all=True) == 1
        assert reasons([(await worked(g, open_one))[1]]) == ["abort"]

    play(story, folder, endpoint=KEYS)


@pytest.mark.parametrize(
    ("rids", "rid", "ended"),
    [
        ("x", "x", "aborted aborted"),
        ("x", "x_1", "length abort"),
        (["a", "b"], "a", "abort length"),
        (["a_b", "b"], "a", None),
    ],
)
@pytest.mark.parametrize("waits", [False, True])
def test_of_a_batch_those_end_that_are_named(
    folder: Path, rids: Any, rid: str, ended: str | None, waits: bool
) -> None:
    async def story(g: Gateway) -> None:
        held = generate(g, input_ids=[[5]] * 4) if waits else None
        await g.until(lambda: g.dispatcher.num_live == (4 if waits else 0))
        batch = generate(g, input_ids=[[1], [2]], rid=rids)
        await g.until(
            lambda: g.dispatcher.num_waiting == 1 if waits else g.dispatcher.num_live == 2
        )
        assert await abort(g, rid=rid) == (0 if ended is None else 1)
        status, body = await worked(g, batch)
        if waits and ended == "aborted aborted":
            assert (status, body["error"]["code"]) == (400, "aborted")
        else:
            expected = (ended or "length length").replace("aborted", "abort")
            assert reasons(body) == expected.split()
        if held is not None:
            assert reasons((await worked(g, held))[1]) == ["length"] * 4
        await g.check_nothing_left()

    play(story, folder)


def test_a_stream_that_got_no_answer_has_failed(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        held = generate(g, input_ids=[[5]] * 4)
        await g.until(lambda: g.dispatcher.num_live == 4)
        log = g.app._answering.log
        waits = generate(g, input_ids=[1], rid="w", stream=True)
        await g.until(lambda: g.dispatcher.num_waiting == 1)
        await asyncio.sleep(0.1)  # comments keep the stream alive, which has begun
        assert await abort(g, rid="w") == 1
        status, _ = await waits
        assert status == 200
        assert [said["status"] for said in log._ended.values()] == ["failed"]
        await worked(g, held)

    play(story, folder, endpoint=EndpointPlan(log_requests=False, sse_keep_alive_s=0.02))
