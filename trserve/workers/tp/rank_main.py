"""The process of a rank other than 0: load a share of one model, follow rank 0's plans, leave.

It is no worker: it has no place in the slab, which it never maps, no scheduler and no requests. It
ends when rank 0 says so, with the launcher, or by an error; the loss of a rank is that of the
worker, whatever the reason, so nothing is ever repaired here.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from trserve.errors import EXIT_OK, EXIT_UNAVAILABLE, EXIT_WORKER_LOST, StartupError
from trserve.gpus.worker_side import hold_device
from trserve.ipc.child import ChildArguments, begin_child, parse_child_arguments, say_hello
from trserve.ipc.child_run import fail
from trserve.ipc.control import ControlClient, worker_identity
from trserve.plan import ServerPlan

if TYPE_CHECKING:
    from trserve.workers.tp.plan_ring import PlanReader

log = logging.getLogger(__name__)


def _control_handler(control: ControlClient, readers: list[PlanReader]) -> Callable[[], bool]:
    """What to do about messages: of all that a worker is told, only the end concerns a rank.

    Rank 0 is told as well, and may be in a step that needs this one. So this one leaves when rank 0
    does, or once it has heard nothing of it for a second.
    """

    def handle() -> bool:
        while messages := control.receive_all():
            for message in messages:
                if message["type"] == "stop":
                    for reader in readers:
                        reader.leaving = True
        return True

    return handle


def _serve(arguments: ChildArguments, control: ControlClient) -> None:
    from trserve.workers.tp.joining import Place, create_rank
    from trserve.workers.tp.runner import follow

    plan = msgspec.convert(say_hello(control), ServerPlan)
    held = hold_device(plan.device, arguments.parent)
    place = Place(plan, arguments.index, arguments.rank, arguments.group_fds)
    readers: list[PlanReader] = []
    watched = {
        arguments.launcher_fd: lambda: False,
        control.fd: _control_handler(control, readers),
    }
    rank = create_rank(place, watched)
    readers.append(rank.reader)
    # Whatever is alive now stays: the collector need never walk the model again.
    gc.collect()
    gc.freeze()
    control.send({"type": "ready"})
    watched[control.fd]()  # what came while nobody polled has no edge left
    follow(rank.memory, rank.reader, rank.runner)
    if rank.reader.late_wakeups:
        log.error("%d doorbells were lost", rank.reader.late_wakeups)
    rank.close()
    if held is not None:
        held.finish()


def main() -> int:
    """Load, follow, leave; returns the exit code."""
    arguments = parse_child_arguments()
    begin_child(arguments, name=f"worker-{arguments.index} rank-{arguments.rank}")
    os.close(arguments.slab_fd)  # rank 0 alone is in the slab
    control = ControlClient(arguments.control, worker_identity(arguments.index, arguments.rank))
    try:
        _serve(arguments, control)
    except StartupError as error:
        return fail(control, str(error), error.exit_code)
    except Exception as error:
        from trserve.workers.tp.memory import GroupLostError

        if isinstance(error, GroupLostError):
            return fail(control, str(error), EXIT_WORKER_LOST)
        log.exception("this rank cannot go on")
        return fail(control, f"{type(error).__name__}: {error}", EXIT_UNAVAILABLE)
    control.close()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
