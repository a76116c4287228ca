"""What workers are told while they serve: of waiting for more requests, by the solver or the admin;
not to, in a drain; and other values of the router's parameters.

Starts the solver process once the server serves, kills it when it hangs, replaces it when it dies,
gives it up. Nobody waits for it: without it the thresholds in force stay. Knows no server states,
no slab and nothing of how thresholds are found.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from trserve.children import Child
from trserve.errors import EXIT_WORKER_LOST, StartFailedError
from trserve.ipc.child import ChildArguments
from trserve.ipc.control import (
    GATEWAY_IDENTITY,
    SOLVER_IDENTITY,
    ControlServer,
    Message,
    is_worker,
    worker_identity,
)
from trserve.ipc.process import thread_environment
from trserve.plan import ServerPlan
from trserve.watchdog import Watchdog

NEWS: Final = ("thresholds", "routing", "confirmed")
MOST_DEATHS: Final = 3
WITHIN_S: Final = 60.0
FIRST_PAUSE_S: Final = 1.0
PATIENCE: Final = 3
"""So many times longer than the others a solver may be silent: its priority is low, nobody waits
for it, and where all cores are busy half a second's work takes long by the clock."""
_MODULE: Final = "trserve.solver.main"
_SOLVER: Final = 0  # the one that the watchdog watches


