"""A :class:`~trserve.edge.port.Port` whose ids may go by NCCL beside its peers' connections.

Only that: which peers have it, and that one whose transfer failed is told to dial again. Knows no
communicators and no sessions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from trserve.edge import greeting, nccl_frames
from trserve.edge.facts import RemoteFacts
from trserve.edge.listener import Listener, Received
from trserve.edge.nccl_exchange import CLOSE_S, KINDS, Exchange
from trserve.edge.nccl_side import NcclSide
from trserve.edge.port import Peer, Port
from trserve.edge.wire import FrameError, FrameType, Limits

log = logging.getLogger(__name__)


class NcclPort(Port):
    """See the base; ``nccl`` is what this process has for NCCL."""

    def __init__(
        self,
        listener: Listener,
        side: greeting.Side,
        facts: Sequence[RemoteFacts | None],
        limits: Limits,
        status: Callable[[int], str],
        instance: bytes,
        nccl: NcclSide,
    ) -> None:
        super().__init__(listener, side, facts, limits, status, instance)
        self._nccl = nccl
        self._exchanges: dict[bytes, Exchange] = {}

    def send(self, key: bytes, frame: bytes) -> bool:
        """See the base."""
        exchange, peer = self._exchanges.get(key), self._peers.get(key)
        if exchange is None or peer is None:
            return super().send(key, frame)
        return exchange.send(frame, partial(self._send_to, peer))

    def take_in(self, now: float) -> None:
        """See the base; then what has become whole."""
        self._nccl.quiet()
        super().take_in(now)
        for key, exchange in tuple(self._exchanges.items()):
            peer = self._peers.get(key)
            if peer is None or not peer.route:
                self._close(key)
                continue
            handle = partial(self._take_whole, peer, exchange, now)
            exchange.collect(partial(self._send_to, peer), handle)
            if exchange.failure and self._exchanges.get(key) is exchange:
                log.warning("%s: %s", self._listener.name_of(peer.user), exchange.failure)
                self._send_to(peer, nccl_frames.encode_fault(exchange.failure))
                self._part(peer)

    def close(self) -> None:
        """Abort what is under way; threads have a moment to end."""
        exchanges = tuple(self._exchanges.values())
        for key in tuple(self._exchanges):
            self._close(key)
        deadline = time.monotonic() + CLOSE_S  # of all, as each may sit in a join
        for exchange in exchanges:
            exchange.close(max(0.0, deadline - time.monotonic()))
        self._nccl.close()

    def _take_whole(self, peer: Peer, exchange: Exchange, now: float, frame: bytes) -> None:
        if self._exchanges.get(peer.key) is not exchange or not peer.route:
            return  # the connection ended meanwhile, and what came by it is sent again
        received = Received(peer.route, peer.user, frame)
        try:
            self._take(received, now)
        except FrameError as error:
            self._on_bad(received, str(error), now)

    def _close(self, key: bytes) -> None:
        exchange = self._exchanges.pop(key, None)
        if exchange is not None:
            exchange.close()

    def _part(self, peer: Peer) -> None:
        self._close(peer.key)
        super()._part(peer)

    def _welcome(self, peer: Peer, hello: greeting.Hello) -> greeting.Welcome:
        welcome, name = super()._welcome(peer, hello), self._listener.name_of(peer.user)
        why = ""
        if not hello.nccl:
            why = "whoever dials has no --link nccl"
        elif hello.nccl != self._nccl.name:
            why = f"one side has {greeting.printable(hello.nccl)}, the other {self._nccl.name}"
        elif (exchange := Exchange.open(self._nccl, name)) is None:
            why = "too many have it already"
        else:
            self._exchanges[peer.key] = exchange
            return msgspec.structs.replace(welcome, nccl=self._nccl.name)
        log.warning("%s: ids travel by tcp, not by nccl: %s", name, why)
        return msgspec.structs.replace(welcome, no_nccl=why)

    def _on_frame(self, kind: FrameType, peer: Peer, frame: bytes, now: float) -> None:
        exchange = self._exchanges.get(peer.key)
        if exchange is not None and exchange.takes(kind, frame):
            return
        if exchange is None and kind in KINDS:
            raise FrameError(f"{kind.name} on a connection without NCCL")
        super()._on_frame(kind, peer, frame, now)
