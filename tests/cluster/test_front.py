"""What the process in front of the groups does by itself: drain, keys, limits, its own answers."""

from __future__ import annotations

import asyncio
import time

import orjson
import pytest

from tests.cluster.stage import BOUND_S, EVENTS, STATS, Stage, on_stage, raw, status_of
from trserve.cluster import forwarding
from trserve.endpoint_plan import EndpointPlan
from trserve.gateway import page_routes, stats_stream
from trserve.keys import digest

THEIRS = {"authorization": "Bearer sk-theirs"}
LOCKED = EndpointPlan(api_keys=(digest("sk-theirs"),), allowed_origins=("https://page",))
SOON_S = 3.0


async def end_of(stage: Stage) -> tuple[int, float]:
    """The exit code after a SIGTERM, and how long it took."""
    began = time.monotonic()
    stage.front.signals.put_nowait(15)
    code = await asyncio.wait_for(asyncio.shield(stage.served), BOUND_S)
    return code, time.monotonic() - began


def test_an_open_stream_of_statistics_holds_up_no_drain() -> None:
    """Its group ends it only once that is told to drain, which happens after the endpoint's end."""
    assert forwarding.WATCH == STATS == stats_stream.PATH

    async def act(stage: Stage) -> None:
        async with stage.client.get(stage.url + STATS) as reply:
            assert await reply.content.readany() == EVENTS[0]
            assert stage.front.app.open_requests == 0, "it is no work"
            code, took = await end_of(stage)
            assert (code, await reply.read()) == (0, b""), "and it ends as a whole answer does"
        assert took < SOON_S

    on_stage(act)


def test_a_stream_of_statistics_that_has_not_begun_holds_up_no_drain() -> None:
    async def act(stage: Stage) -> None:
        for group in stage.groups:
            group.hangs = True
        asked = asyncio.create_task(status_of(stage.client.get(stage.url + STATS)))
        while not stage.total_asked:
            await asyncio.sleep(0.01)
        code, took = await end_of(stage)
        assert (code, await asked) == (0, 503) and took < SOON_S
        for group in stage.groups:
            group.hangs = False

    on_stage(act)


def test_a_body_that_never_ends_holds_up_no_drain() -> None:
    async def act(stage: Stage) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"
        asked = asyncio.create_task(raw(stage, head))
        while not stage.front._state.tasks:
            await asyncio.sleep(0.01)
        code, took = await end_of(stage)
        assert (code, await asked) == (0, b"") and took < SOON_S

    on_stage(act)


@pytest.mark.parametrize(
    ("late", "said"),
    [
        (b"GET /livez HTTP/1.1\r\n", b"headers took too long"),
        (
            b"POST /v1/x HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{",
            b"body took too long",
        ),
    ],
)
def test_who_is_too_slow_is_refused(late: bytes, said: bytes) -> None:
    async def act(stage: Stage) -> None:
        answer = await raw(stage, late)
        assert answer.startswith(b"HTTP/1.1 408 ") and said in answer
        assert stage.total_asked == 0

    on_stage(act, endpoint=EndpointPlan(header_timeout_s=0.2, body_timeout_s=0.2))


def test_who_has_no_key_is_refused_before_the_body() -> None:
    async def act(stage: Stage) -> None:
        for key in (b"", b"authorization: Bearer sk-wrong\r\n"):
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%bcontent-length: 9\r\n\r\n{" % key
            reader, writer = await asyncio.open_connection(*stage.address)
            writer.write(head)
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SOON_S)
            assert answer.startswith(b"HTTP/1.1 401 ") and b"www-authenticate: Bearer" in answer
            writer.close()
        assert stage.total_asked == 0
        assert await status_of(stage.post("/v1/embeddings", {}, **THEIRS)) == 200

    on_stage(act, endpoint=LOCKED)


@pytest.mark.parametrize(("method", "path"), [("OPTIONS", "/v1/completions"), ("POST", "/")])
def test_what_is_open_to_anybody_takes_no_body_and_leaves_no_trace(method: str, path: str) -> None:
    assert path == "/v1/completions" or path in page_routes.PATHS

    async def act(stage: Stage) -> None:
        for group in stage.groups:
            group.hold.set()
        headers = {"x-session-id": "mine"}
        body = orjson.dumps({"prompt": "x" * 1000, "session_id": "mine"})
        asked = stage.client.request(method, stage.url + path, data=body, headers=headers)
        assert await status_of(asked) == 200
        assert [body for group in stage.groups for body in group.bodies] == [b""]
        affinity = stage.front.app._affinity
        assert not affinity._sessions and not affinity._prefixes
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{{"
        reader, writer = await asyncio.open_connection(*stage.address)
        writer.write(head.encode())
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), SOON_S)
        assert answer.startswith(b"HTTP/1.1 200 "), "nor waits for one"
        writer.close()

    on_stage(act, endpoint=LOCKED)