class Solving:
    """The solver of ``plan``, if its thresholds are to follow the load.

    Args:
        children, control: the server's.
        arguments: what a child without an index is told.
        watch: to be called with each child that is started.
        note: says something to people.
    """

    def __init__(
        self,
        plan: ServerPlan,
        children: Iterable[Child],
        control: ControlServer,
        arguments: Callable[[int], ChildArguments],
        watch: Callable[[Child], None],
        note: Callable[[str], None],
    ) -> None:
        self._models = len(plan.models)
        self._is_wanted = self._models > 1 and plan.batch_threshold is None
        self._children = children
        self._control = control
        self._arguments = arguments
        self._watch = watch
        self._note = note
        self._limit_s = PATIENCE * plan.watchdog_s
        self._watchdog = Watchdog(self._limit_s)
        self._watched: Child | None = None
        self._hung_s = 0.0  # what solvers that hung have spent so, which is no time between deaths
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)
        self._start_at: float | None = None
        self._news: dict[str, Message] = {}
        self._found: Mapping[str, Sequence[int]] = {
            str(n): list(row) for n, row in plan.thresholds.rows.items()
        }
        self._held: Mapping[str, Sequence[int]] | None = None
        self._router: dict[str, float] = {}
        self._number = -1  # of the gateway's last question, and who has still to confirm it
        self._unconfirmed = set[str]()

    def start(self) -> None:
        """Start it, if there is anything for it to do."""
        self._start_at = None
        if self._is_wanted:
            env = thread_environment(1)
            arguments = self._arguments(-1)
            try:
                self._watch(Child.start(SOLVER_IDENTITY, "the solver", _MODULE, arguments, env))
            except StartFailedError as error:
                self._on_end(str(error), time.monotonic())

    def on_message(self, message: Message) -> None:
        """One of :data:`NEWS`, from the solver, the gateway or a worker."""
        kind = message["type"]
        if kind == "thresholds":
            self.on_thresholds(message)
        elif kind == "routing":
            self.on_routing(message)
        elif message["number"] == self._number:
            self._on_confirmed(worker_identity(message["model"]))

    def on_thresholds(self, message: Message) -> None:
        """It has found better thresholds; they wait while the admin holds others."""
        self._found = message["rows"]
        if self._held is None:
            self._tell(self._found)

    def on_routing(self, message: Message) -> None:
        """The gateway passes on what the admin wants, or asks what holds.

        ``router`` has parameters to change. ``rows`` are thresholds to hold, None for those of
        the start or the solver; without either key nothing changes. The answer comes once the
        workers have taken it in.
        """
        if router := message.get("router"):
            self._router.update(router)
            self._tell_all({"type": "router_config", "values": self._router})
        if "rows" in message:
            self._held = message["rows"]
            self._tell_solver()
            self._tell(self._found if self._held is None else self._held)
        self._number = message["number"]
        self._unconfirmed = set[str]()
        if "rows" in message or router:
            self._ask_confirmation()
        if not self._unconfirmed:
            self._answer()

    def _ask_confirmation(self) -> None:
        """What a worker confirms comes behind the news in its queue, so it has those by then."""
        for child in self._children:
            if child.ready and is_worker(child.identity):
                self._unconfirmed.add(child.identity)
                self._control.send(child.identity, {"type": "confirm", "number": self._number})

    def _on_confirmed(self, identity: str) -> None:
        if identity in self._unconfirmed:
            self._unconfirmed.remove(identity)
            if not self._unconfirmed:
                self._answer()

    def _answer(self) -> None:
        """Tell the gateway what is in force."""
        self._control.send(
            GATEWAY_IDENTITY,
            {
                "type": "routing",
                "number": self._number,
                "router": self._router,
                "rows": self._found if self._held is None else self._held,
                "held": self._held is not None,
            },
        )

    def _tell_solver(self) -> None:
        """Whether what it found is in force, for what it measures would say nothing of it else."""
        if self._solver() is not None:
            self._control.send(SOLVER_IDENTITY, {"type": "held", "held": self._held is not None})

    def _solver(self) -> Child | None:
        return next((each for each in self._children if each.identity == SOLVER_IDENTITY), None)

    def _tell(self, rows: Mapping[str, Sequence[int]]) -> None:
        self._tell_all({"type": "thresholds", "models": self._models, "rows": rows})

    def drain(self) -> None:
        """Nothing new will come that would be worth waiting for."""
        self._tell_all({"type": "drain"})

    def _tell_all(self, message: Message) -> None:
        self._news[message["type"]] = message
        for child in self._children:
            if child.ready and child.identity != GATEWAY_IDENTITY:
                self._control.send(child.identity, message)

    def on_hello(self, child: Child) -> None:
        """A worker starts, perhaps in another one's place: its first step is as theirs would be."""
        if child.identity == SOLVER_IDENTITY:
            self._tell_solver()
        elif child.identity != GATEWAY_IDENTITY:
            self._tell_news(child)

    def on_ready(self, child: Child) -> None:
        """A worker can serve; there may be news since its hello."""
        self._tell_news(child)
        self._on_confirmed(child.identity)

    def _tell_news(self, child: Child) -> None:
        for message in self._news.values():
            self._control.send(child.identity, message)

    def replace(self, child: Child, now: float) -> None:
        """It was reaped: start another one after a pause, or go on without it."""
        self._on_end(
            child.failure[0] if child.failure else f"{child.title} {child.describe_end()}", now
        )

    def _on_end(self, end: str, now: float) -> None:
        lived = now - self._hung_s
        recent = [at for at in self._deaths if lived - at < WITHIN_S]
        self._deaths.append(lived)
        if len(recent) + 1 < MOST_DEATHS:
            self._start_at = now + FIRST_PAUSE_S * 2 ** len(recent)
            self._note(f"{end}; it is started again, the batch thresholds stay as they are")
            return
        self._is_wanted = False
        self._note(
            f"{end}, the third time within a minute; models wait for nobody from now on "
            "(--batch-threshold gives them fixed thresholds)"
        )
        self.on_thresholds({"rows": {}})

    def due(self) -> Iterable[float]:
        """When :meth:`tick` has something to do that cannot wait for a second."""
        return () if self._start_at is None else (self._start_at,)

    def tick(self, now: float, heartbeat: int) -> None:
        """Do what is due; ``heartbeat`` counts the solver's signs of life so far."""
        if self._start_at is not None and self._start_at <= now:
            self.start()
        self._look_after(self._solver(), heartbeat, now)

    def _look_after(self, solver: Child | None, heartbeat: int, now: float) -> None:
        """Kill a solver that hangs; its end is then that of any other."""
        if solver is not self._watched:
            self._watched = solver
            self._watchdog.forget(_SOLVER)
        if solver is None or solver.failure is not None:
            return
        if self._watchdog.hangs(_SOLVER, heartbeat, now):
            message = f"{solver.title} hung for {self._limit_s:g} s and was killed"
            solver.failure = (message, EXIT_WORKER_LOST)
            self._hung_s += self._limit_s
            solver.process.kill()
