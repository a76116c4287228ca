"""A rank from its plan to its place in the group: its share of the model, the memory, the sums.

Knows plans and descriptors, and puts the parts together; nothing of requests or of a step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from trserve.errors import ConfigError
from trserve.ipc.slab import available_memory
from trserve.models.assembly import Progress, assemble
from trserve.models.decoder import Decoder
from trserve.models.fit import check_weights_fit
from trserve.models.loading import tensors_of
from trserve.models.sharding import Collective, Shard, connect
from trserve.models.spec import read_spec
from trserve.plan import ModelPlan, ServerPlan
from trserve.workers.kv_cache import KVCache
from trserve.workers.tp.distributed import GlooGroup, NcclGroup
from trserve.workers.tp.group_files import group_layout
from trserve.workers.tp.memory import GroupMemory, Trouble
from trserve.workers.tp.plan_ring import PlanReader, PlanWriter
from trserve.workers.tp.runner import Follower, RankRunner, TensorParallelRunner
from trserve.workers.tp.shared_sum import SharedMemoryGroup
from trserve.workers.tp.waiting import LONG_SPIN, SHORT_SPIN, Waiter

if TYPE_CHECKING:
    from trserve.workers.cuda.runner import CudaRunner
    from trserve.workers.tp.gpu import FirstCudaRank

CHOICE: Final = "TRSERVE_TP_SUMS"
"""Environment variable that says how ranks on CPUs add up: ``shared``, by default, or ``gloo``."""
JOIN_S: Final = 600.0
"""How long the ranks wait for each other while they load: disks differ more than steps do."""


@dataclass(frozen=True)
class Place:
    """A rank's place: what the launcher gave it.

    ``group_fds`` are the group's memory, the file by which libraries find each other, and the
    doorbells of ranks 1 and up.
    """

    plan: ServerPlan
    index: int
    rank: int
    group_fds: Sequence[int]

    @property
    def model(self) -> ModelPlan:
        """The model that the group runs."""
        return self.plan.models[self.index]

    @property
    def bells(self) -> Sequence[int]:
        """The doorbells of ranks 1 and up."""
        return self.group_fds[2:]

    @property
    def with_graphs(self) -> bool:
        """Whether the ranks are those of GPUs, or run as such on the CPU."""
        emulated = os.environ.get("TRSERVE_RUNNER") == "graphs-on-cpu"
        return self.plan.device == "cuda" or emulated

    def memory(self) -> GroupMemory:
        """The group's memory."""
        return GroupMemory(self.group_fds[0], group_layout(self.plan, self.index), self.rank)

    @property
    def spin(self) -> int:
        """Rounds to stay awake for another rank: many where every process has a core of its own."""
        local = (model for model in self.plan.models if not model.remote)
        threads = sum(model.threads * model.tp for model in local)
        return LONG_SPIN if threads <= len(os.sched_getaffinity(0)) else SHORT_SPIN


def load_share(
    model: ModelPlan, rank: int, progress: Progress | None = None
) -> tuple[Decoder, torch.dtype]:
    """The share of ``rank`` of ``model``, and its dtype.

    Raises:
        ModelUnavailableError: it cannot be divided so, does not fit or is damaged.
    """
    path = Path(model.path)
    whole, dtype = read_spec(path), getattr(torch, model.dtype)
    shard = Shard(rank, model.tp, int8=model.int8)
    spec = shard.spec(whole)
    title = f"{model.name}, rank {rank}"
    check_weights_fit([(title, spec, dtype.itemsize, model.int8)], available_memory())
    form = model.load_format
    with tensors_of(path, whole, dtype=dtype, load_format=form, part=shard.part) as read:
        decoder = assemble(
            spec,
            read,
            progress,
            int8=model.int8,
            token_map=model.token_map,
            shard=shard,
        )
    return decoder, dtype


