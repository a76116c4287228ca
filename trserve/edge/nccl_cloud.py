"""A :class:`~trserve.edge.tcp_cloud.TcpCloud` whose ids may go by NCCL beside its connection.

Only that: when a connection has it, and that one whose transfer failed is given up, so that what
was lost with it is sent again. Knows no communicators.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from trserve.edge import greeting, nccl_frames
from trserve.edge.cloud import Answer
from trserve.edge.curve import ClientKeys
from trserve.edge.nccl_exchange import CLOSE_S, KINDS, Exchange
from trserve.edge.nccl_side import NcclSide
from trserve.edge.tcp_cloud import TcpCloud
from trserve.edge.wire import FrameType, Limits

log = logging.getLogger(__name__)
PAUSE_S: Final = 60.0
"""How long connections are without it after one whose transfer failed."""

_RETRY_SAY_S: Final = 0.01
Handler = Callable[[bytes, float], Answer | None]


class NcclCloud(TcpCloud):
    """See the base; ``side`` is what this process has for NCCL."""

    def __init__(
        self,
        address: str,
        keys: ClientKeys,
        hello: greeting.Hello,
        limits: Limits,
        side: NcclSide,
        values: dict[str, float] | None = None,
    ) -> None:
        hello = msgspec.structs.replace(hello, nccl=side.name)
        super().__init__(address, keys, hello, limits, values)
        self._side = side
        self._exchange: Exchange | None = None
        self._paused_until = self._now = 0.0
        self._complaint = ""
        self._counted = (0, 0)
        self._poller.register(side.fd, select.EPOLLIN)
        for kind in KINDS:
            self._handlers[kind] = self._on_nccl
        self._handlers[FrameType.NCCL_FAULT] = self._on_fault
        for kind in (FrameType.ANSWER, FrameType.NEED):
            self._handlers[kind] = partial(self._in_turn, self._handlers[kind])

    def poll(self, now: float) -> list[Answer]:
        """See the base."""
        self._side.quiet()
        self._now = now
        answers = super().poll(now)
        exchange = self._exchange
        if exchange is None:
            return answers

        def handle(frame: bytes) -> None:
            if self._exchange is exchange and (answer := self._take(frame, now)) is not None:
                answers.append(answer)

        exchange.collect(super()._send, handle)
        self._count(exchange)
        if exchange.failure and self._exchange is exchange:
            self._give_up(exchange.failure)
        return answers

    def due_s(self, now: float) -> float:
        """See the base."""
        due = super().due_s(now)
        waits = self._exchange is not None and self._exchange.has_to_say
        return min(due, _RETRY_SAY_S) if waits else due

    def close(self) -> None:
        """See the base; threads have :data:`~trserve.edge.nccl_exchange.CLOSE_S`."""
        if self._exchange is not None:
            self._exchange.close(CLOSE_S)
        self._side.close()
        super().close()

    def _hang_up(self) -> None:
        if self._exchange is not None:
            self._count(self._exchange)
            self._exchange.close()
            self._exchange = None
        super()._hang_up()

    def _send(self, frame: bytes) -> bool:
        if self._exchange is None:
            return super()._send(frame)
        return self._exchange.send(frame, super()._send)

    def _count(self, exchange: Exchange) -> None:
        sent, received = exchange.sent, exchange.received
        self.counts.nccl_handoffs += sent - self._counted[0]
        self.counts.nccl_answers += received - self._counted[1]
        self._counted = (sent, received)

    def _give_up(self, why: str) -> None:
        self._paused_until = self._now + PAUSE_S
        self._lose(
            f"{self._address}: {greeting.printable(why)}; dialling again, by tcp alone for "
            f"{PAUSE_S:g} s",
            self._now,
        )

    # -- what comes --------------------------------------------------------------------------

    def _on_welcome(self, frame: bytes, now: float) -> None:
        super()._on_welcome(frame, now)
        welcome = greeting.decode(frame, greeting.Welcome)
        self._counted = (0, 0)
        why = greeting.printable(welcome.no_nccl) or "it has no --link nccl"
        if welcome.nccl == self._side.name:
            if now < self._paused_until:
                return  # its failure has been said
            self._exchange = Exchange.open(self._side, self._address)
            if self._exchange is not None:
                self._exchange.begin()
                return
            why = "earlier ones have not ended"
        if why != self._complaint:
            log.warning("%s: ids travel by tcp, not by nccl: %s", self._address, why)
        self._complaint = why

    def _on_nccl(self, frame: bytes, now: float) -> None:
        if self._exchange is not None:  # else it is for one that was given up
            self._exchange.takes(FrameType(frame[0]), frame)

    def _on_fault(self, frame: bytes, now: float) -> None:
        self._give_up(nccl_frames.decode_fault(frame))

    def _in_turn(self, handler: Handler, frame: bytes, now: float) -> Answer | None:
        """Frames of a session one after the other."""
        if self._exchange is not None and self._exchange.takes(FrameType(frame[0]), frame):
            return None
        return handler(frame, now)
