"""What a server takes of the GPUs: the part of the plan that only the launcher and doctor read.

Plain data. Models are named by their index in the server's plan, GPUs by UUID.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

GPU_DEVICE: Final = "cuda"
"""What ``--device`` calls GPUs."""

OWN_GPU: Final = 0
"""The number of a process's GPU in its own eyes: the launcher lets it see no other."""

AUTO: Final = "auto"
ON: Final = "on"
OFF: Final = "off"


class MpsState(StrEnum):
    """How it is with MPS on a GPU."""

    OFF = "off"  # not wanted, or nobody to share with
    ON = "on"  # its daemon answered
    UNAVAILABLE = "unavailable"  # wanted, and not to be had; models on the GPU take turns


class GpuPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of a server; all fields are empty where it uses none.

    ``uuids[i]`` are those of model ``i``, one a process. ``clients`` names, by GPU, the models
    that share it through MPS: two or more, each with one process. ``percentages`` and
    ``memory_limits`` (bytes) bound a process of each model under MPS; 0 for no bound. ``mps`` is
    what ``--mps`` asks for.
    """

    uuids: list[list[str]] = []
    clients: dict[str, list[int]] = {}
    percentages: list[int] = []
    memory_limits: list[int] = []
    mps: str = AUTO

    def gpu_under_mps(self, model: int) -> str | None:
        """The GPU whose daemon the worker of ``model`` is a client of; None if it is of none."""
        return next((gpu for gpu, models in self.clients.items() if model in models), None)


def restart_unit(plan: GpuPlan, model: int) -> frozenset[int]:
    """The models whose workers are replaced together with that of ``model``: it, and its sharers.

    A fault in one client of an MPS server is everybody's who is on the GPU, and a server that had
    one takes no client until all of them have gone.
    """
    gpu = plan.gpu_under_mps(model)
    return frozenset(plan.clients[gpu]) if gpu is not None else frozenset((model,))
