"""From flags and what the driver says to the GPUs, KV tokens and MPS clients of a server.

Puts ``placement`` and ``memory`` together; whoever plans a server calls :func:`plan_gpus`. Starts
nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from trserve.errors import ConfigError, ModelUnavailableError
from trserve.gpus import memory, placement
from trserve.gpus.memory import Need
from trserve.gpus.placement import Group, Shape
from trserve.gpus.plan import OFF, ON, GpuPlan
from trserve.gpus.programs import MPS_CONTROL, DriverError, find_program
from trserve.gpus.topology import EXCLUSIVE, Gpu, read_gpus, visible_gpus
from trserve.models.spec import ModelSpec

_TWICE_A_SHARE: Final = 200


@dataclass(frozen=True)
class GpuModel:
    """A model that is to run on GPUs.

    Attributes:
        width: bytes of a weight and of a KV element.
        row_tokens: its longest row.
    """

    name: str
    spec: ModelSpec
    width: int
    row_tokens: int


@dataclass(frozen=True)
class Wishes:
    """The flags that decide about GPUs, as given; empty where one says nothing.

    Attributes:
        gpus, tp: one entry a model.
        memory: bytes of all KV caches together, 0 for what fits.
        of_total, of_free: the shares of each GPU's memory, and of what is free of it, that may be
            taken; 0 for no limit.
        kv_tokens: one number a model.
    """

    gpus: Sequence[Group]
    tp: Sequence[int]
    mps: str
    memory: int
    kv_tokens: Sequence[int]
    block_size: int
    max_rows: int
    max_tokens: int
    max_requests: int
    of_total: float = 0.0
    of_free: float = 0.0


class Planned(NamedTuple):
    """What came of it.

    Attributes:
        groups: the GPUs of each model, as ``--gpus`` counts them.
        blocks: of KV, of each model.
        needs: what each takes.
        gpus: those that there are to choose from.
        gpu_plan: what the launcher has to know.
    """

    groups: list[Group]
    blocks: list[int]
    needs: list[Need]
    gpus: list[Gpu]
    gpu_plan: GpuPlan


def find_gpus(environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """The GPUs that this process may use. ModelUnavailableError where there are none."""
    try:
        gpus = read_gpus()
    except DriverError as error:
        raise ModelUnavailableError(
            f"--device cuda: {error}\ninstall the NVIDIA driver, or use --device cpu"
        ) from None
    visible = visible_gpus(gpus, environ)
    if not visible:
        hidden = ": CUDA_VISIBLE_DEVICES hides all of them" if gpus else ""
        raise ModelUnavailableError(
            f"--device cuda: there is no GPU{hidden}\n"
            "give this machine one (containers: --gpus all), or use --device cpu"
        )
    return visible


def plan_gpus(wishes: Wishes, models: Sequence[GpuModel], gpus: Sequence[Gpu]) -> Planned:
    """Place ``models`` on ``gpus``.

    Raises:
        ConfigError: a flag is wrong.
        ModelUnavailableError: the models do not fit, or a GPU takes no programs.
    """
    gpus = [_limited(wishes, gpu) for gpu in gpus]
    groups = _groups(wishes, models, gpus)
    placement.check_gpus(gpus, {number for group in groups for number in group})
    needs = [_need(wishes, model, group) for model, group in zip(models, groups, strict=True)]
    tokens = _tokens(wishes, needs, gpus)
    clients = _clients(wishes.mps, groups, gpus)
    room = {number: memory.limits_of(gpu.free) for number, gpu in enumerate(gpus)}
    limited = {model for each in clients.values() for model in each}
    gpu_plan = GpuPlan(
        uuids=[[gpus[number].uuid for number in group] for group in groups],
        clients={gpus[number].uuid: each for number, each in clients.items()},
        percentages=_percentages(clients, len(models)),
        memory_limits=memory.process_limits(needs, tokens, room, limited),
        mps=wishes.mps,
    )
    blocks = [count // wishes.block_size for count in tokens]
    return Planned(groups, blocks, needs, list(gpus), gpu_plan)


def _limited(wishes: Wishes, gpu: Gpu) -> Gpu:
    """``gpu``, of which no more is free than may be taken."""
    free = gpu.free
    if wishes.of_total and gpu.memory:
        free = min(free, int(wishes.of_total * gpu.memory))
    if wishes.of_free:
        free = min(free, int(wishes.of_free * gpu.free))
    return gpu._replace(free=free)


def _groups(wishes: Wishes, models: Sequence[GpuModel], gpus: Sequence[Gpu]) -> list[Group]:
    names = [model.name for model in models]
    if wishes.gpus:
        groups = placement.given_groups(wishes.gpus, wishes.tp, names, len(gpus))
    else:
        sizes = wishes.tp or (1,) * len(models)
        shapes = [Shape(model.name, model.spec, model.row_tokens) for model in models]
        groups = placement.choose_groups(
            shapes,
            sizes,
            gpus,
            wishes.block_size,
            lambda index, group: _need(wishes, models[index], group),
        )
    for model, group in zip(models, groups, strict=True):
        placement.check_tensor_parallel(model.name, model.spec, len(group))
    return groups


def _need(wishes: Wishes, model: GpuModel, group: Group) -> Need:
    spec, tp, block = model.spec, len(group), wishes.block_size
    per_token = -(-spec.kv_bytes_per_token(model.width) // tp)
    most = {"tokens": wishes.max_tokens, "rows": wishes.max_rows}
    step = memory.activation_bytes(spec, model.width, tp, **most)
    fixed = memory.CONTEXT + memory.GRAPHS + memory.attention_bytes(spec, tp, **most) + step
    return Need(
        name=model.name,
        gpus=group,
        weights=memory.rank_weight_bytes(spec, model.width, tp),
        fixed=fixed + block * per_token,  # the block that padding rows write to
        per_token=per_token,
        most_tokens=-(-model.row_tokens // block) * block * wishes.max_requests,
    )


def _tokens(wishes: Wishes, needs: Sequence[Need], gpus: Sequence[Gpu]) -> list[int]:
    block, room = wishes.block_size, {n: memory.room_of(gpu.free) for n, gpu in enumerate(gpus)}
    if wishes.kv_tokens:
        return _given_tokens(wishes, needs, room)
    tokens = memory.common_tokens(needs, room, block, wishes.memory)
    placement.check_room(needs, gpus, tokens, block)
    return [min(tokens or 0, need.most_tokens) for need in needs]


def _given_tokens(wishes: Wishes, needs: Sequence[Need], room: Mapping[int, int]) -> list[int]:
    shown, block = ",".join(map(str, wishes.kv_tokens)), wishes.block_size
    if len(wishes.kv_tokens) != len(needs):
        raise ConfigError(f"--kv-tokens {shown}: {len(needs)} models need a number each")
    if min(wishes.kv_tokens) < block:
        raise ConfigError(f"--kv-tokens {shown}: a block has {block} tokens, and each needs one")
    tokens = [count // block * block for count in wishes.kv_tokens]
    exact = [need._replace(most_tokens=count) for need, count in zip(needs, tokens, strict=True)]
    for gpu, most in room.items():
        wanted = memory.used(exact, max(tokens), gpu)
        if wanted > most:
            raise ConfigError(
                f"--kv-tokens {shown}: GPU {gpu} would hold {wanted / 2**30:.1f} GiB, and "
                f"{most / 2**30:.1f} may be planned with"
            )
    return tokens


def _clients(mps: str, groups: Sequence[Group], gpus: Sequence[Gpu]) -> dict[int, list[int]]:
    """Who is to share which GPU through MPS; nobody where it is off or cannot be had.

    Raises ConfigError where it is asked for and cannot be had, or where sharing needs it.
    """
    shared = placement.sharers(groups) if mps != OFF else {}
    reason = ""
    if shared:
        try:
            find_program(MPS_CONTROL)
        except DriverError as error:
            reason = str(error)
    if mps == ON and (reason or not shared):
        raise ConfigError(f"--mps on: {reason or _nobody_shares(groups)}; use --mps auto")
    clients = {} if reason else shared
    for number in {number for group in groups for number in group}:
        users = [model for model, group in enumerate(groups) if number in group]
        through = clients.get(number, [])
        if gpus[number].compute_mode == EXCLUSIVE and len(users) > 1 and users != through:
            raise ConfigError(
                f"--gpus: GPU {number} is in the mode {EXCLUSIVE} and takes one process, but "
                f"{len(users)} models share it without MPS{f' ({reason})' * bool(reason)}; "
                f"lift it: nvidia-smi -i {gpus[number].number} -c DEFAULT"
            )
    return shared


def _nobody_shares(groups: Sequence[Group]) -> str:
    text = "no two models of one GPU each share a GPU"
    if any(len(group) > 1 for group in groups):
        text += " (one that spans GPUs takes no part in MPS)"
    return text


def _percentages(clients: Mapping[int, Sequence[int]], models: int) -> list[int]:
    """Of a GPU's multiprocessors, as MPS limits its clients: twice an equal share, at most all.

    A limit reserves nothing; with twice its share a client can use what others leave idle, and
    takes less memory for its context than with all of them (NVIDIA's advice in "Volta MPS execution
    resource provisioning").
    """
    found = [0] * models
    for sharing in clients.values():
        for model in sharing:
            found[model] = min(100, -(-_TWICE_A_SHARE // len(sharing)))
    return found
