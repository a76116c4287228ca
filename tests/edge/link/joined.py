"""Two hosts in one process, each with its slab and a worker; between them a network that may fail.

The home has model 0 and a link agent for model 1, the far host an edge port for model 0 and model
1. Everything is the product's but the sockets: frames lie in lists, and are lost with a connection,
doubled or held up as a test wants. Time is a number that tests move.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.ipc.memory import memory
from tests.workers.fakes import VOCAB, World
from trserve.edge import tcp_cloud
from trserve.edge.agent import Agent
from trserve.edge.agent_table import AgentTable
from trserve.edge.curve import ClientKeys, KeyPair
from trserve.edge.facts import RemoteFacts
from trserve.edge.greeting import Hello, Side
from trserve.edge.listener import Received
from trserve.edge.nccl_cloud import NcclCloud
from trserve.edge.nccl_port import NcclPort
from trserve.edge.nccl_side import NcclSide
from trserve.edge.port import Port
from trserve.edge.port_sessions import PortSessions
from trserve.edge.port_slots import PortSlots
from trserve.edge.reachability import Reachability
from trserve.edge.tcp_cloud import TcpCloud
from trserve.edge.wire import PROTOCOL_VERSION, Limits
from trserve.gateway.slots import Slot
from trserve.ipc.baton import SlotState
from trserve.ipc.doorbell import ring
from trserve.ipc.links import ShmMedium, receivers
from trserve.ipc.slab import Reach, WorkerStatus
from trserve.ipc.tally import TallyWriter
from trserve.workers.news import News

USER = "ab" * 32
HEARTBEAT_S = 1.0


def side(**changes: Any) -> Side:
    """What either host says of itself, but for ``changes``."""
    given = {
        "protocol": PROTOCOL_VERSION,
        "software": "test",
        "models": ["slm", "llm"],
        "router": "r",
        "router_texts": {},
        "vocabulary": "v",
        "tokenizer_size": VOCAB,
        "heartbeat_s": HEARTBEAT_S,
    }
    return Side(**(given | changes))


@dataclass
class Network:
    """Frames on their way; ``up`` is whether any can be sent, and new connections be made."""

    up: bool = True
    to_port: list[Received] = field(default_factory=list)
    open: dict[bytes, FakeConnection] = field(default_factory=dict)
    dialled: int = 0
    sent: list[bytes] = field(default_factory=list)
    answered: list[bytes] = field(default_factory=list)
    barred: list[str] = field(default_factory=list)
    room: int = 10**9

    def cut(self) -> None:
        """All connections break, and what is on its way is lost."""
        for connection in self.open.values():
            connection.failure, connection.inbox = "the connection broke", []
        self.open.clear()
        self.to_port.clear()

    # -- as a Listener -----------------------------------------------------------------------

    def receive(self, now: float) -> list[Received]:
        found, self.to_port = self.to_port, []
        return found

    def send(self, route: bytes, frame: bytes) -> bool:
        if route not in self.open:
            raise ConnectionError
        if self.room <= 0:
            return False
        self.room -= 1
        self.answered.append(frame)
        self.open[route].inbox.append(frame)
        return True

    def name_of(self, user: str) -> str:
        return "home"

    def bar(self, route: bytes, user: str, until: float) -> None:
        self.barred.append(user)
        if (connection := self.open.pop(route, None)) is not None:
            connection.failure = "barred"

    def forget(self, route: bytes) -> None:
        """It knows no descriptors."""

    def bytes_from(self, route: bytes) -> int:
        """Frames come whole."""
        return 0


class FakeConnection:
    """As ``dial.Connection``, in a network of lists."""

    network: Network

    def __init__(self, context: Any, address: str, keys: Any, frame_bytes: int) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.failure = "" if self.network.up else "nobody answers"
        self.refused = False
        self.inbox: list[bytes] = []
        self.network.dialled += 1
        self.route = b"%d" % self.network.dialled
        if self.network.up:
            self.network.open[self.route] = self

    def send(self, frame: bytes) -> bool:
        if self.route in self.network.open:
            self.network.sent.append(frame)
            self.network.to_port.append(Received(self.route, USER, frame))
        return True

    def receive(self) -> list[bytes]:
        found, self.inbox = self.inbox, []
        return found

    @property
    def has_more(self) -> bool:
        return bool(self.inbox)

    def has_grown(self) -> bool:
        """Frames come whole."""
        return False

    def explain_silence(self) -> str:
        return "silence"

    def close(self) -> None:
        os.close(self.fd)
        self.network.open.pop(self.route, None)


class Home:
    """Worker 0 and the link agent for model 1."""

    def __init__(
        self,
        world: World,
        network: Network,
        policy: str,
        timeout_s: float,
        nccl: NcclSide | None = None,
    ) -> None:
        self.world = world
        self.nccl = nccl
        self.network = network
        self.policy = policy
        self.timeout_s = timeout_s
        worker = world.workers[0]
        worker.table.news = News(worker.slab, [1])
        self.start_agent(0.0)

    def start_agent(self, now: float) -> None:
        """The agent, or its successor."""
        memory_ = self.world.memory
        slab = memory_.slab()
        outbox = memory_.outbox(slab, 1)
        limits = Limits(slab.layout.row_tokens, VOCAB, 2)
        hello = Hello(side=side(), instance=b"home", model=1, max_model_len=limits.row_tokens)
        keys = ClientKeys(KeyPair(b"", b""), b"")
        if self.nccl is None:
            self.cloud = TcpCloud("far:1", keys, hello, limits)
        else:
            self.cloud = NcclCloud("far:1", keys, hello, limits, self.nccl)
        self.cloud._random.uniform = lambda a, b: 1.0  # type: ignore[method-assign]
        self.table = AgentTable(slab, outbox, 1, [1], VOCAB, TallyWriter(slab, 1))
        self.reach = Reachability(
            slab.workers[1], self.policy, HEARTBEAT_S, lambda: [ring(b) for b in memory_.bells]
        )
        self.agent = Agent(
            slab,
            self.table,
            self.cloud,
            self.reach,
            receivers(ShmMedium(slab), slab.layout, 1),
            policy=self.policy,
            locals_=[0],
            timeout_s=self.timeout_s,
            name="llm",
            publish=outbox.flush,
            remote=[1],
        )
        self.cloud.start(now)
        self.begun = False

    def turn(self, now: float) -> None:
        """The agent, then the worker."""
        if not self.begun:
            self.cloud.poll(now)
            self.agent.begin()
            self.begun = True
        self.agent.turn(now)
        worker = self.world.workers[0]
        if worker.table.outdated:
            worker.table.rescan()
            worker.cycle.look_around()
        worker.turn()


class Far:
    """The edge port for model 0, and worker 1."""

    def __init__(
        self, world: World, network: Network, share: range, nccl: NcclSide | None = None
    ) -> None:
        self.world = world
        self.nccl = nccl
        self.network = network
        self.share = share
        self.starts = 0
        for words in world.slab.workers:
            words.set("status", WorkerStatus.UP)
        self.start_port()

    def start_port(self) -> None:
        """The port, or its successor."""
        memory_ = self.world.memory
        slab = memory_.slab()
        self.starts += 1
        self.outbox = memory_.outbox(slab, 0)
        self.slots = PortSlots(slab, self.outbox, self.share, [0])
        limits = Limits(slab.layout.row_tokens, VOCAB, 2)
        facts = [None, RemoteFacts(max_model_len=slab.layout.row_tokens)]
        self.status = ""
        given: Any = (
            self.network,
            side(models=["edge", "llm"]),
            facts,
            limits,
            lambda model: self.status,
            b"far%d" % self.starts,
        )
        self.port = Port(*given) if self.nccl is None else NcclPort(*given, self.nccl)
        self.sessions = PortSessions(slab, self.slots, self.port.send, vocabulary=VOCAB)
        self.sessions.is_here = self.port.is_here
        self.port.sessions = self.sessions
        slab.workers[0].set("reach", Reach.ELSEWHERE)

    def turn(self, now: float) -> None:
        """The port's loop, then the worker."""
        self.port.take_in(now)
        self.outbox.flush()
        self.slots.collect()
        self.sessions.look()
        self.outbox.flush()
        self.port.tend(now)
        self.sessions.tend(now)
        self.outbox.flush()
        self.world.workers[1].turn()


