"""What a placement means for the links between its models: who shares a GPU, who reaches whom.

Asks the driver where several GPUs are used, and hands the facts to ``ipc.device.choice``, which
judges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from trserve.errors import ConfigError
from trserve.gpus.planning import Planned
from trserve.gpus.programs import MPS_CONTROL, DriverError, find_program
from trserve.gpus.topology import PeerAccess, read_peer_access
from trserve.ipc.device.choice import (
    CUDA_IPC,
    HOST_MAPPED,
    NCCL,
    SHM,
    LinkTopology,
    choose_link,
)
from trserve.ipc.slab import available_memory

THROUGH_DEVICES: Final = (CUDA_IPC, HOST_MAPPED, NCCL)


def chosen_links(
    wanted: str, names: Sequence[str], here: Sequence[bool], planned: Planned | None, row_bytes: int
) -> list[list[str]]:
    """The link from each model (outer) to each (inner), by index; "" to itself.

    Args:
        wanted: what ``--link`` says.
        here: whether each is on this host; the others' tokens cross to their own link in the slab.
        planned: where they are, None if on no GPU.
        row_bytes: of all rows of the slab.

    Raises:
        ConfigError: it cannot be had between two that are here, or goes through GPUs without any.
    """
    found = [["" if a == b else SHM for b in range(len(names))] for a in range(len(names))]
    local = [index for index, is_here in enumerate(here) if is_here]
    if len(local) < 2 and planned is None and wanted in THROUGH_DEVICES:
        raise ConfigError(
            f"--link {wanted} joins models on GPUs, and here is none\nleave --link out; models at "
            "other hosts have a link of their own"
        )
    topology = link_topology([names[index] for index in local], local, planned, row_bytes)
    chosen = choose_link(topology, wanted).names
    for row, a in enumerate(local):
        for column, b in enumerate(local):
            found[a][b] = chosen[row][column]
    return found


def link_topology(
    names: Sequence[str], indices: Sequence[int], planned: Planned | None, row_bytes: int
) -> LinkTopology:
    """Of the models called ``names``, which are planned at ``indices``; on no GPU without a plan.

    A driver that does not say who reaches whom says no: links then go through the host.
    """
    if planned is None:
        return LinkTopology(models=tuple(names), gpus=("",) * len(names))
    uuid = {number: gpu.uuid for number, gpu in enumerate(planned.gpus)}
    own = tuple(uuid[planned.groups[index][0]] for index in indices)
    return LinkTopology(
        models=tuple(names),
        gpus=own,
        mps=frozenset(planned.gpu_plan.clients) if _has_mps() else frozenset(),
        peers=_peers(planned, set(own)),
        row_bytes=row_bytes,
        free_bytes=available_memory(),
    )


def _has_mps() -> bool:
    try:
        return bool(find_program(MPS_CONTROL))
    except DriverError:
        return False


def _peers(planned: Planned, used: set[str]) -> frozenset[tuple[str, str]]:
    if len(used) < 2:
        return frozenset()
    try:
        access = read_peer_access()
    except DriverError:
        return frozenset()
    return frozenset(
        (first.uuid, second.uuid)
        for first in planned.gpus
        for second in planned.gpus
        if first.uuid != second.uuid and access.reaches(first.number, second.number)
    )


def unreached(planned: Planned, access: PeerAccess) -> dict[tuple[int, int], str]:
    """Pairs of GPUs in use of which one does not reach the other's memory, and why.

    Numbers are those of ``--gpus``.
    """
    used = sorted({number for group in planned.groups for number in group})
    found = {}
    for first in used:
        for second in used:
            a, b = planned.gpus[first].number, planned.gpus[second].number
            if first < second and not (access.reaches(a, b) and access.reaches(b, a)):
                pair = (b, a) if access.reaches(a, b) else (a, b)
                found[first, second] = access.why_not(*pair)
    return found
