"""The socket of an edge port: who is on it, what they send, and how they are shown the door.

Knows keys and connections; nothing of what a frame says.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket as sockets
from collections.abc import Iterator
from typing import Final, NamedTuple

import zmq

from trserve.edge.curve import Gatekeeper, ServerKeys, secure_server
from trserve.edge.dial import MOST_FRAMES, configure
from trserve.edge.tcp_bytes import bytes_received
from trserve.errors import PortInUseError, StartupError

_WILDCARDS: Final = ("0.0.0.0", "::", "*")
_MAX_ROUTES: Final = 4096


class Received(NamedTuple):
    """A frame; ``route`` is the connection that it came by, ``user`` whose key that has."""

    route: bytes
    user: str
    frame: bytes


class Listener:
    """Listens at ``host``:``port`` (0: any that is free).

    Attributes:
        port: where it listens.

    Raises:
        PortInUseError: somebody else does.
    """

    def __init__(self, host: str, port: int, keys: ServerKeys, frame_bytes: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = Gatekeeper(self._context, keys)
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket, frame_bytes)
        # A send to a connection that is gone, or full, fails instead of being dropped.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        secure_server(self._socket, keys)
        self.port = self._bind(host, port)
        self._descriptors: dict[bytes, int] = {}
        self._poller = select.epoll()
        for fd in (self._gate.fd, int(self._socket.getsockopt(zmq.FD))):
            self._poller.register(fd, select.EPOLLIN)

    def _bind(self, host: str, port: int) -> int:
        shown = f"[{host}]" if ":" in host else host
        place = f"tcp://{'*' if host in _WILDCARDS else shown}:{port or '*'}"
        try:
            self._socket.bind(place)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise PortInUseError(f"--edge-listen {host}:{port}: the port is in use") from None
            raise StartupError(f"--edge-listen {host}:{port}: {error.strerror}") from None
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return int(endpoint.rpartition(":")[2])

    @property
    def fd(self) -> int:
        """Readable when somebody knocks or says something."""
        return self._poller.fileno()

    @property
    def has_more(self) -> bool:
        """Whether something has come that raises no edge any more, because a send swallowed it."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def name_of(self, user: str) -> str:
        """What to call the client with that key."""
        return self._gate.name_of(user)

    def receive(self, now: float) -> Iterator[Received]:
        """Let in who may come in; then the frames that have come, up to so many in a turn."""
        self._gate.decide_all(now)
        for _ in range(MOST_FRAMES):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._gate.decide_all(now)
            route, last = parts[0].bytes, parts[-1]
            self._note(route, int(last.get(zmq.SRCFD)))
            yield Received(route, str(last.get("User-Id")), last.bytes if len(parts) == 2 else b"")

    def _note(self, route: bytes, fd: int) -> None:
        if route not in self._descriptors and len(self._descriptors) >= _MAX_ROUTES:
            del self._descriptors[next(iter(self._descriptors))]
        self._descriptors[route] = fd

    def bytes_from(self, route: bytes) -> int:
        """How many have come by the connection, parts of frames too."""
        return bytes_received(self._descriptors.get(route, -1))

    def send(self, route: bytes, frame: bytes) -> bool:
        """Send; False if there is no room. ConnectionError if there is no such connection now."""
        try:
            self._socket.send_multipart([route, frame], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise ConnectionError("the connection is gone") from None
            raise
        return True

    def bar(self, route: bytes, user: str, until: float) -> None:
        """End the connection, and let its key not in again before ``until``."""
        self._gate.bar(user, until)
        fd = self._descriptors.pop(route, -1)
        # A ROUTER has no way to end one of its connections; the system has. Should the number be
        # another connection's by now, that one dials again.
        with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(fd)) as connection:
            connection.shutdown(sockets.SHUT_RDWR)

    def forget(self, route: bytes) -> None:
        """The connection is gone."""
        self._descriptors.pop(route, None)

    def close(self) -> None:
        """Let go of everything."""
        self._poller.close()
        self._gate.close()
        self._socket.close(linger=0)
        self._context.destroy(linger=0)
