"""``trserve`` on the CPU, whose workers are EMULATED to share one GPU through MPS.

The plan says so; no worker touches a GPU. The daemon is whatever nvidia-cuda-mps-control is on
PATH.
"""

from __future__ import annotations

import msgspec

from tests.gpus.programs import uuid
from trserve import cli, launch
from trserve.config import LaunchConfig
from trserve.gpus.plan import GpuPlan
from trserve.plan import ServerPlan, make_plan


def shared_plan(config: LaunchConfig) -> ServerPlan:
    """The plan of ``config``, with everybody on one GPU."""
    plan = make_plan(config)
    models = list(range(len(plan.models)))
    gpu = GpuPlan(
        uuids=[[uuid(0)] for _ in models],
        clients={uuid(0): models},
        percentages=[100 for _ in models],
        memory_limits=[0 for _ in models],
    )
    return msgspec.structs.replace(plan, gpu=gpu)


if __name__ == "__main__":
    launch.make_plan = shared_plan
    cli.main(prog_name="trserve")
