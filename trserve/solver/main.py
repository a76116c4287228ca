"""The solver's process from its first act to its end: look, solve, tell the launcher.

Of low priority, on one thread. Not of the lowest: beside workers that never rest, 19 leaves it a
sixtieth of a core, and news comes a minute late; 5 leaves it a quarter. How much it takes over time
is bounded by how seldom it solves, not by its priority.
It holds nothing that anybody waits for, so the launcher simply ends it. Imports no torch.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from trserve.errors import EXIT_OK, EXIT_WORKER_LOST
from trserve.ipc.child import ChildArguments, begin_child, parse_child_arguments, say_hello
from trserve.ipc.control import SOLVER_IDENTITY, ControlClient

if TYPE_CHECKING:
    from trserve.ipc.layout import Layout

log = logging.getLogger(__name__)
NICENESS: Final = 5


class SolverPlan(msgspec.Struct, frozen=True):
    """What the solver needs of the server's plan."""

    models: list[Any]
    slots: int
    row_tokens: int

    @property
    def layout(self) -> Layout:
        """The slab's layout."""
        from trserve.ipc.layout import Layout

        return Layout(slots=self.slots, row_tokens=self.row_tokens, workers=len(self.models))


def _serve(arguments: ChildArguments, control: ControlClient) -> None:
    """Look and solve until the launcher says stop, or is gone."""
    from trserve.ipc.slab import Slab
    from trserve.solver.solver import Solver

    plan = msgspec.convert(say_hello(control), SolverPlan)
    solver = Solver(Slab(arguments.slab_fd, plan.layout))
    poller = select.poll()
    poller.register(control.fd, select.POLLIN)
    poller.register(arguments.launcher_fd, select.POLLIN)
    while True:
        rows = solver.look(time.monotonic())
        if rows is not None:
            control.send({"type": "thresholds", "rows": rows})
        # After every send too: it can swallow the next edge of the descriptor.
        for message in control.receive_all():
            if message["type"] == "stop":
                return
            if message["type"] == "held":
                solver.held = message["held"]
        ready = poller.poll(solver.wait_s * 1e3)
        if any(fd == arguments.launcher_fd for fd, _ in ready):
            return


def main() -> int:
    """Serve, leave; returns the exit code."""
    arguments = parse_child_arguments()
    begin_child(arguments, name=SOLVER_IDENTITY)
    os.nice(NICENESS)
    control = ControlClient(arguments.control, SOLVER_IDENTITY)
    try:
        _serve(arguments, control)
    except Exception as error:
        log.exception("the solver cannot go on")
        message = f"{type(error).__name__}: {error}"
        control.send({"type": "failed", "message": message, "exit_code": EXIT_WORKER_LOST})
        control.close(linger_ms=1000)
        return EXIT_WORKER_LOST
    control.close()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
