"""The launcher's loop by single turns: ends, signals and messages that come together."""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gateway.stack import new_plan
from tests.launcher.test_children import DEAF, LONG_S, start
from trserve import banner
from trserve.errors import EXIT_UNAVAILABLE, ConfigError, PortInUseError
from trserve.front import HttpFront, listen
from trserve.ipc.control import GATEWAY_IDENTITY, ControlClient, Message, worker_identity
from trserve.launcher import Launcher
from trserve.lifecycle import ServerEvent, ServerState


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    monkeypatch.setattr(banner, "_say", lambda text: None)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with (
        listen("127.0.0.1", 0) as listener,
        Launcher(new_plan(tmp_path, router="none"), HttpFront(listener), 30.0) as launcher,
    ):
        yield launcher
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
        signal.signal(number, handler)


def add(launcher: Launcher, code: str, identity: str = "worker-0") -> int:
    child = start(identity, code)
    launcher._children.add(child)
    launcher._selector.register(child.pidfd, select.EPOLLIN)
    for worker in launcher._workforce._workers:
        if worker_identity(worker.index) == identity:
            worker.crew = [child]
    return child.pidfd


def until(launcher: Launcher, condition: Callable[[], bool]) -> None:
    for _ in range(int(LONG_S)):  # a turn lasts a second at most
        if condition():
            return
        launcher._turn()
    raise AssertionError("it never came to that")


def test_a_second_signal_in_the_turn_of_a_childs_end(launcher: Launcher) -> None:
    pidfd = add(launcher, "pass")
    launcher._move(ServerEvent.ALL_READY)
    assert select.select([pidfd], [], [], LONG_S)[0]
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    until(launcher, lambda: launcher._state is ServerState.STOPPED)
    assert launcher._exit_code == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_loading_ends_everything_with_0(
    launcher: Launcher, number: signal.Signals
) -> None:
    add(launcher, DEAF)
    signal.raise_signal(number)
    until(launcher, lambda: launcher._state is ServerState.STOPPED)
    assert launcher._exit_code == 0


def test_a_child_that_ends_while_loading_is_the_root_cause(launcher: Launcher) -> None:
    add(launcher, "raise SystemExit(9)")
    add(launcher, DEAF, "worker-1")
    until(launcher, lambda: launcher._state is ServerState.STOPPED)
    assert launcher._exit_code == EXIT_UNAVAILABLE
    assert "worker-0 ended with exit code 9 while loading" in str(launcher._root_cause)


LAST_WORDS = """
import sys
from trserve.ipc.control import ControlClient
control = ControlClient(sys.argv[-1], "worker-0")
control.send({"type": "failed", "message": "no such file", "exit_code": 2})
control.close(linger_ms=1000)
sys.exit(3)
"""


def test_last_words_are_heard_and_give_the_exit_code(launcher: Launcher) -> None:
    endpoint = launcher._directory.control_endpoint
    add(launcher, f"import sys; sys.argv.append({endpoint!r})\n{LAST_WORDS}")
    until(launcher, lambda: launcher._state is ServerState.STOPPED)
    assert launcher._exit_code == 2
    assert "no such file" in str(launcher._root_cause)


def test_what_comes_while_a_message_is_answered_is_not_left_to_the_tick(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control descriptor is edge-triggered, and a send may consume the edge."""
    add(launcher, DEAF)
    gateway = launcher._children.by_pidfd(add(launcher, DEAF, GATEWAY_IDENTITY))
    assert gateway is not None
    gateway.ready = True
    queue: list[tuple[str, Message]] = [("worker-0", {"type": "hello"})]
    answers: dict[str, tuple[str, Message]] = {
        "plan": ("worker-0", {"type": "ready", "router_parameters": []}),
        "serve": (GATEWAY_IDENTITY, {"type": "serving"}),
    }

    def receive_all() -> list[tuple[str, Message]]:
        found, queue[:] = list(queue), []
        return found

    monkeypatch.setattr(launcher._control, "receive_all", receive_all)
    monkeypatch.setattr(
        launcher._control, "send", lambda _, message: queue.append(answers.pop(message["type"]))
    )
    monkeypatch.setattr(banner, "show_ready", lambda *arguments: None)
    launcher._receive()
    assert launcher._state is ServerState.SERVING
    assert answers == {}


def test_a_stranger_on_the_control_socket_is_not_answered(launcher: Launcher) -> None:
    client = ControlClient(launcher._directory.control_endpoint, worker_identity(7))
    client.send({"type": "hello"})
    launcher._turn()
    with pytest.raises(TimeoutError):
        client.receive(0.05)
    client.close()


def test_a_port_in_use_is_said() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"{port}.*--port") as refused:
            listen("127.0.0.1", port)
    assert refused.value.exit_code == 4


def test_a_host_that_is_not_ours_is_said() -> None:
    with pytest.raises(ConfigError, match="--host"):
        listen("192.0.2.1", 0)
    with pytest.raises(ConfigError, match="--host"):
        listen("no such host", 0)


def test_port_0_is_resolved_before_anything_loads() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0
        with socket.create_connection(listener.getsockname(), timeout=LONG_S):
            pass


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as listener:
        with Launcher(new_plan(tmp_path, router="none"), HttpFront(listener), 1.0) as launcher:
            path = launcher._directory.path
            assert path.exists()
        assert not path.exists()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
