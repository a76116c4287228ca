"""One connection to an edge port, from the first packet to the last. Knows no sessions.

ZeroMQ would dial again by itself, silently; here each attempt is a socket of its own, so that what
went wrong is known and said: a key that is refused, a name that nobody has, a port where nobody
listens. (A client is not told of a CURVE failure but by its socket's monitor.)
"""

from __future__ import annotations

import select
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from trserve.edge.curve import ClientKeys, secure_client
from trserve.edge.tcp_bytes import bytes_received

HIGH_WATER: Final = 1000
"""Frames that may wait in a socket; then senders keep theirs."""

MOST_FRAMES: Final = 1000
"""Of a turn: whoever sends faster than they are read must not keep a process from all else."""

CONNECT_S: Final = 5.0
HANDSHAKE_S: Final = 10.0
_EVENTS: Final = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def configure(socket: zmq.Socket[bytes], frame_bytes: int) -> None:
    """What both ends' sockets have in common: everything is bounded, and a dead peer is found."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    socket.setsockopt(zmq.IPV6, 1)


class Connection:
    """An attempt to reach ``address`` (HOST:PORT), and the connection that comes of it.

    Attributes:
        address: HOST:PORT.
        failure: why there is none any more; empty while there may be.
        refused: whether the other side does not want it.
        fd: readable when there is something to receive.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        keys: ClientKeys,
        frame_bytes: int,
    ) -> None:
        self.address = address
        self.failure = ""
        self.refused = False
        self._connected = self._secure = False
        self._tcp_fd, self._num_bytes = -1, 0
        self._socket = context.socket(zmq.DEALER)
        configure(self._socket, frame_bytes)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, int(CONNECT_S * 1000))
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        secure_client(self._socket, keys)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._poller = select.epoll()
        for socket in (self._socket, self._monitor):
            self._poller.register(int(socket.getsockopt(zmq.FD)), select.EPOLLIN)
        self._socket.connect(f"tcp://{address}")

    @property
    def fd(self) -> int:
        """A descriptor to poll; it stays readable until :meth:`receive`."""
        return self._poller.fileno()

    @property
    def has_more(self) -> bool:
        """Whether something has come that raises no edge any more, because a send swallowed it."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def send(self, frame: bytes) -> bool:
        """Send; False if there is no room now."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[bytes]:
        """Up to so many frames that have come; then ``failure`` says whether there will be more."""
        frames: list[bytes] = []
        self._watch()
        if self._tcp_fd < 0 and not self._find_descriptor(frames):
            return frames
        for _ in range(MOST_FRAMES):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            frames.append(parts[0] if len(parts) == 1 else b"")
        return frames

    def _find_descriptor(self, frames: list[bytes]) -> bool:
        """Take the first frame, which tells by what it came; False if there is none."""
        try:
            parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        self._tcp_fd = int(parts[0].get(zmq.SRCFD))
        frames.append(parts[0].bytes if len(parts) == 1 else b"")
        return True

    def has_grown(self) -> bool:
        """Whether any byte has come since this was asked last: a long frame is a sign of life."""
        before, self._num_bytes = self._num_bytes, bytes_received(self._tcp_fd)
        return before != self._num_bytes

    def _watch(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_CONNECTED:
                self._connected = True
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._secure = True
            elif not self.failure:
                self.failure = self._explain(event)
                self.refused = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH

    def _explain(self, event: int) -> str:
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return (
                f"{self.address} refuses the key of --edge-keys: its own file does not list it, or "
                "it has barred it for a while"
            )
        if self._secure:
            return f"{self.address} closed the connection"
        if self._connected:
            return (
                f"{self.address} ends the handshake: it has not the key that --edge-keys names as "
                "the server's, or is no edge port"
            )
        return f"nobody answers at {self.address}"

    def explain_silence(self) -> str:
        """What it means that no welcome came in time."""
        if self._secure:
            return f"{self.address} does not answer the greeting"
        if self._connected:
            return f"{self.address} does not finish the handshake: it may be no edge port"
        return f"{self.address} cannot be reached"

    def close(self) -> None:
        """End it."""
        self._poller.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
