"""The supervisor of an embedded instance; ``trserve.Engine`` starts it.

The program that embeds trserve may run its engine in any thread and may fork or spin as it likes,
so it is no parent for workers. This process is: it starts and watches them as ``trserve launch``
does, and takes the embedding program for its gateway. It ends when that program says so, or ends.

Knows no HTTP. One JSON line on standard input says what to start, one on standard output where the
control socket is; one more, at the end, why the instance failed, if it did.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import msgspec
import orjson

from trserve.children import Child, OwnerProcess
from trserve.errors import StartupError
from trserve.ipc.child import ChildArguments
from trserve.ipc.control import GATEWAY_IDENTITY
from trserve.ipc.instance import sweep_dead_instances
from trserve.ipc.process import become_subreaper
from trserve.ipc.shared import Shared
from trserve.launcher import Launcher
from trserve.plan import ServerPlan


class HostRequest(msgspec.Struct, frozen=True):
    """What the embedding program asks for; the descriptors are inherited."""

    plan: ServerPlan
    owner_pid: int
    slab_fd: int
    bells: list[int]


def _say(message: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(message) + b"\n")
    sys.stdout.buffer.flush()


class OwnerFront:
    """The embedding program, in the gateway's place."""

    def __init__(self, owner_pid: int) -> None:
        self._pidfd = os.pidfd_open(owner_pid)

    def start(self, arguments: ChildArguments) -> Child:
        """Tell it where to connect."""
        _say({"control": arguments.control})
        return Child(GATEWAY_IDENTITY, "the embedding program", OwnerProcess(), self._pidfd)

    def show_plan(self, plan: ServerPlan) -> None:
        """A program is told nothing that it did not ask for."""

    def show_progress(self, title: str, done: int, total: int) -> None:
        """As above."""

    def show_note(self, text: str) -> None:
        """As above."""

    def show_ready(self, plan: ServerPlan) -> None:
        """It said so itself."""

    def show_draining(self) -> None:
        """It asked for that itself."""

    def show_end(self, root_cause: str, exit_code: int) -> None:
        """Why there is no engine any more."""
        _say({"failed": root_cause, "exit_code": exit_code})


def main() -> int:
    """Supervise one instance; returns the exit code."""
    # A terminal's Ctrl-C is the program's to act on; without it we would end first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=HostRequest)
    try:
        front = OwnerFront(request.owner_pid)
        sweep_dead_instances()
        become_subreaper()
        shared = Shared(request.slab_fd, tuple(request.bells))
        with Launcher(request.plan, front, 0.0, shared) as launcher:
            return launcher.run()
    except StartupError as error:
        front.show_end(str(error), error.exit_code)
        return error.exit_code
    except BrokenPipeError:
        return 0  # the program ended while we were starting


if __name__ == "__main__":
    sys.exit(main())
