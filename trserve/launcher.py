"""The supervisor: starts the processes of a server, watches them, drains and ends them.

Knows no tokens, no HTTP and no model; imports no torch. It owns what must outlive a child: the
listening socket, the slab's memory file, the doorbells and the instance directory.
"""

from __future__ import annotations

import os
import selectors
import time
from typing import Final

import msgspec

from trserve.children import KILL_AFTER_S, Child, Children
from trserve.errors import EXIT_OK, EXIT_UNAVAILABLE, EXIT_WORKER_LOST
from trserve.front import Front
from trserve.gateway_watch import GatewayWatch
from trserve.ipc.child import ChildArguments
from trserve.ipc.control import GATEWAY_IDENTITY, SOLVER_IDENTITY, ControlServer, Message
from trserve.ipc.estimates import read_heartbeat
from trserve.ipc.instance import InstanceDirectory
from trserve.ipc.shared import Shared
from trserve.ipc.slab import Slab
from trserve.lifecycle import ServerEvent, ServerState, advance
from trserve.plan import ServerPlan
from trserve.relay import RELAYED, relay
from trserve.signal_pipe import SignalPipe
from trserve.solving import NEWS, Solving
from trserve.workforce import Workforce

_TICK_S: Final = 1.0
_LAST_WORDS_S: Final = 0.3