class Joined:
    """Both hosts and the clock."""

    def __init__(self, home: Home, far: Far, network: Network) -> None:
        self.home = home
        self.far = far
        self.network = network
        self.now = 0.0

    def turn(self, step_s: float = 0.001) -> None:
        self.now += step_s
        self.home.turn(self.now)
        self.far.turn(self.now)

    def turns(self, count: int, step_s: float = 0.001) -> None:
        for _ in range(count):
            self.turn(step_s)

    def until(self, condition: Callable[[], bool], turns: int = 4000) -> None:
        for _ in range(turns):
            if condition():
                return
            self.turn()
        raise AssertionError("it never came to that")

    def run(self, *slots: Slot, turns: int = 4000) -> None:
        """Until all are over at home."""
        world = self.home.world
        self.until(lambda: all(world.baton(s).state is SlotState.DONE for s in slots), turns)
        self.turns(6)

    def check_nothing_held(self) -> None:
        """Nobody at either side holds anything of a request that is over."""
        self.turns(4)
        assert not self.home.table.held
        worker = self.far.world.workers[1]
        # What said so may have been lost with a connection, and is said again on the next one.
        self.until(lambda: not worker.table.resident and self.far.sessions.num_sessions == 0)
        self.turns(4)
        worker.pool.check([])
        assert self.far.slots.num_free == len(self.far.share)
        self.home.world.workers[0].pool.check([])


@contextlib.contextmanager
def joined(
    *,
    policy: str = "wait",
    timeout_s: float = 0.0,
    slots: int = 4,
    edge_slots: int = 4,
    row_tokens: int = 64,
    nccl: tuple[NcclSide | None, NcclSide | None] = (None, None),
    **settings: Any,
) -> Iterator[Joined]:
    network = Network()
    patch = pytest.MonkeyPatch()
    connection = type("Connection", (FakeConnection,), {"network": network})
    patch.setattr(tcp_cloud, "Connection", connection)
    with (
        memory(slots=slots, row_tokens=row_tokens) as near,
        memory(slots=slots + edge_slots, row_tokens=row_tokens) as distant,
    ):
        far = Far(World(distant, **settings), network, range(slots, slots + edge_slots), nccl[1])
        home = Home(World(near, **settings), network, policy, timeout_s, nccl[0])
        try:
            yield Joined(home, far, network)
        finally:
            home.cloud.close()
            patch.undo()