def create_group(
    place: Place, memory: GroupMemory, device: torch.device | None = None
) -> Collective:
    """How the ranks at ``place`` add up. ConfigError for an unknown choice.

    A library gives the others a step's time to come, not a load's: they are waited for before.
    """
    if device is not None and device.type == "cuda":
        join(memory)
        return NcclGroup(place.group_fds[1], place.rank, place.model.tp, device)
    choice = os.environ.get(CHOICE) or "shared"
    if choice == "shared":
        return SharedMemoryGroup(memory, spin=place.spin)
    if choice == "gloo":
        join(memory)
        return GlooGroup(place.group_fds[1], place.rank, place.model.tp)
    raise ConfigError(f"{CHOICE}={choice}: ranks on CPUs add up by 'shared' or 'gloo'")


def join(memory: GroupMemory, timeout_s: float = JOIN_S) -> None:
    """Say that this rank is here, and wait for all others. GroupLostError if one does not come."""
    memory.words[memory.joined_at(memory.rank)] = 1
    for rank in range(memory.layout.ranks):
        if rank != memory.rank:
            word = memory.joined_at(rank)
            waiter = Waiter(memory, word, spin=0, trouble=Trouble.LATE_TO_JOIN, timeout_s=timeout_s)
            waiter.reach(1)


def create_runner(
    place: Place, progress: Progress | None = None
) -> TensorParallelRunner | FirstCudaRank:
    """Rank 0's runner, once all ranks are there.

    Raises:
        ModelUnavailableError: the model cannot be divided so, does not fit or is damaged.
        GroupLostError: a rank does not come.
    """
    memory = place.memory()
    writer = PlanWriter(memory, place.bells, spin=place.spin)
    if place.with_graphs:
        from trserve.workers.tp import gpu

        inner, group = _take_cuda_share(place, memory, progress)
        join(memory)
        return gpu.FirstCudaRank(inner, group, writer)
    decoder, kv, group = _take_share(place, memory, progress)
    join(memory)
    size = place.plan.tokenizer_size
    return TensorParallelRunner(decoder, kv, tokenizer_size=size, group=group, writer=writer)


class Rank(NamedTuple):
    """All that a rank other than 0 has."""

    memory: GroupMemory
    runner: Follower
    reader: PlanReader
    group: Collective

    def close(self) -> None:
        """Leave the group."""
        self.runner.close()
        self.group.close()


def create_rank(place: Place, watched: Mapping[int, Callable[[], bool]]) -> Rank:
    """Another rank, once all of them are there; raises as :func:`create_runner`.

    Args:
        watched: see :class:`PlanReader`.
    """
    memory, plan = place.memory(), place.plan
    bell = place.bells[place.rank - 1]
    reader = PlanReader(memory, bell, plan.block_size, watched, spin=place.spin)
    if place.with_graphs:
        from trserve.workers.tp import gpu

        inner, group = _take_cuda_share(place, memory, None)
        join(memory)
        return Rank(memory, gpu.CudaRank(inner, plan.tokenizer_size), reader, group)
    decoder, kv, group = _take_share(place, memory, None)
    join(memory)
    return Rank(memory, RankRunner(decoder, kv), reader, group)


def _take_share(
    place: Place, memory: GroupMemory, progress: Progress | None
) -> tuple[Decoder, KVCache, Collective]:
    model = place.model
    torch.set_num_threads(model.threads)
    decoder, dtype = load_share(model, place.rank, progress)
    size = place.plan.block_size
    kv = KVCache(decoder.spec, num_blocks=model.num_blocks, block_size=size, dtype=dtype)
    group = create_group(place, memory)
    connect(decoder, group)
    return decoder, kv, group


def _take_cuda_share(
    place: Place, memory: GroupMemory, progress: Progress | None
) -> tuple[CudaRunner, Collective]:
    from trserve.workers.tp import gpu

    torch.set_num_threads(place.model.threads)

    def connect_to(device: torch.device) -> Collective:
        return create_group(place, memory, device)

    return gpu.create_cuda_runner(place.plan, place.index, place.rank, connect_to, progress)
