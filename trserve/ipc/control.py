"""The control plane: start, ready, health, drain. Never on the path of a token.

ZeroMQ over a private ``ipc://`` socket, orjson bodies. The launcher binds a ROUTER; each child
connects a DEALER whose identity is its name (``worker-0``, ``gateway``). A message is one JSON
object with a ``type``. Knows no slab and no process.

The ZeroMQ descriptor is edge-triggered: after every wake and after every send the owner must
receive until nothing is left, which ``receive_all`` does.
"""

from __future__ import annotations

from typing import Any, Final

import orjson
import zmq

Message = dict[str, Any]
_HIGH_WATER: Final = 1000


def worker_identity(index: int, rank: int = 0) -> str:
    """The control identity of a worker, or of one of its further tensor parallel processes."""
    return f"worker-{index}-rank-{rank}" if rank else f"worker-{index}"


def is_worker(identity: str) -> bool:
    """Whether it is a worker's own, and not that of its further ranks, which decide nothing."""
    return identity.startswith("worker-") and "-rank-" not in identity


GATEWAY_IDENTITY: Final = "gateway"
SOLVER_IDENTITY: Final = "solver"


def _configure(socket: zmq.Socket[bytes]) -> None:
    # LINGER 0: a peer that died must never keep this process from ending.
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)


class ControlServer:
    """The launcher's end."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket)
        # A name that reconnects (a restarted child) takes over its identity.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.bind(endpoint)

    @property
    def fd(self) -> int:
        """The edge-triggered descriptor to poll."""
        return int(self._socket.getsockopt(zmq.FD))

    def receive_all(self) -> list[tuple[str, Message]]:
        """Every message that has arrived, with its sender's identity."""
        received: list[tuple[str, Message]] = []
        while True:
            try:
                identity, body = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return received
            received.append((identity.decode(), orjson.loads(body)))

    def wait(self, timeout_s: float) -> None:
        """Return when a message is there, or after ``timeout_s`` seconds."""
        self._socket.poll(max(0, int(timeout_s * 1000)))

    def send(self, identity: str, message: Message) -> None:
        """Send to a child; a message to one that is gone is dropped, its reaping tells more."""
        self._socket.send_multipart([identity.encode(), orjson.dumps(message)], zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket and its thread."""
        self._socket.close()
        self._context.term()


class ControlClient:
    """A child's end."""

    def __init__(self, endpoint: str, identity: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _configure(self._socket)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.connect(endpoint)

    @property
    def fd(self) -> int:
        """The edge-triggered descriptor to poll."""
        return int(self._socket.getsockopt(zmq.FD))

    def receive_all(self) -> list[Message]:
        """Every message that has arrived."""
        received: list[Message] = []
        while True:
            try:
                body = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return received
            received.append(orjson.loads(body))

    def receive(self, timeout_s: float) -> Message:
        """The next message; raises TimeoutError after ``timeout_s`` seconds."""
        if not self._socket.poll(int(timeout_s * 1000)):
            raise TimeoutError(f"no answer from the launcher within {timeout_s:g} s")
        message: Message = orjson.loads(self._socket.recv())
        return message

    def send(self, message: Message) -> None:
        """Send to the launcher."""
        self._socket.send(orjson.dumps(message))

    def close(self, *, linger_ms: int = 0) -> None:
        """Close the socket and its thread, waiting at most ``linger_ms`` for unsent messages."""
        self._socket.close(linger=linger_ms)
        self._context.term()
