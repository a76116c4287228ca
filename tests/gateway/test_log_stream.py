"""A log whose reader stands still, is gone, or reads on."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from trserve.gateway.journal import use_format
from trserve.gateway.log_stream import LogStream

LINE = "x" * 99 + "\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):  # a test may have closed it
            os.close(end)


def ends_soon(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive(), "it waits for the reader"


def drain(end: int) -> str:
    os.set_blocking(end, False)
    found = b""
    while True:
        try:
            piece = os.read(end, 65536)
        except BlockingIOError:
            return found.decode()
        found += piece


def test_nobody_reads_and_nobody_waits(pipe: tuple[int, int]) -> None:
    stream = LogStream(pipe[1])
    fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, 4096 * 4)
    ends_soon(lambda: [stream.write(LINE) for _ in range(1000)])
    kept = drain(pipe[0]).splitlines()
    assert set(kept) == {LINE.strip()}
    assert 100 < len(kept) < 200
    stream.write("after\n")
    note, after = drain(pipe[0]).splitlines()
    assert f" {1000 - len(kept)} lines " in note
    assert after == "after"
    stream.write("more\n")
    assert drain(pipe[0]) == "more\n"


def test_a_text_longer_than_the_pipe_is_cut(pipe: tuple[int, int]) -> None:
    stream = LogStream(pipe[1])
    fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, 4096)
    ends_soon(lambda: stream.write("y" * 100_000))
    assert 0 < len(drain(pipe[0])) < 10_000


def test_a_reader_that_is_gone_changes_nothing(pipe: tuple[int, int]) -> None:
    stream = LogStream(pipe[1])
    os.close(pipe[0])
    assert stream.write(LINE) == len(LINE)
    os.close(pipe[1])
    assert stream.write(LINE) == len(LINE)


def test_the_note_is_json_where_the_log_is(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = LogStream(pipe[1])
    monkeypatch.setattr(sys, "stderr", stream)
    use_format("json")
    fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, 4096)
    ends_soon(lambda: [stream.write(LINE) for _ in range(100)])
    kept = len(drain(pipe[0]).splitlines())
    stream.write("{}\n")
    note = json.loads(drain(pipe[0]).splitlines()[0])
    assert (note["event"], note["lines"]) == ("left_out", 100 - kept)