def test_a_deep_check_asks_every_group_and_a_failure_wins() -> None:
    async def act(stage: Stage) -> None:
        url = stage.url + "/health?deep=1"
        assert await status_of(stage.client.get(url)) == 401
        assert stage.total_asked == 0
        assert await status_of(stage.client.get(url, headers=THEIRS)) == 200
        asked = [each for group in stage.groups for each in group.asked]
        assert [each.path_qs for each in asked] == ["/health?deep=1"] * 2
        stage.groups[1].status = 503
        async with stage.client.get(url, headers=THEIRS) as reply:
            assert (reply.status, await reply.json()) == (503, {"by": "one"})
        assert await status_of(stage.client.get(stage.url + "/health")) == 200
        assert all(group.ready for group in stage.front.groups.all)

    on_stage(act, endpoint=LOCKED)


def test_a_browser_may_ask_beforehand_without_a_key() -> None:
    async def act(stage: Stage) -> None:
        headers = {"origin": "https://page", "access-control-request-headers": "authorization"}
        async with stage.client.options(stage.url + "/v1/trserve/groups", headers=headers) as reply:
            assert reply.status == 204
            assert reply.headers["access-control-allow-origin"] == "https://page"
            assert reply.headers["access-control-allow-methods"] == "GET, OPTIONS"
            assert reply.headers["access-control-allow-headers"] == "authorization"
        assert stage.total_asked == 0
        for path in ("/flush_cache", "/v1/trserve/requests/x"):
            async with stage.client.options(stage.url + path, headers=headers) as reply:
                assert "x-trserve-group" in reply.headers, "the answer of one, with its headers"

    on_stage(act, endpoint=LOCKED)


def test_own_answers_and_errors_have_an_id_and_say_which_pages_may_read_them() -> None:
    async def act(stage: Stage) -> None:
        ours = {"origin": "https://page", "x-request-id": "mine"}
        for method, path, key, status in (
            ("GET", "/readyz", {}, 200),
            ("GET", "/v1/trserve/groups", {}, 401),
            ("POST", "/v1/completions", {}, 401),
            ("POST", "/abort_request", THEIRS, 200),
            ("GET", "/v1/trserve/requests/nobody", THEIRS, 404),
        ):
            asked = stage.client.request(method, stage.url + path, headers={**ours, **key})
            async with asked as reply:
                assert reply.status == status
                assert reply.headers.getall("x-request-id") == ["mine"]
                assert reply.headers["access-control-allow-origin"] == "https://page"
        async with stage.client.get(
            stage.url + "/livez", headers={"x-request-id": "no label"}
        ) as r:
            assert len(r.headers["x-request-id"]) == 32
            assert "access-control-allow-origin" not in r.headers

    for_abort = {"aborted": 0}

    async def with_counts(stage: Stage) -> None:
        for group in stage.groups:
            group.adds = for_abort
        await act(stage)

    on_stage(with_counts, endpoint=LOCKED)


def test_groups_know_a_request_by_the_same_id() -> None:
    async def act(stage: Stage) -> None:
        for label, is_one in ("mine", True), ("no label", False):
            headers = {"x-request-id": label}
            async with stage.client.get(stage.url + "/flush_cache", headers=headers) as reply:
                told = reply.headers["x-request-id"]
            assert (told == label) is is_one
            ids = {group.asked.pop().headers["x-request-id"] for group in stage.groups}
            assert ids == {told}

    on_stage(act)


def test_who_is_refused_leaves_a_line_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    """No group sees it. What a group answers it logs itself."""

    async def act(stage: Stage) -> None:
        assert await status_of(stage.post("/v1/embeddings", {})) == 401
        assert await status_of(stage.post("/v1/embeddings", {}, **THEIRS)) == 200

    on_stage(act, endpoint=LOCKED)
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "/v1/embeddings" in each]
    assert " POST /v1/embeddings 401 " in line


def test_the_counts_of_all_groups_are_one() -> None:
    async def act(stage: Stage) -> None:
        for count, group in enumerate(stage.groups, 1):
            group.adds = {"aborted": count}
        async with stage.post("/abort_request", {"abort_all": True}) as reply:
            assert (reply.status, await reply.json()) == (200, {"aborted": 3})
        stage.groups[1].status = 400
        assert await status_of(stage.post("/abort_request", {})) == 400

    on_stage(act)
