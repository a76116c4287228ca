"""The worker processes of a server: started, watched, replaced when they die, given up.

Knows what to start and when, and tells the gateway; the slab's words are ``worker_loss.StandIn``'s
business, and whether a death is one too many that of ``restarts``. Who is replaced together,
because they share a GPU, is ``gpus.side``'s to say. Knows no server states, no requests and no
signals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL
from typing import Final

from trserve.children import Child
from trserve.crew import Role, roles, title_of, workers_of
from trserve.errors import EXIT_UNAVAILABLE, StartFailedError
from trserve.gpus.side import GpuSide
from trserve.ipc.child import ChildArguments
from trserve.ipc.control import Message, worker_identity
from trserve.ipc.shared import Shared
from trserve.ipc.slab import Slab, WorkerStatus
from trserve.plan import ServerPlan
from trserve.restarts import WITHIN_S, Decision, Use, Verdict, WorkerDeaths
from trserve.watchdog import Watchdog
from trserve.worker_lives import Worker
from trserve.worker_loss import StandIn, Step
from trserve.workers.tp.group_files import group_fds

LOOK_EVERY_S: Final = 1.0
START_AGAIN_S: Final = 1.0
"""After a start that the system refused: time in which others may end."""


class Workforce:
    """The workers of ``plan``.

    Args:
        arguments: what the worker of an index is told.
        watch: to be called with each child that is started.
        tell: sends a message to the gateway.
        note: says something to people.
        directory: the server's own; there MPS daemons are found.

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
        directory: Path,
    ) -> None:
        self._plan = plan
        self._arguments = arguments
        self._watch = watch
        self._tell = tell
        self._note = note
        self._stand_in = StandIn(Slab(shared.slab_fd, plan.layout), shared.bells)
        self._watchdog = Watchdog(plan.watchdog_s)
        self._look_at = 0.0
        self._gpus = GpuSide(plan.gpu, directory, note)
        self.router_parameters: object = []
        self._workers = [
            Worker(indices, title_of(plan, indices), WorkerDeaths(plan.on_peer_loss))
            for indices in workers_of(plan).values()
        ]

    def start(self) -> None:
        """Start all of them. StartupError if a GPU that they need cannot be shared as asked."""
        self._gpus.start()
        self._gpus.on_change = lambda: self._tell({"type": "mps", "models": self._gpus.states()})
        for worker in self._workers:
            self._start(worker)

    def close(self) -> None:
        """Leave the GPUs; to be called when no worker is left."""
        self._gpus.close()

    def _start(self, worker: Worker) -> None:
        """Start all of its processes, or none. StartFailedError if the system has no room."""
        worker.start_at = None
        try:
            with group_fds(self._plan, worker.index) as fds:
                for role in roles(self._plan, worker.index):
                    worker.crew.append(self._spawn(worker, role, fds))
        except StartFailedError:
            while worker.crew:
                worker.crew.pop().discard()
            raise
        for child in worker.crew:
            self._watch(child)

    def _spawn(self, worker: Worker, role: Role, fds: tuple[int, ...]) -> Child:
        identity = worker_identity(worker.index, role.rank)
        title = worker.title + f", rank {role.rank}" * bool(role.rank)
        arguments = replace(self._arguments(worker.index), rank=role.rank, group_fds=fds)
        env = role.env | self._gpus.environment(worker.index, role.rank)
        child = Child.start(identity, title, role.module, arguments, env)
        child.process = self._gpus.process(child.process, worker.index)
        return child

    def _of(self, child: Child) -> Worker | None:
        return next((worker for worker in self._workers if child in worker.crew), None)

    # -- messages ----------------------------------------------------------------------------

    def serve_message(self) -> Message:
        """What the gateway is told before it takes requests."""
        message = {"type": "serve", "router_parameters": self.router_parameters}
        return {**message, "mps": self._gpus.states()}

    def on_hello(self, child: Child) -> None:
        """From here on it is itself in the slab; what it is about to read must be written."""
        worker = self._of(child)
        if worker is not None and child is worker.crew[0]:
            worker.in_slab = True

    def on_ready(self, child: Child, message: Message, now: float) -> None:
        """It can serve, and says what it knows of the router's parameters and of its device."""
        worker = self._of(child)
        if worker is None or worker.killed_at is not None:
            return  # what is left of it will not serve
        if child is worker.crew[0] and not worker.in_slab:
            return  # its predecessor's message, which came late
        if cause := self._gpus.on_ready(worker.index, message.get("mps")):
            child.failure = (f"{child.title}: {cause}", EXIT_UNAVAILABLE)
            child.process.kill()
            return
        child.ready = True
        if worker.index == 0 and child is worker.crew[0]:
            self.router_parameters = message.get("router_parameters", [])
        if worker.ready:
            self._on_worker_ready(worker, now)

    def _on_worker_ready(self, worker: Worker, now: float) -> None:
        again = self._stand_in.status(worker.index) is not WorkerStatus.STARTING
        for index in worker.indices:
            self._stand_in.set_status(index, WorkerStatus.UP)
        worker.deaths.loaded(now)
        if again:
            self._note(f"{worker.title} is back")
            self._tell_all(worker, {"type": "worker_up"})

    def _tell_all(self, worker: Worker, message: Message) -> None:
        for index in worker.indices:
            self._tell({**message, "model": index})

    # -- deaths ------------------------------------------------------------------------------

    def replace(self, child: Child, now: float) -> str | None:
        """Replace a worker of which ``child`` was reaped; why the server must end, if it must."""
        worker = self._of(child)
        assert worker is not None, child.title
        if not worker.end:
            worker.end = self._describe(worker, child)
        worker.crew.remove(child)
        if worker.crew:
            worker.kill(now)
            return None
        end, shared_with = worker.end, worker.shared_with
        worker.is_over()
        self._watchdog.forget(worker.index)
        if shared_with:
            # It was killed, or had the same fault of their GPU: the death of the other one counts.
            self._take_over(worker, blamed=child.process.returncode != -SIGKILL)
            self._tell_all(worker, {"type": "worker_down", "message": end})
            self._note(f"{end}; it is started again")
            worker.start_at = now
            return self._start_due(now)
        step = self._take_over(worker)
        self._tell_all(worker, {"type": "worker_down", "message": end})
        decision = worker.deaths.note(
            now,
            served=sum(map(self._stand_in.served, worker.indices)),
            in_step=step.requests,
            poison=step.poison,
            early=step.early,
        )
        if step.poison:
            end += "; a request that did it for the second time is ended"
        if cause := self._carry_out(decision, worker, end, now):
            return cause
        for other in self._unit(worker):
            if other.crew and not other.shared_with:
                other.shared_with = worker.title
                other.kill(now)
        return self._start_due(now)

    def _unit(self, worker: Worker) -> list[Worker]:
        """The others that must be replaced with ``worker``: those on its GPU, under MPS."""
        unit = self._gpus.unit(worker.index)
        return [other for other in self._workers if other is not worker and other.index in unit]

    def _take_over(self, worker: Worker, *, blamed: bool = True) -> Step:
        steps = [self._stand_in.take_over(index, blamed=blamed) for index in worker.indices]
        return Step(*(frozenset[Use]().union(*each) for each in zip(*steps, strict=True)))

    def _carry_out(
        self, decision: Decision, worker: Worker, end: str, now: float, pause_s: float = 0.0
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

    def _describe(self, worker: Worker, child: Child) -> str:
        if worker.shared_with:
            return f"{child.title} ended with {worker.shared_with}, whose GPU it shares"
        if worker.hung:
            return f"{child.title} hung for {self._plan.watchdog_s:g} s and was killed"
        return child.failure[0] if child.failure else f"{child.title} {child.describe_end()}"

    def _others_left(self, worker: Worker) -> bool:
        others = (
            index
            for other in self._workers
            if other is not worker and self._is_for_us(other)
            for index in other.indices
        )
        return any(self._stand_in.status(index) is not WorkerStatus.LOST for index in others)

    def _is_for_us(self, worker: Worker) -> bool:
        """Whether it writes for this server's clients: a port stands for others, at their hosts."""
        return not self._plan.models[worker.index].place.is_placeholder

    def _give_up(self, worker: Worker, message: str) -> None:
        for index in worker.indices:
            self._stand_in.give_up(index, pass_on=self._is_for_us(worker))
        self._note(f"{message}; the others go on without it")
        self._tell_all(worker, {"type": "worker_lost", "message": message})

    # -- from time to time -------------------------------------------------------------------

    def due(self) -> Iterable[float]:
        """When :meth:`tick` has something to do that cannot wait for a second."""
        return (
            worker.start_at
            for worker in self._workers
            if worker.start_at is not None and not self._waits(worker)
        )

    def _waits(self, worker: Worker) -> bool:
        """Whether others have to leave its GPU before it is started: theirs is the next event."""
        return any(other.crew and other.killed_at is not None for other in self._unit(worker))

    def tick(self, now: float) -> str | None:
        """Do what is due; returns why the server must end, if it must."""
        if (cause := self._start_due(now)) or now < self._look_at:
            return cause
        self._look_at = now + LOOK_EVERY_S
        self._gpus.look()
        for worker in self._workers:
            self._look(worker, now)
        stuck = [worker.title for worker in self._workers if worker.overdue(now)]
        return f"{stuck[0]} does not end although it was killed" if stuck else None

    def _start_due(self, now: float) -> str | None:
        for worker in self._workers:
            if worker.start_at is None or worker.start_at > now or self._waits(worker):
                continue
            if not any(other.crew for other in self._unit(worker)) and (
                cause := self._gpus.renew(worker.index)
            ):
                return cause
            try:
                self._start(worker)
            except StartFailedError as error:
                decision = worker.deaths.note(now)
                cause = self._carry_out(decision, worker, str(error), now, START_AGAIN_S)
                if cause is not None:
                    return cause
        return None

    def _look(self, worker: Worker, now: float) -> None:
        status = self._stand_in.status(worker.index)
        if status is WorkerStatus.LOST:
            for index in worker.indices:
                self._stand_in.tend(index, pass_on=self._is_for_us(worker))
        elif status is WorkerStatus.RESTARTING and not worker.in_slab:
            for index in worker.indices:
                self._stand_in.close_done(index)
        elif status is WorkerStatus.UP and worker.ready and worker.killed_at is None:
            self._kill_if_hung(worker, now)

    def _kill_if_hung(self, worker: Worker, now: float) -> None:
        heartbeat = self._stand_in.heartbeat(worker.index)
        if self._watchdog.hangs(worker.index, heartbeat, now):
            worker.hung = True
            worker.kill(now)
