"""Children of the launcher, as real processes: reaped once, described, killed whatever they do."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from trserve.children import Child, Children
from trserve.errors import StartFailedError
from trserve.ipc.child import ChildArguments

LONG_S = 20.0
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); input()"


def start(identity: str, code: str) -> Child:
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    return Child(identity, f"title of {identity}", process, os.pidfd_open(process.pid))


@pytest.fixture
def children() -> Iterator[Children]:
    children = Children()
    yield children
    for child in children:
        child.process.kill()
        child.process.wait()
        child.process.communicate()


def ended(child: Child) -> bool:
    return bool(select.select([child.pidfd], [], [], LONG_S)[0])


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("raise SystemExit(7)", "ended with exit code 7"),
        ("pass", "ended with exit code 0"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
    ],
)
def test_an_end_is_reaped_once_and_described(children: Children, code: str, end: str) -> None:
    child = start("worker-0", code)
    children.add(child)
    assert children.by_identity("worker-0") is child
    assert ended(child)
    assert children.reap(child.pidfd) is child
    assert child.describe_end() == end
    assert children.reap(child.pidfd) is None
    assert children.by_identity("worker-0") is None
    assert len(children) == 0
    child.process.communicate()


def test_nobody_survives_kill_all(children: Children) -> None:
    deaf = [start(f"worker-{n}", DEAF) for n in range(2)]
    for child in deaf:
        children.add(child)
        assert child.process.stdout is not None
        child.process.stdout.readline()
    children.kill_all()
    assert len(children) == 0
    assert {child.process.returncode for child in deaf} == {-signal.SIGKILL}
    children.kill_all()
    for child in deaf:
        child.process.communicate()


def test_one_that_the_kernel_keeps_is_given_up(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, other = start("worker-0", DEAF), start("worker-1", DEAF)
    for child in (stuck, other):
        children.add(child)

    def wait(timeout: float | None = None) -> int:
        raise subprocess.TimeoutExpired("worker-0", timeout or 0)

    with monkeypatch.context() as patch:
        patch.setattr(stuck.process, "wait", wait)
        children.kill_all()
    assert len(children) == 0
    assert other.process.returncode == -signal.SIGKILL
    stuck.process.communicate()
    other.process.communicate()


@pytest.mark.parametrize("call", ["spawn", "pidfd_open"])
def test_a_start_that_the_system_refuses_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    spawned: list[subprocess.Popen[bytes]] = []

    def refuse(*_: object, **__: object) -> Any:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def spawn(*_: object, **__: object) -> subprocess.Popen[bytes]:
        spawned.append(subprocess.Popen([sys.executable, "-c", DEAF], stdin=subprocess.PIPE))
        return spawned[-1]

    monkeypatch.setattr("trserve.children.spawn", refuse if call == "spawn" else spawn)
    if call == "pidfd_open":
        monkeypatch.setattr(os, "pidfd_open", refuse)
    arguments = ChildArguments(0, 0, "", 0, (), 0)
    with pytest.raises(StartFailedError, match=r"worker 1 .*cannot be started: Resource temp"):
        Child.start("worker-1", "worker 1 (small)", "no.module", arguments, {})
    assert [process.returncode for process in spawned] == [-signal.SIGKILL] * len(spawned)
    for process in spawned:
        process.communicate()
