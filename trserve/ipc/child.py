"""What a child is told on its command line, and the first things it does. Knows no torch.

Descriptors are inherited; their numbers stand on the command line, everything else comes over the
control socket after the child has said hello.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from trserve.ipc.control import ControlClient
from trserve.ipc.process import die_with_parent

log = logging.getLogger(__name__)
PLAN_TIMEOUT_S: Final = 30.0

LOG_LEVEL_VARIABLE: Final = "TRSERVE_LOG_LEVEL"
"""Where the launcher says what its children log, by the names of ``logging``."""


@dataclass(frozen=True)
class ChildArguments:
    """What every child is told.

    Attributes:
        parent: the launcher's pid.
        launcher_fd: its pidfd, readable once it has ended.
        control: the ZeroMQ endpoint.
        slab_fd: the slab's memory file.
        bells: the doorbells of all workers, then the gateway's.
        index: this worker, or -1 in what is none.
        listen_fd: the listening socket, or -1 in what is no gateway.
        rank: of a tensor parallel process among those of its worker.
        group_fds: what the processes of one worker share, in an order of their own.
    """

    parent: int
    launcher_fd: int
    control: str
    slab_fd: int
    bells: tuple[int, ...]
    index: int = -1
    listen_fd: int = -1
    rank: int = 0
    group_fds: tuple[int, ...] = ()

    def to_argv(self) -> list[str]:
        """The command line that :func:`parse_child_arguments` understands."""
        return [
            f"--parent={self.parent}",
            f"--launcher-fd={self.launcher_fd}",
            f"--control={self.control}",
            f"--slab-fd={self.slab_fd}",
            f"--bells={','.join(map(str, self.bells))}",
            f"--index={self.index}",
            f"--listen-fd={self.listen_fd}",
            f"--rank={self.rank}",
            f"--group-fds={','.join(map(str, self.group_fds))}",
        ]

    @property
    def inherited(self) -> tuple[int, ...]:
        """The descriptors that must be passed on."""
        listen = () if self.listen_fd < 0 else (self.listen_fd,)
        return (self.launcher_fd, self.slab_fd, *self.bells, *listen, *self.group_fds)


def parse_child_arguments(argv: Sequence[str] | None = None) -> ChildArguments:
    """The arguments of this process."""
    parser = ArgumentParser(description="A process of trserve; started by `trserve launch`.")
    for name in ("parent", "launcher-fd", "slab-fd", "index", "listen-fd"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--control", required=True)
    parser.add_argument("--bells", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--group-fds", default="")
    found = parser.parse_args(argv)
    return ChildArguments(
        parent=found.parent,
        launcher_fd=found.launcher_fd,
        control=found.control,
        slab_fd=found.slab_fd,
        bells=tuple(int(fd) for fd in found.bells.split(",")),
        index=found.index,
        listen_fd=found.listen_fd,
        rank=found.rank,
        group_fds=tuple(int(fd) for fd in found.group_fds.split(",") if fd),
    )


def begin_child(
    arguments: ChildArguments, parent_death: int = signal.SIGKILL, *, name: str | None = None
) -> None:
    """A child's first act: end with the launcher, leave signals to it, log to standard error.

    SIGTERM too: a service manager sends it to every process of the group, and the launcher alone
    knows how to end without cutting an answer. (Where it is the sign of the launcher's death, the
    child has its own handler.) ``name`` stands before what it logs.
    """
    die_with_parent(arguments.parent, parent_death)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent_death != signal.SIGTERM:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    name = name or ("gateway" if arguments.index < 0 else f"worker-{arguments.index}")
    wanted = os.environ.get(LOG_LEVEL_VARIABLE, "").upper()
    level = logging.getLevelNamesMapping().get(wanted, logging.INFO)
    logging.basicConfig(level=level, stream=sys.stderr, format=f"trserve {name}: %(message)s")


def say_hello(control: ControlClient) -> dict[str, Any]:
    """Announce this process and wait for the plan. TimeoutError after 30 seconds.

    News that was under way to a predecessor of this name may come first, and is not for this one.
    """
    control.send({"type": "hello"})
    deadline = time.monotonic() + PLAN_TIMEOUT_S
    while (message := control.receive(max(0.0, deadline - time.monotonic())))["type"] != "plan":
        log.info("%r came before the plan and is not for this process", message["type"])
    plan: dict[str, Any] = message["plan"]
    return plan