class Launcher:
    """One server instance, from its first child to its last."""

    def __init__(
        self, plan: ServerPlan, front: Front, drain_timeout_s: float, shared: Shared | None = None
    ) -> None:
        self._plan = plan
        self._front = front
        self._drain_timeout_s = drain_timeout_s
        self._state = ServerState.STARTING
        self._children = Children()
        self._exit_code = EXIT_OK
        self._root_cause: str | None = None
        self._deadline: float | None = None
        self._signals: list[int] = []
        self._shared = shared or Shared.create(plan.layout)
        self._directory = InstanceDirectory()
        self._control = ControlServer(self._directory.control_endpoint)
        self._own_pidfd = os.pidfd_open(os.getpid())
        self._selector = selectors.DefaultSelector()
        self._workforce = Workforce(
            plan,
            self._shared,
            arguments=self._arguments,
            watch=self._watch,
            tell=lambda message: self._control.send(GATEWAY_IDENTITY, message),
            note=front.show_note,
            directory=self._directory.path,
        )
        self._slab = Slab(self._shared.slab_fd, plan.layout)
        self._solving = Solving(
            plan, self._children, self._control, self._arguments, self._watch, front.show_note
        )
        self._gateway_watch = GatewayWatch(plan, self._shared, self._start_gateway, front.show_note)

    def __enter__(self) -> Launcher:
        self._pipe = SignalPipe()
        self._selector.register(self._pipe.fd, selectors.EVENT_READ)
        self._selector.register(self._control.fd, selectors.EVENT_READ)
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave nothing behind, however ``run`` ended."""
        self._children.kill_all()
        self._workforce.close()
        self._control.close()
        self._directory.remove()
        self._pipe.close()

    # -- the loop ----------------------------------------------------------------------------

    def run(self) -> int:
        """Start the children and supervise them to the end; returns the exit code."""
        self._front.show_plan(self._plan)
        self._workforce.start()
        self._start_gateway()
        while self._state is not ServerState.STOPPED:
            self._turn()
        if self._root_cause:
            self._front.show_end(self._root_cause, self._exit_code)
        return self._exit_code

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._wait_s()):
            if key.fd == self._pipe.fd:
                self._on_signals(self._pipe.read())
            elif key.fd != self._control.fd:
                self._on_child_end(key.fd)
        self._receive()
        if self._replaces and (cause := self._tend(time.monotonic())):
            self._root_cause, self._exit_code = cause, EXIT_WORKER_LOST
            self._end_requests()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._on_deadline()
            self._receive()
        if self._state is ServerState.STOPPING and not len(self._children):
            self._move(ServerEvent.CHILDREN_GONE)

    def _tend(self, now: float) -> str | None:
        """Do what is due for the children; returns why the server must end, if it must."""
        self._solving.tick(now, read_heartbeat(self._slab))
        serves = self._state is ServerState.SERVING  # else the drain limit ends one that hangs
        gateway = self._children.by_identity(GATEWAY_IDENTITY) if serves else None
        return self._gateway_watch.tick(gateway, now) or self._workforce.tick(now)

    def _receive(self) -> None:
        """Take in control messages: after every wake and every send, until none is left.

        The descriptor is edge-triggered, and answering a message is a send.
        """
        while messages := self._control.receive_all():
            for identity, message in messages:
                self._on_message(identity, message)

    def _wait_s(self) -> float:
        due = [*self._workforce.due(), *self._solving.due()] if self._replaces else []
        if self._deadline is not None:
            due.append(self._deadline)
        now = time.monotonic()
        return min(_TICK_S, max(0.0, min(due, default=now + _TICK_S) - now))

    @property
    def _replaces(self) -> bool:
        """Whether children are kept alive: between the ready line and the end's beginning."""
        serves = self._state in (ServerState.SERVING, ServerState.DRAINING)
        return serves and self._root_cause is None

    def _move(self, event: ServerEvent) -> None:
        self._state = advance(self._state, event)

    # -- children ----------------------------------------------------------------------------

    def _arguments(self, index: int) -> ChildArguments:
        return ChildArguments(
            parent=os.getpid(),
            launcher_fd=self._own_pidfd,
            control=self._directory.control_endpoint,
            slab_fd=self._shared.slab_fd,
            bells=self._shared.bells,
            index=index,
        )

    def _watch(self, child: Child) -> None:
        self._children.add(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ)

    def _start_gateway(self) -> None:
        self._watch(self._front.start(self._arguments(-1)))

    def _forget(self, child: Child) -> None:
        self._selector.unregister(child.pidfd)
        self._children.reap(child.pidfd)

    def _on_child_end(self, pidfd: int) -> None:
        child = self._children.by_pidfd(pidfd)
        if child is None:
            return  # killed and reaped since the select that reported it
        self._hear_out(child)
        self._forget(child)
        if self._state is not ServerState.STOPPING:
            self._on_loss(child)

    def _hear_out(self, child: Child) -> None:
        """Take in the last words of a child that ended by itself; they are the root cause.

        They were sent before it ended, but the socket's own thread may not have read them yet.
        """
        deadline = time.monotonic() + _LAST_WORDS_S
        self._receive()
        while child.gave_up and child.failure is None and time.monotonic() < deadline:
            self._control.wait(deadline - time.monotonic())
            self._receive()

    def _on_loss(self, child: Child) -> None:
        if child.identity == SOLVER_IDENTITY:
            self._solving.replace(child, time.monotonic())
            return
        if child.identity == GATEWAY_IDENTITY:
            if self._replace_gateway(child):
                return
        elif self._replace_worker(child):
            return
        starting = self._state is ServerState.STARTING
        if self._root_cause is None:
            cause, code = child.failure or (
                f"{child.title} {child.describe_end()}{' while loading' if starting else ''}",
                EXIT_UNAVAILABLE if starting else EXIT_WORKER_LOST,
            )
            self._root_cause, self._exit_code = cause, code
        if not starting and child.identity != GATEWAY_IDENTITY:
            self._end_requests()
            return
        self._move(ServerEvent.CHILD_LOST)
        if starting:
            self._stop_children()
        else:
            self._finish_drain()

    def _end_requests(self) -> None:
        """A model is lost for good: its clients are told, then the server ends."""
        self._move(ServerEvent.CHILD_LOST)
        self._deadline = time.monotonic() + KILL_AFTER_S
        self._control.send(GATEWAY_IDENTITY, {"type": "lost", "message": str(self._root_cause)})

    def _replace_worker(self, child: Child) -> bool:
        """Start another worker for one that was reaped; False if the server must end instead."""
        return self._replaces and self._goes_on(self._workforce.replace(child, time.monotonic()))

    def _replace_gateway(self, child: Child) -> bool:
        """Start another gateway for one that was reaped; False if the server must end instead."""
        serves = self._state is ServerState.SERVING and not child.is_owner
        return serves and self._goes_on(self._gateway_watch.replace(child, time.monotonic()))

    def _goes_on(self, cause: str | None) -> bool:
        if cause is not None:
            self._root_cause, self._exit_code = cause, EXIT_WORKER_LOST
        return cause is None

    # -- messages ----------------------------------------------------------------------------

    def _on_message(self, identity: str, message: Message) -> None:
        child = self._children.by_identity(identity)
        if child is None:
            return
        kind = message["type"]
        if kind == "hello":
            self._workforce.on_hello(child)
            self._control.send(identity, {"type": "plan", "plan": msgspec.to_builtins(self._plan)})
            self._solving.on_hello(child)
        elif kind == "progress":
            self._front.show_progress(child.title, message["done"], message["total"])
        elif kind == "failed":
            child.failure = (f"{child.title}: {message['message']}", message["exit_code"])
        elif kind == "ready":
            self._on_ready(child, message)
        elif kind in NEWS:
            self._solving.on_message(message)
        elif kind in RELAYED:
            relay(self._control, self._children, child, message)
        elif kind == "serving":
            self._on_serving()
        elif kind == "quit":
            self._on_quit()
        elif kind == "drained" and self._state is ServerState.DRAINING:
            self._finish_drain()

    def _on_ready(self, child: Child, message: Message) -> None:
        starting = self._state is ServerState.STARTING
        is_gateway = child.identity == GATEWAY_IDENTITY
        if is_gateway:
            child.ready = True
        else:
            self._workforce.on_ready(child, message, time.monotonic())
            self._solving.on_ready(child)
        if all(child.ready for child in self._children) if starting else is_gateway:
            self._control.send(GATEWAY_IDENTITY, self._workforce.serve_message())

    def _on_serving(self) -> None:
        """The gateway takes requests: now the ready line is true."""
        if self._state is ServerState.STARTING:
            self._move(ServerEvent.ALL_READY)
            self._solving.start()
            self._front.show_ready(self._plan)
        elif self._state is ServerState.DRAINING:  # asked for while this gateway was starting
            self._control.send(GATEWAY_IDENTITY, {"type": "drain"})

    # -- the end -----------------------------------------------------------------------------

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            self._signals.append(number)
            if len(self._signals) > 1:
                self._force(128 + number)
            elif self._state is ServerState.SERVING:
                self._move(ServerEvent.STOP_ASKED)
                self._deadline = time.monotonic() + self._drain_timeout_s
                gateway = self._children.by_identity(GATEWAY_IDENTITY)
                if gateway is not None and gateway.ready:  # else once it serves
                    self._control.send(GATEWAY_IDENTITY, {"type": "drain"})
                self._solving.drain()
                self._front.show_draining()
            elif self._state is ServerState.STARTING:
                self._move(ServerEvent.STOP_ASKED)
                self._stop_children()

    def _on_quit(self) -> None:
        """The program that embeds the server wants no more of it."""
        if self._state is ServerState.STARTING:
            self._move(ServerEvent.STOP_ASKED)
            self._stop_children()
            return
        if self._state is ServerState.SERVING:
            self._move(ServerEvent.STOP_ASKED)
        if self._state is ServerState.DRAINING:
            self._finish_drain()

    def _finish_drain(self) -> None:
        self._move(ServerEvent.DRAINED)
        self._stop_children()

    def _stop_children(self) -> None:
        """Ask every child to end; ``_on_deadline`` kills those that do not."""
        self._deadline = time.monotonic() + KILL_AFTER_S
        for child in self._children:
            if child.is_owner:
                self._forget(child)  # it lives on without us
            elif child.ready:
                self._control.send(child.identity, {"type": "stop"})
            else:
                child.process.kill()  # still loading, or the solver: it holds nothing

    def _on_deadline(self) -> None:
        if self._state is ServerState.DRAINING and self._root_cause is None:
            self._front.show_note("the drain limit is over; open streams are cut")
            self._force(128 + self._signals[0])
        elif self._state is ServerState.DRAINING:
            self._finish_drain()
        else:
            self._kill()

    def _force(self, exit_code: int) -> None:
        self._exit_code = exit_code
        if self._state is ServerState.DRAINING:
            self._move(ServerEvent.DRAINED)
        self._kill()

    def _kill(self) -> None:
        self._deadline = None
        for child in self._children:
            self._selector.unregister(child.pidfd)
        self._children.kill_all()
