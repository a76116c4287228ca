"""What workers are told of waiting for more requests: the solver's thresholds; in a drain, not to.

Starts the solver process once the server serves, replaces it when it dies, gives it up. Nobody
waits for it: without it the thresholds in force stay. Knows no server states, no slab and nothing
of how thresholds are found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from trserve.children import Child
from trserve.ipc.child import ChildArguments
from trserve.ipc.control import GATEWAY_IDENTITY, SOLVER_IDENTITY, ControlServer, Message
from trserve.ipc.process import thread_environment
from trserve.plan import ServerPlan

MOST_DEATHS: Final = 3
WITHIN_S: Final = 60.0
FIRST_PAUSE_S: Final = 1.0
_MODULE: Final = "trserve.solver.main"


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
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)
        self._start_at: float | None = None
        self._news: dict[str, Message] = {}

    def start(self) -> None:
        """Start it, if there is anything for it to do."""
        self._start_at = None
        if self._is_wanted:
            env = thread_environment(1)
            arguments = self._arguments(-1)
            self._watch(Child.start(SOLVER_IDENTITY, "the solver", _MODULE, arguments, env))

    def on_thresholds(self, message: Message) -> None:
        """It has found better thresholds."""
        self._tell(message["rows"])

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

    def on_ready(self, child: Child) -> None:
        """A worker can serve, perhaps in another one's place: it has to know what the others do."""
        for message in self._news.values():
            self._control.send(child.identity, message)

    def replace(self, child: Child, now: float) -> None:
        """It was reaped: start another one after a pause, or go on without it."""
        end = child.failure[0] if child.failure else f"{child.title} {child.describe_end()}"
        recent = [at for at in self._deaths if now - at < WITHIN_S]
        self._deaths.append(now)
        if len(recent) + 1 < MOST_DEATHS:
            self._start_at = now + FIRST_PAUSE_S * 2 ** len(recent)
            self._note(f"{end}; it is started again, the batch thresholds stay as they are")
            return
        self._is_wanted = False
        self._note(
            f"{end}, the third time within a minute; models wait for nobody from now on "
            "(--batch-threshold gives them fixed thresholds)"
        )
        self._tell({})

    def due(self) -> Iterable[float]:
        """When :meth:`tick` has something to do that cannot wait for a second."""
        return () if self._start_at is None else (self._start_at,)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self._start_at is not None and self._start_at <= now:
            self.start()
