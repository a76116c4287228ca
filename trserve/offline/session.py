"""The gateway of an embedded instance: an event loop in a thread of its own, beside its workers.

Fills slots, reads rows and passes on what came; ``trserve.host`` supervises the workers in a
process beside it. Safe to call from any thread. Knows no prompts, no options and no texts.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, Final, TypeVar

from trserve.embedded import STOP_TIMEOUT_S, HostProcess, startup_error
from trserve.errors import RequestError, TrserveError
from trserve.gateway.dispatcher import Dispatcher, Job
from trserve.gateway.generation import Generation
from trserve.gateway.service import Service
from trserve.gateway.slots import SlotTable
from trserve.ipc.control import GATEWAY_IDENTITY, ControlClient, Message
from trserve.ipc.links import open_outbox
from trserve.ipc.slab import Slab
from trserve.plan import ServerPlan
from trserve.recording import EndLog

START_TIMEOUT_S: Final = 600.0
LIVENESS_S: Final = 1.0
"""How often whoever waits for the thread looks whether it still runs."""

T = TypeVar("T")


class EngineError(TrserveError):
    """The engine cannot go on: a worker ended, or it was closed."""


class Session:
    """An instance from its start to its end.

    Args:
        environment: variables for its processes, beside those of this one.

    Attributes:
        service: makes jobs of requests; may be used by any thread.
        ends: where the ends of answers are noted, if the instance records.

    Raises:
        StartupError: a model cannot be loaded; the message says why.
    """

    def __init__(self, plan: ServerPlan, environment: Mapping[str, str]) -> None:
        self._plan = plan
        self._host = HostProcess(plan, environment)
        self._failure: Exception | None = None
        self._stop: Callable[[], None] | None = None
        self.ends = None if plan.record is None else EndLog(plan.record)
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="trserve-engine", daemon=True
        )
        self._thread.start()
        try:
            started.result(START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    # -- for any thread ----------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job]) -> list[Generation]:
        """Get ``jobs`` into the server, all at once; waits while there is too little room.

        Raises:
            RequestError: they are refused.
            EngineError: the engine cannot go on.
        """
        self.check()
        begun: list[Generation] = []
        future = self._schedule(jobs, begun)
        try:
            return self._wait(future)
        except BaseException:
            future.cancel()
            # They may be in the server by now, and whoever was interrupted knows none of them.
            self.cancel(begun)
            raise

    def _schedule(self, jobs: Sequence[Job], begun: list[Generation]) -> Future[list[Generation]]:
        """``begun`` has them as soon as they are in the server."""

        async def submit_all() -> list[Generation]:
            begun.extend(await self._dispatcher.submit_all(jobs))
            return begun

        submission = submit_all()
        try:
            return asyncio.run_coroutine_threadsafe(submission, self._loop)
        except RuntimeError:  # the loop closed a moment ago
            submission.close()
            raise self._closed() from None

    def _wait(self, future: Future[T]) -> T:
        while True:
            try:
                return future.result(LIVENESS_S)
            except TimeoutError:
                self.check()
            except CancelledError:
                raise self._closed() from None
            except RequestError as error:
                raise self.translated(error) from None

    def cancel(self, generations: Sequence[Generation]) -> None:
        """Whoever wanted them is gone."""
        self._call(self._cancel, generations)

    def check(self) -> None:
        """Raise EngineError if nothing more will come."""
        if self._failure is not None or not self._thread.is_alive():
            raise self._closed()

    def _closed(self) -> EngineError:
        return EngineError(str(self._failure or "the engine is closed"))

    def translated(self, error: Exception) -> Exception:
        """What the program is told of ``error``, which ended a request."""
        lost = isinstance(error, RequestError) and error.code == "worker_lost"
        return EngineError(str(error)) if lost else error

    # -- the thread --------------------------------------------------------------------------

    def _cancel(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            if not generation.ended:
                self._dispatcher.cancel(generation)

    def _run(self, started: Future[None]) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._serve(started))
        except Exception as error:
            self._failure = error
            if not started.done():
                started.set_exception(error)

    async def _serve(self, started: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        self._started = started
        shared = self._host.shared
        assert shared is not None, "closed before it was started"
        slab = Slab(shared.slab_fd, self._plan.layout)
        bells = shared.bells
        self.service = Service(self._plan, slab)
        outbox = open_outbox(slab, bells, self._plan.layout.gateway)
        slots = SlotTable(slab, outbox, self._plan.gateway_slots)
        self._dispatcher = Dispatcher(
            slab, slots, bells[-1], self.service.states.place, waits_for_pages=True
        )
        self._control = ControlClient(self._host.control_endpoint, GATEWAY_IDENTITY)
        self._loop.add_reader(bells[-1], self._dispatcher.on_bell)
        self._loop.add_reader(self._control.fd, self._on_control)
        self._loop.add_reader(self._host.output_fd, self._on_host_output)
        self._control.send({"type": "ready"})
        self._on_control()
        closed = EngineError("the engine is closed")
        self._stop = lambda: self._call(self._fail, closed)
        await self._stopped.wait()
        self._control.send({"type": "quit"})
        self._control.close(linger_ms=1000)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        # A loop that has closed has failed every request, and wants to hear nothing more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _on_control(self) -> None:
        while messages := self._control.receive_all():
            for message in messages:
                self._on_message(message)

    def _on_message(self, message: Message) -> None:
        if message["type"] == "serve":
            self.service.set_router_parameters(message["router_parameters"])
            self._control.send({"type": "serving"})
            if not self._started.done():
                self._started.set_result(None)
        elif message["type"] == "lost":
            self._fail(EngineError(message["message"]))
        else:
            self.service.states.on_message(message)

    def _on_host_output(self) -> None:
        """The supervisor's last line, or its end without one."""
        line = self._host.read_line()
        self._loop.remove_reader(self._host.output_fd)
        if not line:
            self._fail(EngineError("the engine's supervisor ended"))
            return
        self._fail(startup_error(line["failed"], line["exit_code"]))

    def _fail(self, error: TrserveError) -> None:
        self._failure = self._failure or error
        lost = RequestError(str(self._failure), status=503, code="worker_lost")
        self._dispatcher.fail_all(lost)
        if not self._started.done():
            self._started.set_exception(error)
        self._stopped.set()

    # -- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """End the workers; safe to call twice. Requests in flight fail."""
        if self._stop is not None:
            self._stop()
        self._thread.join(STOP_TIMEOUT_S)
        self._host.close()
