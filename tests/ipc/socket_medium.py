"""Links over plain socket pairs: a second medium, to show that the protocol needs no ring.

A push is one packet, which the kernel takes whole or not at all; an eventfd counts the pushes that
found the socket full.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence

from trserve.ipc.layout import Layout
from trserve.ipc.rings import Descriptor, Kind

_FORMAT = struct.Struct("<qqii")
_LARGEST = 1 << 16


class SocketSender:
    def __init__(self, end: socket.socket, lost: int) -> None:
        self._end, self._lost = end, lost

    def push(self, descriptors: Sequence[Descriptor]) -> bool:
        packet = b"".join(_FORMAT.pack(d.gen, d.hop, d.slot, d.kind) for d in descriptors)
        try:
            self._end.send(packet)
        except (BlockingIOError, OSError):
            os.eventfd_write(self._lost, 1)
            return False
        return True


class SocketReceiver:
    def __init__(self, end: socket.socket, lost: int) -> None:
        self._end, self._lost = end, lost

    def overflowed(self) -> bool:
        try:
            os.eventfd_read(self._lost)
        except BlockingIOError:
            return False
        return True

    def drain(self) -> list[Descriptor]:
        found: list[Descriptor] = []
        while True:
            try:
                packet = self._end.recv(_LARGEST)
            except BlockingIOError:
                return found
            for gen, hop, slot, kind in _FORMAT.iter_unpack(packet):
                found.append(Descriptor(Kind(kind), slot, gen, hop))


class SocketMedium:
    """All pairs of an instance, made before its processes are."""

    def __init__(self, layout: Layout, buffer_bytes: int | None = None) -> None:
        self._pairs: dict[tuple[int, int], tuple[socket.socket, socket.socket, int]] = {}
        for consumer in range(layout.workers):
            for producer in range(layout.workers + 1):
                if producer != consumer:
                    self._pairs[producer, consumer] = self._pair(buffer_bytes)

    @staticmethod
    def _pair(buffer_bytes: int | None) -> tuple[socket.socket, socket.socket, int]:
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in ends:
            end.setblocking(False)
            if buffer_bytes is not None:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        return (*ends, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def sender(self, producer: int, consumer: int) -> SocketSender:
        end, _, lost = self._pairs[producer, consumer]
        return SocketSender(end, lost)

    def receiver(self, producer: int, consumer: int) -> SocketReceiver:
        _, end, lost = self._pairs[producer, consumer]
        return SocketReceiver(end, lost)

    def close(self) -> None:
        for first, second, lost in self._pairs.values():
            first.close()
            second.close()
            os.close(lost)
