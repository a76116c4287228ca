"""The process of an edge port: listens for other hosts' servers, and lets the models here write.

Stands in the slab for every model of whoever dials in (the placeholders). Puts the parts together;
each of them knows less than this file. Imports no torch.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

import msgspec

from trserve.edge.curve import read_server_keys
from trserve.edge.facts import RemoteFacts
from trserve.edge.greeting import describe
from trserve.edge.listener import Listener
from trserve.edge.nccl_opening import open_nccl
from trserve.edge.nccl_port import NcclPort
from trserve.edge.port import Port
from trserve.edge.port_sessions import PortSessions
from trserve.edge.port_slots import PortSlots
from trserve.edge.strays import Strays
from trserve.edge.wire import Limits
from trserve.ipc.child import ChildArguments, begin_child, parse_child_arguments, say_hello
from trserve.ipc.child_run import run_child
from trserve.ipc.control import ControlClient, worker_identity
from trserve.ipc.links import ShmMedium, open_outbox, receivers
from trserve.ipc.slab import Reach, Slab, WorkerStatus
from trserve.places import check_address
from trserve.plan import ServerPlan

log = logging.getLogger(__name__)
BELT_S: Final = 1.0
_BUSY_S: Final = 0.01
"""While an answer could not be sent for want of room."""


class PortLoop:
    """Runs an edge port until it is told to stop or the launcher is gone."""

    def __init__(
        self,
        arguments: ChildArguments,
        plan: ServerPlan,
        control: ControlClient,
        listener: Listener,
    ) -> None:
        slab = Slab(arguments.slab_fd, plan.layout)
        mine = [i for i, model in enumerate(plan.models) if model.place.is_placeholder]
        self._slab, self._mine = slab, mine
        self._control = control
        self._launcher_fd = arguments.launcher_fd
        self._listener = listener
        outbox = open_outbox(slab, arguments.bells, mine[0])
        self._flush = outbox.flush
        slots = PortSlots(slab, outbox, plan.port_slots, mine)
        self._slots = slots
        said = (describe(plan, plan.link_heartbeat_s), facts_of(plan), limits_of(plan))
        given = (listener, *said, self._status, os.urandom(16))
        nccl = open_nccl(plan)
        self._port = Port(*given) if nccl is None else NcclPort(*given, nccl)
        self._sessions = PortSessions(
            slab,
            slots,
            self._port.send,
            vocabulary=plan.tokenizer_size,
            early_prefill=plan.early_prefill != "off",
        )
        self._sessions.grammars = find_spec("llguidance") is not None and bool(plan.eos_token_ids)
        self._sessions.is_here = self._port.is_here
        self._port.sessions = self._sessions
        rings = [ring for each in mine for ring in receivers(ShmMedium(slab), plan.layout, each)]
        self._strays = Strays(slab, outbox, rings, mine, plan.port_slots)
        self._poller = select.epoll()
        # As a worker's: a bell is never read, and a poll says once that it rang.
        for each in mine:
            self._poller.register(arguments.bells[each], select.EPOLLIN | select.EPOLLET)
        others = () if nccl is None else (nccl.fd,)
        for fd in (listener.fd, control.fd, arguments.launcher_fd, *others):
            self._poller.register(fd, select.EPOLLIN)
        for each in mine:
            slab.workers[each].set("reach", Reach.ELSEWHERE)

    def run(self) -> None:
        """Serve until stopped."""
        self._strays.rescan()
        self._flush()
        try:
            while self.turn(self._poller.poll(self._timeout_s())):
                pass
        finally:
            self._port.close()

    def _timeout_s(self) -> float:
        if self._listener.has_more:
            return 0.0
        blocked, self._port.blocked = self._port.blocked, False
        return _BUSY_S if blocked else BELT_S

    def turn(self, events: Sequence[tuple[int, int]]) -> bool:
        """One iteration; False once the loop is to end."""
        now = time.monotonic()
        if self._launcher_fd in {fd for fd, _ in events}:
            log.error("the launcher ended; so does the edge port")
            return False
        if not self._heed():
            return False
        self._port.take_in(now)
        self._strays.take_in()
        self._flush()
        self._slots.collect()
        self._sessions.look()
        self._flush()
        self._port.tend(now)
        self._sessions.tend(now)
        self._flush()
        self._note(time.monotonic_ns())
        return True

    def _heed(self) -> bool:
        """Take in what the launcher says; False once the port is to end."""
        while messages := self._control.receive_all():
            for message in messages:
                if message["type"] == "stop":
                    return False
                if message["type"] == "flush_cache":  # it has none
                    for each in self._mine:
                        answer = {"type": "cache_flushed", "number": message["number"]}
                        self._control.send({**answer, "model": each})
                elif message["type"] == "confirm":
                    for each in self._mine:
                        answer = {"type": "confirmed", "number": message["number"]}
                        self._control.send({**answer, "model": each})
        return True

    def _status(self, model: int) -> str:
        name = WorkerStatus(self._slab.workers[model].get("status"))
        if name is WorkerStatus.STARTING:
            return "its model is still loading"
        return "its model could not be started again" if name is WorkerStatus.LOST else ""

    def _note(self, now_ns: int) -> None:
        for each in self._mine:
            self._slab.workers[each].set("heartbeat", now_ns)
        words = self._slab.workers[self._mine[0]]
        words.set("running", self._sessions.num_away)
        words.set("pending", self._sessions.num_sessions - self._sessions.num_away)
        words.set("link_dropped", self._port.bad_frames + self._sessions.stale)


def limits_of(plan: ServerPlan) -> Limits:
    """What frames may speak of."""
    return Limits(plan.row_tokens, plan.tokenizer_size, len(plan.models))


def facts_of(plan: ServerPlan) -> list[RemoteFacts | None]:
    """What is said of each model; nothing of those that are elsewhere."""
    return [
        None
        if model.remote
        else RemoteFacts(
            max_model_len=model.max_model_len,
            eos_token_ids=plan.eos_token_ids,
            active_parameters=model.active_parameters,
            dtype=model.dtype,
        )
        for model in plan.models
    ]


def _prepare(arguments: ChildArguments, control: ControlClient) -> PortLoop:
    plan = msgspec.convert(say_hello(control), ServerPlan)
    keys = read_server_keys(plan.edge_keys)
    host, port = check_address("--edge-listen", plan.edge_listen)
    listener = Listener(host, port, keys, limits_of(plan).frame_bytes)
    shown = f"[{host}]" if ":" in host else host
    log.info("edge port: listens at %s:%d for %d clients", shown, listener.port, len(keys.clients))
    loop = PortLoop(arguments, plan, control, listener)
    control.send({"type": "ready", "router_parameters": []})
    return loop


def main() -> int:
    """Listen, serve, leave; returns the exit code."""
    arguments = parse_child_arguments()
    begin_child(arguments, name="edge port")
    control = ControlClient(arguments.control, worker_identity(arguments.index))
    return run_child(control, "the edge port", lambda: _prepare(arguments, control).run)


if __name__ == "__main__":
    sys.exit(main())
