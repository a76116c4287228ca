"""A group's server as a child: small programs in its place."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest

from trserve.cluster import group_process
from trserve.cluster.group_process import GroupProcess, Status

BOUND_S = 20.0
READY = "trserve ready http://127.0.0.1:1 models=a,b device=cpu"


def running(program: str) -> GroupProcess:
    process = GroupProcess([], {})
    process._command = [sys.executable, "-c", program]
    return process


def until(process: GroupProcess, met: Callable[[Status], bool]) -> Status:
    deadline = time.monotonic() + BOUND_S
    while not met(status := process.tick()):
        assert time.monotonic() < deadline, status
        time.sleep(0.01)
    return status


def test_what_is_wrong_for_good_is_said_with_the_last_words() -> None:
    """However much it said before, and although it ends at once afterwards."""
    process = running(
        "import os, sys\n"
        "sys.stderr.write('loading\\n' * 1000 + '--models x: is not here\\n'); sys.stderr.flush()\n"
        "os._exit(3)"
    )
    status = until(process, lambda each: "ended" in each.detail)
    assert status == Status("", "", "ended with 3: --models x: is not here", 3)
    assert process.stop(0.0) is None


def test_one_that_has_served_is_started_again_whatever_it_ends_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_process, "LONGEST_PAUSE_S", 0.0)
    process = running(
        f"import sys, time; print({READY!r}, flush=True); time.sleep(0.3); sys.exit(2)"
    )
    assert until(process, lambda each: bool(each.url)).url == "http://127.0.0.1:1"
    process._command[-1] = "raise SystemExit(3)"
    status = until(process, lambda each: "ended with 3" in each.detail)
    assert (status.url, status.exit_code) == ("", None)
    assert "started again" in status.detail
    process._command[-1] = f"import time; print({READY!r}, flush=True); time.sleep(60)"
    assert until(process, lambda each: bool(each.url)).ready_line == READY
    assert process.stop(5.0) == -15


def test_what_is_no_text_does_not_stop_the_reading() -> None:
    """A pipe that nobody reads fills, and whoever writes to it hangs."""
    process = running(
        "import sys, time\n"
        "sys.stderr.buffer.write(b'\\xff\\xfe\\n' + b'x' * 200_000 + b'\\nits last words\\n')\n"
        "sys.stderr.flush(); sys.exit(5)"
    )
    assert "its last words" in until(process, lambda each: "ended" in each.detail).detail
    assert process.stop(0.0) is None
