"""The gateway process from its first act to its end: load the tokenizer, serve, drain, leave.

Puts the parts together; each of them knows less than this file. Imports no torch.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trserve import __version__
from trserve.errors import RequestError, StartupError
from trserve.gateway.log_stream import LogStream
from trserve.ipc.child import (
    ChildArguments,
    begin_child,
    parse_child_arguments,
    say_hello,
)
from trserve.ipc.control import GATEWAY_IDENTITY, ControlClient, Message
from trserve.ipc.instance import remove_abandoned

if TYPE_CHECKING:
    from uvicorn.server import ServerState

    from trserve.gateway.app import App
    from trserve.gateway.cache_flush import CacheFlush
    from trserve.gateway.connection import Timeouts
    from trserve.gateway.dispatcher import Dispatcher
    from trserve.gateway.routing_admin import RoutingAdmin
    from trserve.gateway.service import Service
    from trserve.ipc.slab import Slab

log = logging.getLogger(__name__)
_KEEP_ALIVE_S = 75
_BEAT_S = 1.0
_YOUNG_OBJECTS = 2_000


def _nothing() -> None:
    """Nothing is to be sent away."""


class Gateway:
    """The parts of the gateway, and its control loop.

    Attributes:
        at_end: called once nothing is served any more; takes two seconds at most.
    """

    def __init__(
        self,
        arguments: ChildArguments,
        control: ControlClient,
        slab: Slab,
        service: Service,
        dispatcher: Dispatcher,
        app: App,
        server_state: ServerState,
        timeouts: Timeouts,
        cache_flush: CacheFlush,
        admin: RoutingAdmin,
    ) -> None:
        self._arguments = arguments
        self._control = control
        self._slab = slab
        self._service = service
        self._dispatcher = dispatcher
        self._app = app
        self._stopped = asyncio.Event()
        self._server_state = server_state
        self._timeouts = timeouts
        self._cache_flush = cache_flush
        self._admin = admin
        self.at_end: Callable[[], None] = _nothing
        admin.ask = cache_flush.ask = self._ask

    async def run(self) -> None:
        """Serve until the launcher says stop, or is gone."""
        loop = asyncio.get_running_loop()
        arguments = self._arguments
        loop.add_reader(arguments.bells[-1], self._dispatcher.on_bell)
        loop.add_reader(self._control.fd, self._on_control)
        loop.add_reader(arguments.launcher_fd, _leave_abandoned, arguments.control)
        listener = socket.socket(fileno=arguments.listen_fd)
        listener.setblocking(False)
        server = await loop.create_server(self._connection_factory(), sock=listener, backlog=4096)
        # What a gateway that died left may be closed already, and no bell will say so again.
        self._dispatcher.on_bell()
        self._beat()
        self._control.send({"type": "ready"})
        # What arrived before the reader was added raised no edge for it.
        self._on_control()
        await self._stopped.wait()
        server.close()
        self.at_end()

    def _beat(self) -> None:
        """Say that this loop is not stuck; the launcher looks."""
        self._slab.gateway_heartbeat = time.monotonic_ns()
        asyncio.get_running_loop().call_later(_BEAT_S, self._beat)

    def _connection_factory(self) -> Any:
        from trserve.gateway.connection import Connection, connection_config

        config = connection_config(self._app, _KEEP_ALIVE_S)
        state = self._server_state
        state.default_headers = [(b"server", b"trserve")]
        timeouts = self._timeouts
        return lambda: Connection(
            config=config, server_state=state, app_state={}, timeouts=timeouts
        )

    # -- control -----------------------------------------------------------------------------

    def _ask(self, message: Message) -> None:
        """Send to the launcher; what arrived meanwhile may raise no edge of its own."""
        self._control.send(message)
        asyncio.get_running_loop().call_soon(self._on_control)

    def _on_control(self) -> None:
        # Until none is left: answering a message is a send, which can swallow the next edge.
        while messages := self._control.receive_all():
            for message in messages:
                self._on_message(message)

    def _on_message(self, message: Message) -> None:
        from trserve.gateway.app import Phase

        kind = message["type"]
        if kind == "serve":
            self._service.set_router_parameters(message["router_parameters"])
            self._service.states.read(self._slab)
            self._service.states.on_message({"type": "mps", "models": message["mps"]})
            if self._app.phase is Phase.LOADING:  # it may be told of the end before the beginning
                self._app.phase = Phase.SERVING
            self._control.send({"type": "serving"})
        elif kind == "drain":
            self._app.phase = Phase.DRAINING
            self._drain()
        elif kind == "lost":
            self._app.phase = Phase.LOST
            self._dispatcher.fail_all(
                RequestError(message["message"], status=503, code="worker_lost")
            )
            self._drain()
        elif kind == "stop":
            self._stopped.set()
        elif not (self._cache_flush.on_message(message) or self._admin.on_message(message)):
            self._service.states.on_message(message)

    def _drain(self) -> None:
        """Tell the launcher as soon as no request is open."""
        for connection in tuple(self._server_state.connections):
            connection.refuse_incomplete()  # type: ignore[union-attr]
        self._dispatcher.on_idle = self._on_idle
        self._dispatcher.check_idle()

    def _on_idle(self) -> None:
        self._dispatcher.on_idle = None
        # The last answer's bytes are written by its own task; let it run first.
        asyncio.get_running_loop().call_soon(self._report_drained)

    def _report_drained(self) -> None:
        state = self._server_state
        # What a slow client has not taken yet would be lost with this process.
        if state.tasks or not all(connection.flushed for connection in state.connections):  # type: ignore[union-attr]
            asyncio.get_running_loop().call_later(0.01, self._report_drained)
        else:
            self._control.send({"type": "drained"})
            self._on_control()


def _on_sigterm(arguments: ChildArguments) -> None:
    """The launcher's death; while it lives, the signal is its to act on (a whole group got it)."""
    if os.getppid() != arguments.parent:
        _leave_abandoned(arguments.control)


