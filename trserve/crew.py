"""The processes that together are one worker, and what each of them runs. Knows no deaths.

Most are one process. Tensor parallel ones are as many as there are ranks, of which rank 0 alone is
in the slab; one process stands for all models of whoever dials our edge port; and a model at
another host has its link agent here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final, NamedTuple

from trserve.ipc.process import thread_environment
from trserve.plan import ServerPlan

WORKER: Final = "trserve.workers.main"
RANK: Final = "trserve.workers.tp.rank_main"
AGENT: Final = "trserve.edge.agent_main"
PORT: Final = "trserve.edge.port_main"


class Role(NamedTuple):
    """One process of a worker: its rank, the module it runs and what its environment gains."""

    rank: int
    module: str
    env: dict[str, str]


def workers_of(plan: ServerPlan) -> dict[int, tuple[int, ...]]:
    """The models that each worker process stands for, by the worker's index: mostly its own."""
    found: dict[int, tuple[int, ...]] = {}
    for index in range(len(plan.models)):
        process = plan.process_of(index)
        found[process] = (*found.get(process, ()), index)
    return found


def title_of(plan: ServerPlan, indices: tuple[int, ...]) -> str:
    """What to call a worker to a person."""
    models = [plan.models[index] for index in indices]
    names = ", ".join(model.name for model in models)
    if models[0].place.is_placeholder:
        return f"edge port ({names})"
    kind = "link agent" if models[0].remote else "worker"
    return f"{kind} {indices[0]} ({names})"


def roles(plan: ServerPlan, index: int) -> Iterator[Role]:
    """The processes of worker ``index``, rank 0 first."""
    model = plan.models[index]
    if model.remote:
        module = PORT if model.place.is_placeholder else AGENT
        yield Role(0, module, thread_environment(1))
        return
    threads = sum(each.threads * each.tp for each in plan.models if not each.remote)
    alone = threads <= len(os.sched_getaffinity(0))
    env = thread_environment(model.threads, cores_to_itself=alone)
    for rank in range(model.tp):
        yield Role(rank, RANK if rank else WORKER, env)
