"""What processes do about each other's lives: directories of the dead, orphans, imports."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trserve.ipc.child import ChildArguments, parse_child_arguments
from trserve.ipc.instance import (
    InstanceDirectory,
    remove_abandoned,
    running_instances,
    sweep_dead_instances,
)
from trserve.ipc.process import thread_environment

LONG_S = 30.0


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@contextmanager
def peer(role: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.ipc.peer", role, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], LONG_S)[0], "it said nothing"
    return process.stdout.readline().strip()


def test_the_directory_is_private_and_its_socket_path_short() -> None:
    directory = InstanceDirectory()
    try:
        assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
        assert str(os.getuid()) in directory.path.name
        assert directory.control_endpoint == f"ipc://{directory.path}/control"
    finally:
        directory.remove()
    assert not directory.path.exists()
    directory.remove()  # twice is no error


def test_two_instances_have_two_directories() -> None:
    one, other = InstanceDirectory(), InstanceDirectory()
    assert one.path != other.path
    one.remove()
    assert other.path.exists()
    other.remove()


def test_running_servers_are_found_by_the_pid_of_their_owner(tmp_path: Path) -> None:
    assert running_instances() == {}
    own = InstanceDirectory()
    with peer("hold-instance") as holder:
        path = Path(line_of(holder))
        assert running_instances() == {os.getpid(): own.path, holder.pid: path}
        holder.kill()
        holder.wait()
        assert running_instances() == {os.getpid(): own.path}, "a directory alone is no server"
    own.remove()
    assert running_instances() == {}


def test_only_what_a_dead_owner_left_is_swept() -> None:
    own = InstanceDirectory()
    with peer("hold-instance") as holder:
        path = Path(line_of(holder))
        assert sweep_dead_instances() == []
        assert path.exists()
        holder.kill()
        holder.wait(LONG_S)
        assert sweep_dead_instances() == [path]
        assert not path.exists()
    assert own.path.exists()
    own.remove()


def test_a_directory_without_lock_gets_a_while(tmp_path: Path) -> None:
    """Its owner may be about to lock it; one that is old has no owner."""
    young = Path(tempfile.mkdtemp(prefix=f"trserve-{os.getuid()}-"))
    assert sweep_dead_instances() == []
    hour_ago = time.time() - 3600
    os.utime(young, (hour_ago, hour_ago))
    assert sweep_dead_instances() == [young]


def test_links_and_strangers_are_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    hour_ago = time.time() - 3600
    os.utime(precious, (hour_ago, hour_ago))
    link = tmp_path / f"trserve-{os.getuid()}-link"
    link.symlink_to(precious)
    other = tmp_path / f"trserve-{os.getuid() + 1}-other"
    other.mkdir()
    os.utime(other, (hour_ago, hour_ago))
    assert sweep_dead_instances() == []
    assert precious.exists() and other.exists()


def test_a_child_removes_what_its_killed_launcher_left() -> None:
    directory = InstanceDirectory()
    remove_abandoned(directory.control_endpoint)
    assert not directory.path.exists()


def test_the_lock_is_held_from_the_first_moment_it_can_be_seen() -> None:
    directory = InstanceDirectory()
    with open(directory.path / "owner.lock") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    directory.remove()


def test_a_child_ends_with_its_parent() -> None:
    with peer("parent") as parent:
        child = os.pidfd_open(int(line_of(parent)))
        try:
            assert select.select([child], [], [], 0)[0] == []
            parent.send_signal(signal.SIGKILL)
            assert select.select([child], [], [], 5.0)[0] == [child]
        finally:
            os.close(child)


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    command = [sys.executable, "-m", "tests.ipc.peer", "sleeper", str(2**22 + 1)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode != 0
    assert "launcher ended" in done.stderr


def test_signals_to_the_whole_group_are_the_launchers_to_act_on() -> None:
    """A terminal sends SIGINT to it, a service manager SIGTERM."""
    with peer("patient", str(os.getpid())) as child:
        assert line_of(child) == "ready"
        for number in (signal.SIGINT, signal.SIGTERM):
            child.send_signal(number)
            assert child.stdin is not None
            child.stdin.write(f"{number}\n")
            child.stdin.flush()
            assert line_of(child) == f"{number}"


def test_the_gateway_leaves_at_sigterm_only_when_its_launcher_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from trserve.gateway import main

    left: list[str] = []
    monkeypatch.setattr(main, "_leave_abandoned", left.append)
    main._on_sigterm(ChildArguments(os.getppid(), 3, "ipc:///c", 4, (5,)))
    assert left == []
    main._on_sigterm(ChildArguments(os.getppid() + 1, 3, "ipc:///c", 4, (5,)))
    assert left == ["ipc:///c"]


def test_arguments_survive_the_command_line() -> None:
    given = ChildArguments(
        parent=12, launcher_fd=3, control="ipc:///tmp/x/control", slab_fd=4, bells=(5, 6, 7)
    )
    assert parse_child_arguments(given.to_argv()) == given
    assert set(given.inherited) == {3, 4, 5, 6, 7}
    gateway = ChildArguments(12, 3, "ipc:///c", 4, (5,), index=-1, listen_fd=9)
    assert parse_child_arguments(gateway.to_argv()) == gateway
    assert 9 in gateway.inherited


def test_thread_limits_are_set_for_every_library() -> None:
    env = thread_environment(3)
    assert {env[f"{name}_NUM_THREADS"] for name in ("OMP", "MKL", "OPENBLAS")} == {"3"}
    assert env["OMP_WAIT_POLICY"] == "PASSIVE"
    assert env["GOMP_SPINCOUNT"] == "0"


def test_only_threads_with_cores_to_themselves_spin_between_loops() -> None:
    alone = thread_environment(2, cores_to_itself=True)
    assert int(alone["GOMP_SPINCOUNT"]) > 0
    assert alone["OMP_WAIT_POLICY"] == "PASSIVE"
    assert thread_environment(1, cores_to_itself=True)["GOMP_SPINCOUNT"] == "0"


LIGHT = (
    *("baton", "layout", "slab", "rings", "links", "doorbell", "fence", "publish", "extras"),
    *("control", "instance", "owned_directory", "process", "child", "child_run", "shared"),
    *("annotations", "trace", "tally", "estimates", "meter"),
)


def test_neither_ipc_nor_the_scheduler_imports_torch() -> None:
    modules = [f"trserve.ipc.{name}" for name in LIGHT] + ["trserve.sched.batching"]
    code = (
        f"import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_list_of_light_modules_is_complete() -> None:
    import trserve.ipc

    folder = Path(trserve.ipc.__path__[0])
    assert {path.stem for path in folder.glob("*.py")} == {*LIGHT, "__init__"}


@pytest.mark.parametrize(
    "module", ["trserve.launcher", "trserve.gateway.main", "trserve.gateway.app", "trserve.cli"]
)
def test_neither_launcher_nor_gateway_imports_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
