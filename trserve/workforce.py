"""The worker processes of a server: started, watched, replaced when they die, given up.

Knows what to start and when, and tells the gateway; the slab's words are ``worker_loss.StandIn``'s
business, and whether a death is one too many that of ``restarts``. Knows no server states, no
requests and no signals.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from trserve.children import Child
from trserve.errors import StartFailedError
from trserve.ipc.child import ChildArguments
from trserve.ipc.control import Message, worker_identity
from trserve.ipc.process import thread_environment
from trserve.ipc.shared import Shared
from trserve.ipc.slab import Slab, WorkerStatus
from trserve.plan import ServerPlan
from trserve.restarts import WITHIN_S, Decision, Verdict, WorkerDeaths
from trserve.watchdog import Watchdog
from trserve.worker_loss import StandIn

REAPED_AFTER_S: Final = 10.0
LOOK_EVERY_S: Final = 1.0
START_AGAIN_S: Final = 1.0
"""After a start that the system refused: time in which others may end."""
_MODULE: Final = "trserve.workers.main"


@dataclass
class _Worker:
    """One model's process, or the lack of one.

    Attributes:
        child: the process; None between two.
        in_slab: whether the process may write to the slab; else we do.
        start_at: when the next one is to be started.
        killed_at: when this one was killed because it hung.
    """

    index: int
    title: str
    deaths: WorkerDeaths
    child: Child | None = None
    in_slab: bool = False
    start_at: float | None = None
    killed_at: float | None = None

    def overdue(self, now: float) -> bool:
        """Whether it was killed, and is still not reaped."""
        return self.killed_at is not None and now - self.killed_at >= REAPED_AFTER_S


class Workforce:
    """The workers of ``plan``.

    Args:
        arguments: what the worker of an index is told.
        watch: to be called with each child that is started.
        tell: sends a message to the gateway.
        note: says something to people.

    Attributes:
        router_parameters: what the entry worker said of its router's.
    """

    def __init__(
        self,
        plan: ServerPlan,
        shared: Shared,
        *,
        arguments: Callable[[int], ChildArguments],
        watch: Callable[[Child], None],
        tell: Callable[[Message], None],
        note: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._arguments = arguments
        self._watch = watch
        self._tell = tell
        self._note = note
        self._stand_in = StandIn(Slab(shared.slab_fd, plan.layout), shared.bells)
        self._watchdog = Watchdog(plan.watchdog_s)
        self._look_at = 0.0
        self.router_parameters: object = []
        self._workers = [
            _Worker(index, f"worker {index} ({model.name})", WorkerDeaths(plan.on_peer_loss))
            for index, model in enumerate(plan.models)
        ]

    def start(self) -> None:
        """Start all of them."""
        for worker in self._workers:
            self._start(worker)

    def _start(self, worker: _Worker) -> None:
        models = self._plan.models
        alone = sum(model.threads for model in models) <= len(os.sched_getaffinity(0))
        env = thread_environment(models[worker.index].threads, cores_to_itself=alone)
        arguments, identity = self._arguments(worker.index), worker_identity(worker.index)
        worker.start_at = None
        worker.child = Child.start(identity, worker.title, _MODULE, arguments, env)
        self._watch(worker.child)

    def _of(self, child: Child) -> _Worker | None:
        return next((worker for worker in self._workers if worker.child is child), None)

    # -- messages ----------------------------------------------------------------------------

    def on_hello(self, child: Child) -> None:
        """From here on it is itself in the slab; what it is about to read must be written."""
        if worker := self._of(child):
            worker.in_slab = True

    def on_ready(self, child: Child, router_parameters: object) -> None:
        """It can serve."""
        worker = self._of(child)
        if worker is None or not worker.in_slab:
            return  # its predecessor's message, which came late
        child.ready = True
        if worker.index == 0:
            self.router_parameters = router_parameters
        again = self._stand_in.status(worker.index) is not WorkerStatus.STARTING
        self._stand_in.set_status(worker.index, WorkerStatus.UP)
        worker.deaths.loaded()
        if again:
            self._note(f"{worker.title} is back")
            self._tell({"type": "worker_up", "model": worker.index})

    # -- deaths ------------------------------------------------------------------------------

    def replace(self, child: Child, now: float) -> str | None:
        """Replace a worker that was reaped; returns why the server must end, if it must."""
        worker = self._of(child)
        assert worker is not None, child.title
        end = self._describe(worker, child)
        self._watchdog.forget(worker.index)
        worker.child, worker.in_slab, worker.killed_at = None, False, None
        step = self._stand_in.take_over(worker.index)
        self._tell({"type": "worker_down", "model": worker.index, "message": end})
        decision = worker.deaths.note(
            now,
            loading=not child.ready,
            in_step=step.requests,
            poison=step.poison,
            early=step.early,
        )
        if step.poison:
            end += "; a request that did it for the second time is ended"
        return self._carry_out(decision, worker, end, now) or self._start_due(now)

    def _carry_out(
        self, decision: Decision, worker: _Worker, end: str, now: float, pause_s: float = 0.0
    ) -> str | None:
        if decision.verdict is Verdict.RESTART:
            self._note(f"{end}; it is started again")
            worker.start_at = now + max(decision.pause_s, pause_s)
            return None
        end += f", too often within {WITHIN_S:.0f} s"
        if decision.verdict is Verdict.END_SERVER or not self._others_left(worker):
            return end
        self._give_up(worker, end)
        return None

    def _describe(self, worker: _Worker, child: Child) -> str:
        if worker.killed_at is not None:
            return f"{child.title} hung for {self._plan.watchdog_s:g} s and was killed"
        return child.failure[0] if child.failure else f"{child.title} {child.describe_end()}"

    def _others_left(self, worker: _Worker) -> bool:
        others = (other.index for other in self._workers if other is not worker)
        return any(self._stand_in.status(index) is not WorkerStatus.LOST for index in others)

    def _give_up(self, worker: _Worker, message: str) -> None:
        self._stand_in.give_up(worker.index)
        self._note(f"{message}; the others go on without it")
        self._tell({"type": "worker_lost", "model": worker.index, "message": message})

    # -- from time to time -------------------------------------------------------------------

    def due(self) -> Iterable[float]:
        """When :meth:`tick` has something to do that cannot wait for a second."""
        return (worker.start_at for worker in self._workers if worker.start_at is not None)

    def tick(self, now: float) -> str | None:
        """Do what is due; returns why the server must end, if it must."""
        if (cause := self._start_due(now)) or now < self._look_at:
            return cause
        self._look_at = now + LOOK_EVERY_S
        for worker in self._workers:
            self._look(worker, now)
        stuck = [worker.title for worker in self._workers if worker.overdue(now)]
        return f"{stuck[0]} hung and does not end although it was killed" if stuck else None

    def _start_due(self, now: float) -> str | None:
        for worker in self._workers:
            if worker.start_at is not None and worker.start_at <= now:
                try:
                    self._start(worker)
                except StartFailedError as error:
                    decision = worker.deaths.note(now, loading=True)
                    cause = self._carry_out(decision, worker, str(error), now, START_AGAIN_S)
                    if cause is not None:
                        return cause
        return None

    def _look(self, worker: _Worker, now: float) -> None:
        index = worker.index
        status = self._stand_in.status(index)
        if status is WorkerStatus.LOST:
            self._stand_in.tend(index)
        elif status is WorkerStatus.RESTARTING and not worker.in_slab:
            self._stand_in.close_done(index)
        elif status is WorkerStatus.UP and worker.child is not None and worker.killed_at is None:
            self._kill_if_hung(worker, worker.child, now)

    def _kill_if_hung(self, worker: _Worker, child: Child, now: float) -> None:
        heartbeat = self._stand_in.heartbeat(worker.index)
        if self._watchdog.hangs(worker.index, heartbeat, now):
            worker.killed_at = now
            child.process.kill()
