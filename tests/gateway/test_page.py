"""The page's files and headers, the stream of statistics, and what a client may choose from."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gateway.stack import new_plan
from tests.gateway.test_http import QUIET, Gateway, play
from trserve.config_endpoint import EndpointConfig
from trserve.endpoint_plan import EndpointPlan, plan_endpoint
from trserve.gateway import stats_stream
from trserve.gateway.about import About
from trserve.gateway.app import Phase
from trserve.gateway.page_routes import FOLDER, PATHS, page_routes
from trserve.gateway.stats import Stats, by_width, quantile
from trserve.gateway.stats_stream import Moment, StatsStream
from trserve.keys import digest

KEYED = EndpointPlan(log_requests=False, api_keys=(digest("one"),))
ROOM_BYTES = 150_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


async def exchange(
    g: Gateway, path: str, headers: str = "", method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body, on a connection of its own."""
    reader, writer = await g.connect()
    writer.write(
        f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n".encode()
    )
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    first, *lines = head.decode().split("\r\n")
    pairs = (line.split(": ", 1) for line in lines)
    return int(first.split()[1]), {name.lower(): value for name, value in pairs}, body


# ---- files ----


def test_the_files_are_small_and_name_no_other_origin() -> None:
    files = [file for file in FOLDER.iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= ROOM_BYTES
    assert len(files) == len(PATHS), "a file of a type that is not served"
    for file in files:
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(src|href)=[\"'](https?:)?//", text), file.name
        assert "@import" not in text
        assert not re.search(r"\b(eval|innerHTML|outerHTML|document\.write)\b", text), file.name


def test_markup_has_no_script_and_no_style_of_its_own() -> None:
    text = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)", text)
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=", text)
    for name in re.findall(r"(?:src|href)=\"page/([^\"]+)\"", text):
        assert (FOLDER / name).is_file(), name


