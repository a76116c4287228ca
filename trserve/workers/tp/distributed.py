"""Sums over the ranks by ``torch.distributed``: NCCL between GPUs, gloo on any CPU.

The ranks find each other by a memory file that they inherit, which the library takes for a file
store: it has no name, so nothing is left of it and nobody else can join. Gloo costs hundreds of
microseconds a sum on one host, where :mod:`trserve.workers.tp.shared_sum` takes a few; it is there
for comparison and as a check. NCCL's sums can be captured in a CUDA graph; they have not run on a
device yet.

Knows tensors and descriptors; nothing of decoders or plans.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from trserve.errors import ConfigError
from trserve.workers.tp.waiting import WAIT_S

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _ProcessGroup:
    """One process group of ``size`` ranks; this process can be in one only."""

    def __init__(
        self, backend: str, rendezvous_fd: int, rank: int, size: int, device: torch.device | None
    ) -> None:
        from torch import distributed

        if not distributed.is_available():
            raise ConfigError("--tp needs a torch that has torch.distributed; this one has not")
        self.rank, self.size = rank, size
        store = torch._C._distributed_c10d.FileStore(f"/proc/self/fd/{rendezvous_fd}", size)
        distributed.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=WAIT_S),
            device_id=device,
        )
        self._distributed = distributed
        self._group: ProcessGroup | None = None

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace contiguous ``x`` by the sum over all ranks."""
        self._distributed.all_reduce(x)

    def close(self) -> None:
        """Leave the group."""
        self._distributed.destroy_process_group()


class GlooGroup(_ProcessGroup):
    """Ranks on this host, over its loopback interface.

    Every element is summed at one rank and passed on, so that all ranks have the same bits; with
    more than two of them the order of an element's terms depends on where it lies.
    """

    def __init__(self, rendezvous_fd: int, rank: int, size: int) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        super().__init__("gloo", rendezvous_fd, rank, size, None)


class NcclGroup(_ProcessGroup):
    """Ranks on GPUs, one each: unproven on a device.

    A captured sum belongs to the stream that captures, and every rank must capture the same sums in
    the same order.

    Args:
        device: this rank's GPU.
    """

    def __init__(self, rendezvous_fd: int, rank: int, size: int, device: torch.device) -> None:
        super().__init__("nccl", rendezvous_fd, rank, size, device)
