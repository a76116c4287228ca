"""Answers that take longer than their request allows: ended by the holder, cut where they stand."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.test_http import Gateway, play, request
from tests.gateway.test_metrics import LEAVES, Front, run
from trserve.errors import RequestError
from trserve.gateway import overdue
from trserve.gateway.requests import parse_completion
from trserve.ipc.baton import Finish, SlotState


def test_the_holder_ends_it_at_a_step_boundary(tmp_path: Path) -> None:
    async def story(f: Front) -> None:
        late = await f.submit(max_tokens=40, timeout_s=0.2)
        other = await f.submit(max_tokens=40, prompts=[[3, 2, 1]], timeout_s=600.0)
        f.work(3)
        assert not late.ended
        await asyncio.sleep(0.2)
        f.work(2)
        assert late.ended
        assert f.w.baton(late.slot).finish is Finish.NONE, "the slot is free again"
        assert not other.ended
        usage = late.usage()
        assert usage["completion_tokens"] == sum(usage["trserve"]["tokens"].values()) == 3
        assert f.metrics.finished == {"abort": 1}

    run(story, tmp_path)


def test_a_request_whose_time_is_over_when_it_comes_back_ends_there(tmp_path: Path) -> None:
    async def story(f: Front) -> None:
        late = await f.submit(max_tokens=40, timeout_s=0.2)
        for _ in range(40):
            if f.w.baton(late.slot).owner == 1:
                break
            f.w.workers[0].turn()
        assert f.w.baton(late.slot).owner == 1
        await asyncio.sleep(0.2)
        f.w.workers[0].turn()  # not its holder
        assert f.w.baton(late.slot).state is SlotState.LIVE
        f.work(3)
        assert late.ended
        f.w.check_nothing_held()

    run(story, tmp_path, router=LEAVES)


def test_it_is_not_ended_twice_when_its_client_leaves_too(tmp_path: Path) -> None:
    async def story(f: Front) -> None:
        late = await f.submit(max_tokens=40, timeout_s=0.05)
        f.work(2)
        await asyncio.sleep(0.05)
        f.w.slots.cancel(late.slot)
        f.work(3)
        assert late.ended
        assert f.w.slots.num_free == f.w.memory.layout.slots
        f.w.check_nothing_held()

    run(story, tmp_path)


def test_time_in_the_queue_counts(tmp_path: Path) -> None:
    async def story(f: Front) -> None:
        await f.submit(max_tokens=40)
        started = time.monotonic()
        with pytest.raises(RequestError) as refused:
            await f.submit(max_tokens=3, timeout_s=0.1)
        assert time.monotonic() - started == pytest.approx(0.1, abs=0.08)
        assert (refused.value.status, refused.value.code) == (504, "timeout")
        waiting = asyncio.ensure_future(f.submit(max_tokens=3, timeout_s=30.0))
        await asyncio.sleep(0)
        assert f.dispatcher.num_waiting == 1, "the one that gave up is gone"
        f.work(45)
        assert (await waiting) is not None

    run(story, tmp_path, slots=1)


@pytest.mark.parametrize("begun", [0, 3])
def test_it_ends_though_its_holder_does_nothing(
    tmp_path: Path, begun: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder's process is starting, say."""
    monkeypatch.setattr(overdue, "GRACE_S", 0.1)

    async def story(f: Front) -> None:
        late = await f.submit(max_tokens=40, timeout_s=0.2)
        other = await f.submit(max_tokens=40, timeout_s=600.0)
        f.work(begun)
        await asyncio.sleep(0.25)
        assert not late.ended, "its holder may still do it"
        await asyncio.sleep(0.1)
        assert (late.ended, late.finish_reason, late.end_reason) == (True, "abort", "abort")
        assert late.usage()["completion_tokens"] == begun
        assert (other.ended, f.dispatcher.num_closing) == (False, 1)
        f.work(45)
        assert other.finish_reason == "length"
        f.w.check_nothing_held()

    run(story, tmp_path)


def test_an_abort_ends_it_though_its_holder_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overdue, "GRACE_S", 0.1)

    async def story(f: Front) -> None:
        unwanted = await f.submit(max_tokens=40)
        f.work(2)
        f.dispatcher.abort(unwanted)
        assert not unwanted.ended
        await asyncio.sleep(0.2)
        assert unwanted.finish_reason == "abort"
        assert unwanted.usage()["completion_tokens"] == 2
        f.work(3)
        f.w.check_nothing_held()

    run(story, tmp_path)


def test_a_client_that_reads_slowly_is_told_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overdue, "GRACE_S", 0.05)

    async def story(f: Front) -> None:
        late = await f.submit(max_tokens=40, timeout_s=0.05)
        f.work(2)
        late._sink.paused = True
        await asyncio.sleep(0.2)
        assert not late.ended
        late._sink.paused = False
        await asyncio.sleep(0.1)
        assert late.finish_reason == "abort"
        f.work(3)
        f.w.check_nothing_held()

    run(story, tmp_path)


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_gets_what_there_is_and_why(tmp_path: Path, stream: bool) -> None:
    async def story(g: Gateway) -> None:
        reader, writer = await g.connect()
        writer.write(
            request(version="1.0", stream=stream, max_tokens=50, trserve={"timeout_s": 0.2})
        )
        await g.until(lambda: g.dispatcher.num_live == 1)
        g.work(4)
        await asyncio.sleep(0.2)
        g.work(2)
        _, _, body = (await reader.read()).partition(b"\r\n\r\n")
        parts = [body] if not stream else [p[6:] for p in body.split(b"\n\n") if b"choices" in p]
        choices: list[Any] = [json.loads(part)["choices"][0] for part in parts]
        assert "".join(choice["text"] for choice in choices) == "AAAA"
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("abort", "timeout")
        writer.close()
        await g.check_nothing_left()

    play(story, tmp_path)


@pytest.mark.parametrize("given", [0, -1, 86_401, 1e400, "5"])
def test_a_limit_that_is_none_is_refused(given: Any) -> None:
    body = json.dumps({"prompt": "x", "trserve": {"timeout_s": given}}).replace("Infinity", "1e999")
    with pytest.raises(RequestError) as refused:
        parse_completion(body.encode())
    assert refused.value.param == "trserve.timeout_s"


@pytest.mark.parametrize(("given", "found"), [(None, None), (2, 2.0), (0.001, 0.001)])
def test_limits_are_seconds(given: float | None, found: float | None) -> None:
    body = json.dumps({"prompt": "x", "trserve": {"timeout_s": given}}).encode()
    assert parse_completion(body).timeout_s == found
