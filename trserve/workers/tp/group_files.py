"""What the launcher makes for the ranks of one model: their memory, a meeting place, doorbells.

Everything is a descriptor without a name, made anew for each life of a group and inherited by its
ranks alone; once they have ended nothing of it is left. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from trserve.errors import StartFailedError
from trserve.ipc.doorbell import create_doorbell
from trserve.plan import ServerPlan
from trserve.workers.tp.memory import GroupLayout, create_group_file


def group_layout(plan: ServerPlan, index: int) -> GroupLayout:
    """The memory of the ranks of model ``index``: for steps as large as its worker's."""
    return GroupLayout(
        ranks=plan.models[index].tp,
        max_tokens=plan.max_tokens,
        max_rows=plan.max_rows,
        table_width=-(-plan.row_tokens // plan.block_size),
    )


@contextmanager
def group_fds(plan: ServerPlan, index: int) -> Iterator[tuple[int, ...]]:
    """The descriptors of one life of a group, for as long as its ranks are being started.

    The group's memory; a file by which libraries of collectives find each other; the doorbells of
    ranks 1 and up. Nothing for a model that is one process.

    Raises:
        StartFailedError: the system has no room.
    """
    layout, fds = group_layout(plan, index), list[int]()
    try:
        if layout.ranks > 1:
            fds.append(create_group_file(layout))
            fds.append(os.memfd_create("trserve-meeting", os.MFD_CLOEXEC))
            fds.extend(create_doorbell() for _ in range(1, layout.ranks))
        yield tuple(fds)
    except OSError as error:
        raise StartFailedError(
            f"the ranks of {plan.models[index].name} cannot be given what they share: "
            f"{error.strerror} (look at the limits of open files and memory)"
        ) from error
    finally:
        for fd in fds:
            os.close(fd)
