"""Who owns the clients of an instance: a gateway on a socket, or a program that embeds trserve.

Knows the listening socket and what is told to people; nothing of workers' lives.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import replace
from typing import Final, Protocol

from trserve import banner
from trserve.children import Child
from trserve.errors import ConfigError, PortInUseError
from trserve.ipc.child import ChildArguments
from trserve.ipc.control import GATEWAY_IDENTITY
from trserve.ipc.process import thread_environment
from trserve.plan import ServerPlan
from trserve.service_manager import ServiceManager

BACKLOG: Final = 4096


def listen(host: str, port: int) -> socket.socket:
    """The listening socket, bound before anything loads; port 0 is resolved here."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        message = f"cannot listen on {host}:{port}: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(f"{message}; give another --port, or 0 for a free one") from error
        raise ConfigError(f"--host, --port: {message}") from error
    return listener


class Front(Protocol):
    """Who owns the clients of an instance, and what is said of the instance."""

    def start(self, arguments: ChildArguments) -> Child:
        """The process that speaks to the launcher as the gateway."""

    def show_plan(self, plan: ServerPlan) -> None:
        """What is about to be started."""

    def show_progress(self, title: str, done: int, total: int) -> None:
        """How far a worker has loaded."""

    def show_note(self, text: str) -> None:
        """One line of news."""

    def show_ready(self, plan: ServerPlan) -> None:
        """Requests are taken from now on."""

    def show_draining(self) -> None:
        """It was asked to end, and lets what is open end first."""

    def show_end(self, root_cause: str, exit_code: int) -> None:
        """Why the instance ended, if it was not asked to."""


class HttpFront:
    """A gateway process on a listening socket, for people at a terminal."""

    def __init__(self, listener: socket.socket, manager: ServiceManager | None = None) -> None:
        self._listener = listener
        self._manager = manager or ServiceManager(None)

    def start(self, arguments: ChildArguments) -> Child:
        """Start the gateway."""
        env = thread_environment(1)
        arguments = replace(arguments, listen_fd=self._listener.fileno())
        return Child.start(GATEWAY_IDENTITY, "gateway", "trserve.gateway.main", arguments, env)

    show_plan = staticmethod(banner.show_plan)
    show_progress = staticmethod(banner.show_progress)
    show_note = staticmethod(banner.show_note)

    def show_ready(self, plan: ServerPlan) -> None:
        """The ready line and an example."""
        host, port = self._listener.getsockname()[:2]
        banner.show_ready(plan, host, port)
        self._manager.tell(READY="1", STATUS=f"serving on {host}:{port}")

    def show_draining(self) -> None:
        """One line, and the service manager's word for it."""
        self._manager.tell(STOPPING="1", STATUS="draining")
        banner.show_note("draining; once more to force")

    def show_end(self, root_cause: str, exit_code: int) -> None:
        """The last line is the root cause."""
        self._manager.tell(STOPPING="1", STATUS=root_cause.partition("\n")[0])
        banner.show_note(root_cause)