def test_files_are_served_with_their_headers_and_without_a_key(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        g.app.add_routes(page_routes())
        for path in sorted(PATHS):
            status, headers, body = await exchange(g, path)
            name = "index.html" if path == "/" else path.rpartition("/")[2]
            assert (status, body) == (200, (FOLDER / name).read_bytes())
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"] == "no-cache"
            kind = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
            assert headers["content-type"].startswith(kind.get(name.rpartition(".")[2], "image/"))
            again = f"if-none-match: W/{headers['etag']}\r\n"
            status, headers, body = await exchange(g, path, again)
            assert (status, body) == (304, b"")
            assert "content-length" not in headers
            status, _, body = await exchange(g, path, 'if-none-match: "other"\r\n', "HEAD")
            assert (status, body) == (200, b"")
        assert (await exchange(g, "/page/../access.py"))[0] in (401, 404)
        assert (await exchange(g, "/v1/models"))[0] == 401
        assert (await exchange(g, "/", method="POST"))[0] in (401, 405)

    play(story, folder, endpoint=KEYED)


def test_without_it_there_is_no_page(folder: Path) -> None:
    plan = plan_endpoint(EndpointConfig(ui=False))
    assert not plan.ui and plan_endpoint(EndpointConfig()).ui

    async def story(g: Gateway) -> None:
        for path in sorted(PATHS):
            assert (await exchange(g, path))[0] == 404
        assert g.lines == []

    play(story, folder, endpoint=QUIET)

    async def keyed(g: Gateway) -> None:
        assert (await exchange(g, "/"))[0] == 401

    hidden = EndpointPlan(log_requests=False, api_keys=(digest("one"),), ui=False)
    play(keyed, folder, endpoint=hidden)


# ---- statistics ----


def add_stream(g: Gateway, every_s: float = 0.01) -> StatsStream:
    def moment() -> Moment:
        phase = g.app.phase
        return Moment(phase.name.lower(), phase.value, phase is Phase.DRAINING)

    stream = StatsStream(Stats(g.service, g.w.slab, g.dispatcher), moment, every_s)
    g.app.add_routes(stream.table)
    return stream


async def listen(g: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await g.connect()
    writer.write(f"GET {stats_stream.PATH} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head and b"text/event-stream" in head
    return reader, writer


async def event(reader: asyncio.StreamReader) -> dict[str, Any]:
    line = b""
    while not line.startswith(b"data: "):
        line = await reader.readline()
        assert line, "the stream ended"
    found: dict[str, Any] = json.loads(line[len(b"data: ") :])
    return found


def test_listeners_hear_what_the_server_does(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        stream = add_stream(g)
        reader, writer = await listen(g)
        first = await event(reader)
        assert (first["phase"], first["tokens_per_s"], first["share"]) == ("serving", 0, None)
        assert first["latency_ms"]["first_token"] == {
            "count": 0,
            "p50": None,
            "p90": None,
            "p99": None,
        }
        body = b'{"prompt":[1,2,3],"max_tokens":6,"temperature":0}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        asker, asking = await g.connect()
        asking.write(head.encode() + body)
        await g.until(lambda: g.dispatcher.num_live == 1)
        g.work(20)
        assert b'"text"' in await asker.readuntil(b'"usage"')
        asking.close()
        heard = [await event(reader) for _ in range(3)]
        written = sum(each["tokens_per_s"] * each["interval_s"] for each in heard)
        assert written == pytest.approx(6, abs=0.5)
        latency = heard[-1]["latency_ms"]["first_token"]
        assert latency["count"] == 1 and latency["p50"] <= latency["p99"]
        model = heard[-1]["models"][0]
        assert {"running", "pending", "batch_threshold", "openings", "rows"} <= set(model)
        assert {each["share"] for each in heard} <= {0.0, None}
        writer.close()
        await g.until(lambda: not stream._listeners)
        await g.check_nothing_left()

    play(story, folder)


def test_listeners_are_bounded_and_end_in_a_drain(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(stats_stream, "MOST_LISTENERS", 2)

    async def story(g: Gateway) -> None:
        add_stream(g)
        pairs = [await listen(g) for _ in range(2)]
        status, headers, body = await exchange(g, stats_stream.PATH)
        assert status == 429 and headers["retry-after"] == "5"
        assert json.loads(body)["error"]["code"] == "too_many_listeners"
        assert (await exchange(g, stats_stream.PATH, method="HEAD"))[0] == 200
        g.app.phase = Phase.DRAINING
        for reader, writer in pairs:
            rest = await reader.readuntil(b"\r\n0\r\n\r\n")
            assert b'"phase":"draining"' in rest
            writer.close()
        await g.check_nothing_left()

    play(story, folder)


def test_a_listener_after_all_others_left_hears_no_old_tokens(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        stream = add_stream(g)
        for _ in range(2):
            reader, writer = await listen(g)
            assert (await event(reader))["interval_s"] == 0
            assert (await event(reader))["interval_s"] > 0
            writer.close()
            await g.until(lambda: not stream._listeners and stream._timer is None)

    play(story, folder)


def test_a_quantile_lies_within_its_bucket() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert quantile(bounds, [0, 0, 0, 0], 0.5) is None
    assert quantile(bounds, [10, 0, 0, 0], 0.5) == pytest.approx(0.5)
    assert quantile(bounds, [0, 4, 4, 0], 0.5) == pytest.approx(2.0)
    assert quantile(bounds, [0, 4, 4, 0], 0.75) == pytest.approx(3.0)
    assert quantile(bounds, [0, 0, 0, 3], 0.99) == 4.0


def test_widths_are_counted_once_each() -> None:
    steps = np.zeros(600, np.int64)
    steps[[1, 2, 3, 4, 300, 599]] = 5, 1, 2, 3, 4, 1
    assert by_width(steps) == {"1": 5, "2": 1, "4": 5, "more": 5}
    assert by_width(np.array([0, 2])) == {"1": 2}


# ---- what there is to choose from ----


def test_models_and_parameters_are_told_without_an_admin_key(folder: Path) -> None:
    async def story(g: Gateway) -> None:
        async def in_force() -> dict[str, float | None]:
            return {"tau": 0.25}

        loaded: list[int] = []
        g.app.add_routes(About(g.service, in_force, lambda: bool(loaded)).table)
        told = json.loads((await exchange(g, "/v1/trserve/about"))[2])
        assert told["router"] == {"name": "none", "known": False, "parameters": []}
        assert [model["name"] for model in told["models"]] == ["m0", "m1"]
        loaded.append(1)
        told = json.loads((await exchange(g, "/v1/trserve/about"))[2])
        assert told["router"]["known"] and told["router"]["parameters"] == []
        tau = {"name": "tau", "help": "h", "default": 0.1, "minimum": 0.0, "value": 0.1}
        hidden = {"name": "target_share", "help": "h", "default": 0.0, "per_request": False}
        g.service.set_router_parameters([tau, {**hidden, "value": 0.0}])
        told = json.loads((await exchange(g, "/v1/trserve/about"))[2])
        expected = {"name": "tau", "help": "h", "value": 0.25, "minimum": 0.0, "maximum": None}
        assert told["router"]["parameters"] == [expected]
        assert told["max_model_len"] == min(m.max_model_len for m in new_plan(folder).models)

    play(story, folder)
