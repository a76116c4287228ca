"""The far side of a link agent where it is another trserve: one connection for everything.

Dials, and only dials, so that it works from behind an address translator and survives a change of
its own address. Visits are sent as soon as they can be, from the row, and so need no queue: what a
connection could not take, or lost, is sent again from what the other side has acknowledged. Knows
frames and connections; no slab and no policy.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable
from random import Random
from typing import Final

import zmq

from trserve.edge import frames, greeting
from trserve.edge.cloud import STAYS, Answer, Visit
from trserve.edge.curve import ClientKeys
from trserve.edge.dial import HANDSHAKE_S, Connection
from trserve.edge.ends import Ends
from trserve.edge.facts import RemoteFacts
from trserve.edge.far_params import FarParams
from trserve.edge.link_counts import LinkCounts
from trserve.edge.outgoing import Outgoing
from trserve.edge.wire import FrameError, FrameType, Limits

log = logging.getLogger(__name__)
LOST_AFTER: Final = 3
"""Heartbeats of silence after which a connection is lost."""

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0
REFUSED_PAUSE_S: Final = 5.0
MAX_BAD_FRAMES: Final = 16
_RETRY_SEND_S: Final = 0.01


class TcpCloud:
    """Implements :class:`~trserve.edge.cloud.Cloud`.

    Args:
        address: HOST:PORT of an edge port.
        hello: what this side says of itself.
        values: the home's values of its router's parameters, which count for its requests at the
            other side as well.

    Attributes:
        counts: what went over the link.
    """

    def __init__(
        self,
        address: str,
        keys: ClientKeys,
        hello: greeting.Hello,
        limits: Limits,
        values: dict[str, float] | None = None,
    ) -> None:
        self._address = address
        self._keys = keys
        self._hello = hello
        self._limits = limits
        self._params = FarParams(values or {})
        self._heartbeat_s = hello.side.heartbeat_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = select.epoll()
        self._connection: Connection | None = None
        self._sessions: dict[int, Outgoing] = {}
        self._unsent: dict[int, None] = {}
        self._ends = Ends()
        self._peer: bytes | None = None
        self._facts: RemoteFacts | None = None
        self._welcomed = self._available = False
        self._dial_at = self._heard_at = self._said_at = self._dialled_at = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._random = Random()
        self._reason = f"{address} was not reached yet"
        self._refused = False
        self._connections = 0
        self.counts = LinkCounts()
        self._handlers: dict[FrameType, Callable[[bytes, float], Answer | None]] = {
            FrameType.WELCOME: self._on_welcome,
            FrameType.REFUSED: self._on_refused,
            FrameType.STATUS: self._on_status,
            FrameType.PONG: self._on_pong,
            FrameType.ANSWER: self._on_answer,
            FrameType.NEED: self._on_need,
        }

    # -- what the agent sees -----------------------------------------------------------------

    @property
    def fd(self) -> int:
        """Readable when something has come."""
        return self._poller.fileno()

    @property
    def connected(self) -> bool:
        """Whether visits are taken."""
        return self._welcomed and self._available

    @property
    def reason(self) -> str:
        """Why not."""
        return self._reason

    @property
    def refused(self) -> bool:
        """Whether the other side has said why it does not want this one."""
        return self._refused

    @property
    def greeted(self) -> bool:
        """Whether the connection stands, though its model may be loading."""
        return self._welcomed

    @property
    def connections(self) -> int:
        """How often it became connected."""
        return self._connections

    def facts(self) -> RemoteFacts | None:
        """What the other side has said of the model."""
        return self._facts

    def configure(self, values: dict[str, float]) -> None:
        """Other values of the home's router, for sessions that begin from now on."""
        self._params.configure(values)

    def start(self, now: float) -> None:
        """Dial."""
        self._dial(now)

    def visit(self, visit: Visit) -> None:
        """Send it, at once or as soon as may be; whoever connects again is given it again."""
        session = self._sessions.setdefault(visit.session, Outgoing())
        session.visit = visit
        if self.connected:
            self._unsent[visit.session] = None
            self._send_visits()

    def prefill(self, visit: Visit) -> None:
        """Send the prompt, if the session is new and there is room now."""
        if not self.connected or visit.session in self._sessions:
            return
        session = Outgoing()
        handoff = session.handoff(visit, self._params.blob(visit.params), early=True)
        if self._send(frame := frames.encode_handoff(handoff, early=True)):
            session.was_sent(handoff)
            self._sessions[visit.session] = session
            self.counts.was_sent(len(frame), contact=True)

    def forget(self, session: int) -> None:
        """All of its row is sent with its next visit."""
        if (known := self._sessions.get(session)) is not None:
            known.forget()

    def end(self, session: int) -> None:
        """Forget it, here and there."""
        self._unsent.pop(session, None)
        # One that a predecessor of this process began is not known here, but may be there.
        known = self._sessions.pop(session, None) is not None
        if known or self._welcomed:
            self._ends.add(session)
        self._send_ends()

    def poll(self, now: float) -> list[Answer]:
        """Take in what has come, and do what is due."""
        answers: list[Answer] = []
        if self._connection is None:
            if now >= self._dial_at:
                self._dial(now)
            return answers
        for frame in self._connection.receive():
            self._heard_at = now
            answer = self._take(frame, now)
            if answer is not None:
                answers.append(answer)
            if not self._has_connection():
                return answers
        self._tend(now)
        return answers

    def due_s(self, now: float) -> float:
        """Seconds until there is something to do."""
        if self._connection is None:
            return max(0.0, self._dial_at - now)
        if self._connection.has_more:
            return 0.0
        if not self._welcomed:
            return max(0.0, self._dialled_at + HANDSHAKE_S - now)
        if self._ends or (self._unsent and self._available):
            return _RETRY_SEND_S
        lost_at = self._heard_at + LOST_AFTER * self._heartbeat_s
        return max(0.0, min(lost_at, self._said_at + self._heartbeat_s) - now)

    def close(self) -> None:
        """Let go of everything."""
        self._hang_up()
        self._poller.close()
        self._context.destroy(linger=0)

    # -- the connection ----------------------------------------------------------------------

    def _has_connection(self) -> bool:
        return self._connection is not None

    def _dial(self, now: float) -> None:
        self._connection = Connection(
            self._context, self._address, self._keys, self._limits.frame_bytes
        )
        self._poller.register(self._connection.fd, select.EPOLLIN)
        self._dialled_at = self._heard_at = self._said_at = now
        self._connection.send(greeting.encode(FrameType.HELLO, self._hello))

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._poller.unregister(self._connection.fd)
            self._connection.close()
        self._connection = None
        self._welcomed = self._available = False
        self._unsent.clear()

    def _lose(self, reason: str, now: float, *, refused: bool = False) -> None:
        """The connection is over: say why, and when to dial again."""
        was_up = self._welcomed
        self._hang_up()
        if reason != self._reason or was_up:
            log.warning("%s", reason)
        self._reason, self._refused = reason, refused
        if was_up:
            self._pause_s = 0.0
        pause = REFUSED_PAUSE_S if refused else self._pause_s
        # Many that lost one server must not come back at the same moment.
        self._dial_at = now + pause * self._random.uniform(0.7, 1.0)
        self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))

    def _tend(self, now: float) -> None:
        connection = self._connection
        assert connection is not None
        if connection.failure:
            self._lose(connection.failure, now, refused=connection.refused)
        elif not self._welcomed:
            if now >= self._dialled_at + HANDSHAKE_S:
                self._lose(connection.explain_silence(), now)
        elif now >= self._heard_at + LOST_AFTER * self._heartbeat_s:
            self._lose(f"{self._address} is silent for {now - self._heard_at:.1f} s", now)
        else:
            self._send_visits()
            self._send_ends()
            if now >= self._said_at + self._heartbeat_s:
                self._heard_at = max(self._heard_at, self._said_at * connection.has_grown())
                self._said_at = now
                stamp = int(now * 1e6)
                if connection.send(frames.encode_number(FrameType.PING, stamp)):
                    self._ends.pinged(stamp)

    # -- what comes --------------------------------------------------------------------------

    def _take(self, frame: bytes, now: float) -> Answer | None:
        try:
            kind = frames.kind_of(frame)
            if kind not in self._handlers:
                raise FrameError(f"{kind.name} is not for this side")
            return self._handlers[kind](frame, now)
        except FrameError as error:
            self.counts.bad_frames += 1
            if self.counts.bad_frames % MAX_BAD_FRAMES == 0:
                self._lose(f"{self._address} sends frames that are none: {error}", now)
            return None

    def _on_welcome(self, frame: bytes, now: float) -> None:
        welcome = greeting.decode(frame, greeting.Welcome)
        if self._welcomed:
            raise FrameError("a second welcome")
        for session in self._sessions.values():
            session.reconnect()
            if welcome.instance != self._peer:
                session.forget()
        self._ends.reconnected()
        self._peer, self._facts = welcome.instance, welcome.facts
        self._welcomed, self._refused = True, False
        self._pause_s = FIRST_PAUSE_S
        self._reason = f"{self._address} has not said yet whether its model can write"

    def _on_refused(self, frame: bytes, now: float) -> None:
        text = greeting.printable(greeting.decode(frame, str))
        self._lose(f"{self._address} refuses this server: {text}", now, refused=True)

    def _on_status(self, frame: bytes, now: float) -> None:
        if not self._welcomed:
            raise FrameError("a status before the welcome")
        up, text = frames.decode_status(frame)
        if up and not self._available:
            log.info("%s is connected", self._address)
            self._connections += 1
        elif not up:
            self._reason = f"{self._address}: {greeting.printable(text)}"
        self._available = up

    def _on_pong(self, frame: bytes, now: float) -> None:
        stamp = frames.decode_number(frame)
        self.counts.round_trip_us = max(0, int(now * 1e6) - stamp)
        self._ends.ponged(stamp)

    def _on_answer(self, frame: bytes, now: float) -> Answer:
        answer = frames.read_answer(frame, self._limits)
        session = self._sessions.get(answer.session)
        if answer.unreadable:
            if session is None or not session.awaits(answer):
                raise FrameError(answer.unreadable)
            return answer  # it is waited for, and asked for again
        self.counts.answer_bytes += len(frame)
        self.counts.answers += answer.destination != STAYS or bool(answer.finish)
        if session is not None:
            session.was_answered(answer)
        return answer

    def _on_need(self, frame: bytes, now: float) -> None:
        need = frames.decode_need(frame, self._limits)
        self.counts.needs += 1
        session = self._sessions.get(need.session)
        if session is not None and session.is_needed(need):
            self._unsent[need.session] = None

    # -- what goes ---------------------------------------------------------------------------

    def _send(self, frame: bytes) -> bool:
        return self._connection is not None and self._connection.send(frame)

    def _send_visits(self) -> None:
        """As many as the connection takes; the others stay where they are, in the row."""
        while self._unsent and self.connected:
            number = next(iter(self._unsent))
            session = self._sessions[number]
            if session.visit is not None:
                blob = b"" if session.known else self._params.blob(session.visit.params)
                handoff = session.handoff(session.visit, blob)
                if not self._send(frame := frames.encode_handoff(handoff)):
                    return
                session.was_sent(handoff)
                self.counts.was_sent(len(frame), contact=handoff.contact is not None)
            del self._unsent[number]

    def _send_ends(self) -> None:
        if self._ends and self._welcomed:
            self._ends.send(lambda number: self._send(frames.encode_number(FrameType.END, number)))
