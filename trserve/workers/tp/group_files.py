"""What the launcher makes for the ranks of one model: their memory, a meeting place, doorbells.

Everything is a descriptor without a name, made anew for each life of a group and inherited by its
ranks alone; once they have ended nothing of it is left. Imports no torch.
"""

from __future__ import annotations

import os

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


def create_group_fds(plan: ServerPlan, index: int) -> tuple[int, ...]:
    """The descriptors of one life of a group, none of which is inherited by itself.

    The group's memory; a file by which libraries of collectives find each other; the doorbells of
    ranks 1 and up. Nothing for a model that is one process.
    """
    layout = group_layout(plan, index)
    if layout.ranks == 1:
        return ()
    meeting = os.memfd_create("trserve-meeting", os.MFD_CLOEXEC)
    bells = (create_doorbell() for _ in range(1, layout.ranks))
    return (create_group_file(layout), meeting, *bells)