def _leave_abandoned(control_endpoint: str) -> None:
    """The launcher was killed: remove its directory, since it no longer can, and end."""
    remove_abandoned(control_endpoint)
    os._exit(1)


def _build(arguments: ChildArguments, control: ControlClient) -> Gateway:
    import msgspec
    from uvicorn.server import ServerState

    from trserve.gateway.about import About
    from trserve.gateway.app import App, Phase
    from trserve.gateway.cache_flush import CacheFlush
    from trserve.gateway.connection import Timeouts
    from trserve.gateway.desk import Desk
    from trserve.gateway.dispatcher import Dispatcher
    from trserve.gateway.exposition import Exposition
    from trserve.gateway.health import Health
    from trserve.gateway.journal import use_format
    from trserve.gateway.page_routes import page_routes
    from trserve.gateway.routing_admin import RoutingAdmin
    from trserve.gateway.service import Service
    from trserve.gateway.slots import SlotTable
    from trserve.gateway.stats import Stats
    from trserve.gateway.stats_stream import Moment, StatsStream
    from trserve.gateway.telemetry import span_writer
    from trserve.ipc.links import open_outbox
    from trserve.ipc.slab import Slab
    from trserve.plan import ServerPlan

    plan = msgspec.convert(say_hello(control), ServerPlan)
    slab = Slab(arguments.slab_fd, plan.layout)
    outbox = open_outbox(slab, arguments.bells, plan.layout.gateway)
    slots = SlotTable(slab, outbox, plan.gateway_slots)
    service = Service(plan, slab)
    endpoint = plan.endpoint
    use_format(endpoint.log_format)
    place, most = service.states.place, endpoint.max_queue
    dispatcher = Dispatcher(slab, slots, arguments.bells[-1], place, most)
    health = Health(plan, slab, dispatcher, service.states)
    exposition = Exposition(service, slab, slots, dispatcher)
    labels = [
        (b"x-trserve-router", service.router_name.encode()),
        (b"x-trserve-version", __version__.encode()),
    ]
    flush = CacheFlush(len(plan.models), dispatcher, service.states)
    spans = span_writer(os.environ, service.router_name)
    desk = Desk(endpoint, labels, spans=None if spans is None else spans.close)
    app = App(service, dispatcher, health, exposition.render, desk, flush=flush.flush)
    admin = RoutingAdmin(plan, service)
    administrable = endpoint.admin_key is not None

    def is_loaded() -> bool:
        return app.phase is not Phase.LOADING

    about = About(service, admin.in_force, is_loaded, administrable=administrable)

    def moment() -> Moment:
        phase = app.phase
        return Moment(phase.name.lower(), phase.value, phase in (Phase.DRAINING, Phase.LOST))

    stream = StatsStream(Stats(service, slab, dispatcher), moment)
    app.add_routes(admin.table | about.table | stream.table)
    if endpoint.ui:
        app.add_routes(page_routes())
    timeouts = Timeouts(endpoint.header_timeout_s, endpoint.body_timeout_s)
    gateway = Gateway(
        arguments, control, slab, service, dispatcher, app, ServerState(), timeouts, flush, admin
    )
    if spans is not None:
        gateway.at_end = spans.shut_down
    return gateway


def _raise_file_limit() -> None:
    """Each client is a descriptor, and 1024 are soon used up."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(arguments: ChildArguments, control: ControlClient) -> None:
    gateway = _build(arguments, control)
    # Whatever is alive now stays. Requests leave few cycles, and walking the objects of a thousand
    # streams for them takes a fifth of what a request costs.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)
    await gateway.run()


def main() -> int:
    """Load, serve, leave; returns the exit code."""
    arguments = parse_child_arguments()
    if sys.stderr is not None:  # where it is closed, its number may be another file's
        sys.stderr = LogStream(sys.stderr.fileno())
    # SIGTERM, not SIGKILL, when the launcher dies: somebody must remove its directory.
    signal.signal(signal.SIGTERM, lambda *_: _on_sigterm(arguments))
    begin_child(arguments, parent_death=signal.SIGTERM)
    _raise_file_limit()
    control = ControlClient(arguments.control, GATEWAY_IDENTITY)
    import uvloop

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(arguments, control))
    except StartupError as error:
        control.send({"type": "failed", "message": str(error), "exit_code": error.exit_code})
        control.close(linger_ms=1000)
        return error.exit_code
    control.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
