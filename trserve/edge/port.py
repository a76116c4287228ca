"""The edge port: who has dialled in, and what becomes of each frame. Knows no slots and no models.

A peer is a server that said hello and goes with this one; it keeps its sessions when its connection
breaks and comes back, from whatever address. What is no frame is dropped and counted; a key that
keeps sending such is shown the door, and not let in again for a while. Parameters that are refused
are no such offence: a client of the peer may have asked for them.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from trserve.edge import frames, greeting
from trserve.edge.curve import fingerprint
from trserve.edge.facts import RemoteFacts
from trserve.edge.listener import Listener, Received
from trserve.edge.port_sessions import PortSessions
from trserve.edge.tcp_cloud import LOST_AFTER, MAX_BAD_FRAMES
from trserve.edge.wire import PROTOCOL_VERSION, FrameError, FrameType, Limits, UnfitParamsError
from trserve.limited_log import LimitedLog

log = logging.getLogger(__name__)
BARRED_S: Final = 60.0
MAX_PEERS: Final = 1024
FORGET_BAD_S: Final = 60.0


@dataclass(slots=True)
class Peer:
    """One model of one server that dialled in.

    Attributes:
        key: tells it from every other, however often it dials.
        route: its connection; empty while it has none.
        status: what it was told last of the model.
        looked_at, num_bytes: when it was looked how much has come from it, and what was found.
    """

    key: bytes
    user: str
    model: int
    heartbeat_s: float
    route: bytes = b""
    heard_at: float = 0.0
    status: str | None = None
    looked_at: float = 0.0
    num_bytes: int = 0


class Port:
    """Everybody who has dialled in.

    Args:
        side: what this server says of itself.
        facts: of each model; None for placeholders.
        status: why the model of an index cannot write now; empty if it can.
        instance: tells this port from its successors, which know no session of its.

    Attributes:
        bad_frames: what was no frame, or not to be followed.
        blocked: whether something could not be said for want of room, since somebody last asked.
    """

    def __init__(
        self,
        listener: Listener,
        side: greeting.Side,
        facts: Sequence[RemoteFacts | None],
        limits: Limits,
        status: Callable[[int], str],
        instance: bytes,
    ) -> None:
        self._listener = listener
        self._side = side
        self._facts = facts
        self._limits = limits
        self._status = status
        self._instance = instance
        self._peers: dict[bytes, Peer] = {}
        self._by_route: dict[bytes, Peer] = {}
        self._former: dict[bytes, str] = {}
        self._log = LimitedLog(log)
        self._bad: Counter[str] = Counter()
        self._forget_bad_at = 0.0
        self.bad_frames = 0
        self.blocked = False
        self.sessions: PortSessions | None = None

    def send(self, key: bytes, frame: bytes) -> bool:
        """Send to a peer; False if that cannot be now."""
        peer = self._peers.get(key)
        return peer is not None and self._send_to(peer, frame)

    def is_here(self, key: bytes) -> bool:
        """Whether a peer has a connection."""
        peer = self._peers.get(key)
        return peer is not None and bool(peer.route)

    def _send_to(self, peer: Peer, frame: bytes) -> bool:
        if not peer.route:
            return False
        try:
            sent = self._listener.send(peer.route, frame)
        except ConnectionError:
            self._leave(peer)
            return False
        self.blocked |= not sent
        return sent

    def _leave(self, peer: Peer) -> None:
        log.info("%s is gone", self._listener.name_of(peer.user))
        self._listener.forget(peer.route)
        self._part(peer)

    def _part(self, peer: Peer) -> None:
        """Nothing more is said by its connection; what a network held back may still come."""
        if not peer.route:
            return
        self._by_route.pop(peer.route, None)
        self._former[peer.route] = peer.user
        if len(self._former) > MAX_PEERS:
            del self._former[next(iter(self._former))]
        peer.route = b""

    def _say(self, route: bytes, frame: bytes) -> None:
        """To whoever is no peer, or not yet: it dials again if that does not arrive."""
        with contextlib.suppress(ConnectionError):
            self._listener.send(route, frame)

    def take_in(self, now: float) -> None:
        """All frames that have come."""
        for received in self._listener.receive(now):
            try:
                self._take(received, now)
            except UnfitParamsError as error:
                self._on_unfit(received, str(error), now)
            except FrameError as error:
                self._on_bad(received, str(error), now)

    def _take(self, received: Received, now: float) -> None:
        kind = frames.kind_of(received.frame)
        if kind is FrameType.HELLO:
            self._on_hello(received, now)
            return
        if kind is FrameType.ASK:
            self._on_ask(received)
            return
        peer = self._by_route.get(received.route)
        if peer is None and self._former.get(received.route) == received.user:
            return  # nobody's fault; whoever sent it dials again, and says it again
        if peer is None or peer.user != received.user:
            raise FrameError(f"{kind.name} before a greeting")
        peer.heard_at = now
        self._on_frame(kind, peer, received.frame, now)

    def _on_frame(self, kind: FrameType, peer: Peer, frame: bytes, now: float) -> None:
        assert self.sessions is not None
        if kind is FrameType.HANDOFF:
            self.sessions.on_handoff(peer.key, peer.model, self._handoff(peer, frame), now)
        elif kind is FrameType.PREFILL:
            self.sessions.on_prefill(peer.key, peer.model, self._handoff(peer, frame), now)
        elif kind is FrameType.END:
            self.sessions.on_end(peer.key, frames.decode_number(frame))
        elif kind is FrameType.PING:
            number = frames.decode_number(frame)
            self._send_to(peer, frames.encode_number(FrameType.PONG, number))
        else:
            raise FrameError(f"{kind.name} is not for this side")

    def _handoff(self, peer: Peer, frame: bytes) -> frames.Handoff:
        handoff, facts = frames.decode_handoff(frame, self._limits), self._facts[peer.model]
        assert facts is not None
        if handoff.contact is not None and handoff.contact.limit > facts.max_model_len:
            raise FrameError("a row longer than its model's")
        return handoff

    # -- greetings ---------------------------------------------------------------------------

    def _on_hello(self, received: Received, now: float) -> None:
        self._check_protocol(received)
        hello = greeting.decode(received.frame, greeting.Hello)
        name = f"{self._listener.name_of(received.user)} ({fingerprint_of(received.user)})"
        why = greeting.mismatch(hello, self._side, self._facts)
        key = received.user.encode() + b" %d " % hello.model + hello.instance[:64]
        if why is None and key not in self._peers and len(self._peers) >= MAX_PEERS:
            why = f"{MAX_PEERS} servers have dialled in already"
        if why is not None:
            why = greeting.printable(why)
            log.warning("%s is refused: %s", name, why)
            self._say(received.route, greeting.encode(FrameType.REFUSED, why))
            return
        beat = min(60.0, max(0.01, hello.side.heartbeat_s))
        peer = self._peers.setdefault(key, Peer(key, received.user, hello.model, beat))
        self._part(peer)
        if (other := self._by_route.get(received.route)) is not None:
            self._part(other)
        peer.route, peer.heard_at, peer.status = received.route, now, None
        peer.looked_at, peer.num_bytes = now, 0
        self._by_route[received.route] = peer
        welcome = self._welcome(peer, hello)
        self._say(received.route, greeting.encode(FrameType.WELCOME, welcome))
        log.info("%s is connected, for the model %s", name, self._side.models[hello.model])
        self._tell_status(peer)

    def _welcome(self, peer: Peer, hello: greeting.Hello) -> greeting.Welcome:
        facts = self._facts[peer.model]
        assert facts is not None
        return greeting.Welcome(instance=self._instance, facts=facts)

    def _check_protocol(self, received: Received) -> None:
        """Another version's greeting may look like nothing that this one knows."""
        theirs = greeting.protocol_of(received.frame)
        if theirs is not None and theirs != PROTOCOL_VERSION:
            why = f"it speaks version {theirs} of the link's protocol, this side {PROTOCOL_VERSION}"
            log.warning("%s is refused: %s", self._listener.name_of(received.user), why)
            self._say(received.route, greeting.encode(FrameType.REFUSED, why))
            raise FrameError(why)

    def _on_ask(self, received: Received) -> None:
        ask = greeting.decode(received.frame, greeting.Ask)
        known = ask.protocol == PROTOCOL_VERSION and ask.models == len(self._facts)
        facts = self._facts[ask.model] if known and 0 <= ask.model < len(self._facts) else None
        if facts is None:
            why = f"there is no model {ask.model} of {ask.models} here: {self._side.models}"
            self._say(received.route, greeting.encode(FrameType.REFUSED, why))
        else:
            self._say(received.route, greeting.encode(FrameType.FACTS, facts))

    def _tell_status(self, peer: Peer) -> None:
        status = self._status(peer.model)
        if status != peer.status:
            frame = frames.encode_status(up=not status, text=status)
            if self._send_to(peer, frame):
                peer.status = status

    # -- those who do not behave ---------------------------------------------------------------

    def _on_bad(self, received: Received, why: str, now: float) -> None:
        self.bad_frames += 1
        self._bad[received.user] += 1
        if self._bad[received.user] >= MAX_BAD_FRAMES:
            name = self._listener.name_of(received.user)
            log.warning("%s is cut off: it sends frames that are none (%s)", name, why)
            self._listener.bar(received.route, received.user, now + BARRED_S)
            self._bad[received.user] = 0
            if (peer := self._by_route.pop(received.route, None)) is not None:
                peer.route = b""

    def _on_unfit(self, received: Received, why: str, now: float) -> None:
        """Its visit alone is refused: one client must not get all of its host barred."""
        self.bad_frames += 1
        name = self._listener.name_of(received.user)
        self._log.warning(now, "a request of %s is refused: %s", name, why)

    def close(self) -> None:
        """Nothing is sent any more; what is open is the listener's."""

    # -- from time to time -------------------------------------------------------------------

    def tend(self, now: float) -> None:
        """Notice who is gone, and tell the others what has changed."""
        for peer in tuple(self._by_route.values()):
            if now >= peer.looked_at + peer.heartbeat_s:
                self._look(peer, now)
            if now - peer.heard_at > LOST_AFTER * peer.heartbeat_s:
                self._leave(peer)
            else:
                self._tell_status(peer)
        self._forget(now)

    def _look(self, peer: Peer, now: float) -> None:
        """The parts of a long frame are signs of life, and make one for the peer.

        Its pings wait behind the frame, on a slow network for longer than silence is borne, so its
        status is said again.
        """
        count = self._listener.bytes_from(peer.route)
        if count != peer.num_bytes and peer.heard_at < peer.looked_at:
            peer.heard_at, peer.status = peer.looked_at, None
        peer.looked_at, peer.num_bytes = now, count

    def _forget(self, now: float) -> None:
        if now >= self._forget_bad_at:
            self._forget_bad_at = now + FORGET_BAD_S
            self._bad.clear()
            assert self.sessions is not None
            held = self.sessions.peers()
            for key in [k for k, p in self._peers.items() if not p.route and k not in held]:
                del self._peers[key]


def fingerprint_of(user: str) -> str:
    """What people are shown of the key ``user``."""
    return fingerprint(bytes.fromhex(user))
