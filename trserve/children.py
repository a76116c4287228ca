"""The launcher's children: starting, watching and ending them. Knows no slab and no messages."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from trserve.errors import StartFailedError
from trserve.ipc.child import ChildArguments
from trserve.ipc.process import spawn

log = logging.getLogger(__name__)
KILL_AFTER_S = 5.0


class Process(Protocol):
    """What a launcher needs of a process; ``subprocess.Popen`` has it."""

    @property
    def returncode(self) -> int | Any:
        """Its exit status, once it has been waited for."""

    def kill(self) -> None:
        """End it now."""

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has ended."""


class OwnerProcess:
    """The program that embeds a server: watched like a child, and nobody's to kill or reap."""

    returncode = 0

    def kill(self) -> None:
        """It is not ours."""

    def poll(self) -> int | None:
        """Its status is for its own parent."""
        return None

    def wait(self, timeout: float | None = None) -> int:
        """There is nothing to wait for."""
        return self.returncode


@dataclass
class Child:
    """One process of the server.

    Attributes:
        identity: its name on the control plane.
        title: what to call it to a person.
        pidfd: readable once it has ended.
        ready: whether it can serve.
        failure: what it said of its own end, with the exit code that this means for the server.
    """

    identity: str
    title: str
    process: Process
    pidfd: int
    ready: bool = False
    failure: tuple[str, int] | None = field(default=None)

    @classmethod
    def start(
        cls,
        identity: str,
        title: str,
        module: str,
        arguments: ChildArguments,
        env: Mapping[str, str],
    ) -> Child:
        """Start ``python -m module`` as a child of this thread, with ``env`` added to ours.

        Raises StartFailedError if the system has no room for it.
        """
        try:
            process = spawn(module, arguments.to_argv(), fds=arguments.inherited, env=env)
        except OSError as error:
            raise _start_failed(title, error) from error
        try:
            return cls(identity, title, process, os.pidfd_open(process.pid))
        except OSError as error:
            process.kill()
            process.wait(KILL_AFTER_S)
            raise _start_failed(title, error) from error

    def discard(self) -> None:
        """End one that nobody watches yet."""
        self.process.kill()
        try:
            self.process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            log.error("%s does not end although it was killed", self.title)
        os.close(self.pidfd)

    @property
    def is_owner(self) -> bool:
        """Whether it is the program that embeds the server."""
        return isinstance(self.process, OwnerProcess)

    @property
    def gave_up(self) -> bool:
        """Whether it has ended by itself, with an error."""
        return (self.process.poll() or 0) > 0

    def describe_end(self) -> str:
        """How an ended process ended."""
        code = self.process.returncode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


def _start_failed(title: str, error: OSError) -> StartFailedError:
    return StartFailedError(
        f"{title} cannot be started: {error.strerror} (look at the limits of processes, open files "
        "and memory)"
    )


class Children:
    """All of them, by pidfd."""

    def __init__(self) -> None:
        self._by_pidfd: dict[int, Child] = {}

    def __iter__(self) -> Iterator[Child]:
        return iter(tuple(self._by_pidfd.values()))

    def __len__(self) -> int:
        return len(self._by_pidfd)

    def add(self, child: Child) -> None:
        """Watch ``child``."""
        self._by_pidfd[child.pidfd] = child

    def by_identity(self, identity: str) -> Child | None:
        """The child that calls itself ``identity``; None once it was reaped."""
        return next((child for child in self if child.identity == identity), None)

    def by_pidfd(self, pidfd: int) -> Child | None:
        """The child behind ``pidfd``; None once it was reaped."""
        return self._by_pidfd.get(pidfd)

    def reap(self, pidfd: int) -> Child | None:
        """Take the exit status of the child behind ``pidfd``; None if it is no child's."""
        child = self._by_pidfd.pop(pidfd, None)
        if child is not None:
            child.process.wait()
            os.close(child.pidfd)
        return child

    def kill_all(self) -> None:
        """SIGKILL, and reap, whoever is left.

        One that the kernel does not let go in time (a hung device) is given up, not waited for:
        it cannot run another instruction of ours.
        """
        for child in self:
            child.process.kill()
        deadline = time.monotonic() + KILL_AFTER_S
        for child in self:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.error("%s does not end although it was killed", child.title)
                self._by_pidfd.pop(child.pidfd)
                os.close(child.pidfd)
            else:
                self.reap(child.pidfd)
