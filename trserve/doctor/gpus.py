"""GPUs, their driver, and what a server's models would take of them: places, memory, MPS.

As the driver's own programs tell it; starts no daemon. What ``python -m bench.gpu_check`` has not
shown on a device says that it is unproven. Every judgement about a placement is the launch's own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Final

from trserve.config import LaunchConfig
from trserve.doctor.findings import Finding, Level
from trserve.doctor.links import check_links
from trserve.errors import StartupError
from trserve.gpus import memory, proven
from trserve.gpus.members import plan_members
from trserve.gpus.placement import describe
from trserve.gpus.plan import OFF
from trserve.gpus.planning import Planned
from trserve.gpus.programs import MPS_CONTROL, QUERY, DriverError, find_program
from trserve.gpus.topology import VISIBLE, Gpu, read_gpus, visible_gpus
from trserve.model_plans import Member, unique_names

OLDEST_DRIVER: Final = {11: 450, 12: 525, 13: 580}
"""The first branch of the Linux driver that runs programs of a CUDA major version."""

_FLAG: Final = "--device cuda"
_NAMED: Final = re.compile(r"--[a-z][a-z-]*")
_GIB: Final = 2**30


def check_gpus(
    cuda: str | None, config: LaunchConfig, members: Sequence[Member] | None
) -> tuple[list[Finding], int]:
    """Findings where GPUs are asked for, and how many there are.

    Args:
        cuda: the CUDA version that torch was built with, None for none.
        members: the models; None unless all of them are there.
    """
    try:
        there = read_gpus()
    except DriverError as error:
        return [_fault("driver", str(error), "install the NVIDIA driver, or use --device cpu")], 0
    if not there:
        fix = "give this machine one (containers: --gpus all), or use --device cpu"
        return [_fault("driver", f"{QUERY} lists no GPU", fix)], 0
    found = [_driver(there, cuda)]
    gpus = visible_gpus(there, os.environ)
    if not gpus:
        shown = f"{VISIBLE}={os.environ.get(VISIBLE, '')} hides all GPUs"
        found.append(Finding("GPUs", Level.FAULT, shown, VISIBLE, "unset it, or name a GPU"))
    elif members is not None:
        found.extend(_placement(config, members, gpus))
    return found, len(gpus)


def _driver(gpus: Sequence[Gpu], cuda: str | None) -> Finding:
    first = gpus[0]
    shown = f"{first.driver}, {len(gpus)} x {first.name}"
    oldest = OLDEST_DRIVER.get(int(cuda.partition(".")[0]), 0) if cuda else 0
    branch = first.driver.partition(".")[0]
    if branch.isdigit() and int(branch) < oldest:
        return _fault(
            "driver",
            f"{shown}: too old for CUDA {cuda} of torch, which needs {oldest} or later",
            f"install driver {oldest} or later, or a build of torch for an older CUDA",
        )
    return Finding("driver", Level.OK, shown, unproven=proven.unproven(proven.DRIVER))


def _placement(
    config: LaunchConfig, members: Sequence[Member], gpus: Sequence[Gpu]
) -> list[Finding]:
    try:
        planned = plan_members(config, members, gpus)
    except StartupError as error:
        named = _NAMED.search(str(error))
        fix = "see `trserve launch --help` and docs/gpus.md"
        return [Finding.of_error("GPU placement", error, named[0] if named else _FLAG, fix)]
    names = unique_names(members)
    here = [(name, group) for name, group in zip(names, planned.groups, strict=True) if group]
    shown = describe([name for name, _ in here], [group for _, group in here])
    place = Finding("GPU placement", Level.OK, shown, unproven=proven.unproven(proven.MEMORY))
    found = [place, *_memory(config, planned)]
    if len(here) > 1:
        found.append(_mps(config, planned, [group for _, group in here]))
        found.extend(check_links(config, names, planned))
    return found


def _memory(config: LaunchConfig, planned: Planned) -> list[Finding]:
    tokens = [count * config.engine.block_size for count in planned.blocks if count]
    found = []
    for number, gpu in enumerate(planned.gpus):
        here = [
            (need, need.size(count))
            for need, count in zip(planned.needs, tokens, strict=True)
            if number in need.gpus
        ]
        if not here:
            continue
        taken = sum(size for _, size in here)
        parts = ", ".join(f"{need.name} {size / _GIB:.1f}" for need, size in here)
        shown = (
            f"GPU {number}: {taken / _GIB:.1f} GiB ({parts}) of {gpu.free / _GIB:.1f} free, of "
            f"which {memory.room_of(gpu.free) / _GIB:.1f} may be planned with; KV for "
            f"{max(tokens)} tokens"
        )
        unproven = proven.unproven(proven.MEMORY)
        found.append(Finding("GPU memory", Level.OK, shown, unproven=unproven))
    return found


def _mps(config: LaunchConfig, planned: Planned, groups: Sequence[Sequence[int]]) -> Finding:
    """Models on one GPU run at the same time through MPS only."""
    clients = planned.gpu_plan.clients
    numbers = {gpu.uuid: number for number, gpu in enumerate(planned.gpus)}
    everywhere = [number for group in groups for number in group]
    unproven = proven.unproven(proven.MPS)
    if not clients:
        return Finding("MPS", Level.OK, _why_no_mps(config, everywhere), unproven=unproven)
    shared = ",".join(str(numbers[uuid]) for uuid in clients)
    try:
        program = find_program(MPS_CONTROL)
    except DriverError as error:
        what = (
            f"unavailable ({error}): models on GPU {shared} take turns instead of running at once"
        )
        fix = "install it, it comes with the driver; or --mps off, or a GPU for each model (--gpus)"
        return Finding("MPS", Level.WARNING, what, "--mps", fix, unproven=unproven)
    shares = _shares(clients, planned.gpu_plan.percentages)
    what = f"{program}: a daemon of the server's own on GPU {shared}, {shares}"
    return Finding("MPS", Level.OK, what, unproven=unproven)


def _why_no_mps(config: LaunchConfig, everywhere: Sequence[int]) -> str:
    if len(set(everywhere)) == len(everywhere):
        return "not needed: no GPU is shared"
    if config.placement.mps == OFF:
        return "off (--mps): models on one GPU take turns"
    return "off: a model that spans GPUs shares one, and takes no part in MPS; they take turns"


def _shares(clients: Mapping[str, Sequence[int]], percentages: Sequence[int]) -> str:
    most = max(percentages)
    count = max(map(len, clients.values()))
    return f"{count} models with at most {most} % of the multiprocessors each"


def _fault(check: str, what: str, fix: str) -> Finding:
    unproven = proven.unproven(proven.DRIVER)
    return Finding(check, Level.FAULT, what, _FLAG, fix, unproven=unproven)
