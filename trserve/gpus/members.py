"""The models of a server that are here, put on its GPUs; those at other hosts need none.

From the configuration to ``planning`` and back to the order of ``--models``. Reads what the driver
says; starts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeVar

import msgspec

from trserve.config import QUANTIZATIONS, LaunchConfig
from trserve.errors import ConfigError
from trserve.gpus.plan import ON
from trserve.gpus.planning import GpuModel, Planned, Wishes, find_gpus, plan_gpus
from trserve.gpus.topology import Gpu
from trserve.kv_blocks import DTYPE_BYTES
from trserve.model_plans import (
    Member,
    choose_dtype,
    model_length,
    tensor_parallel,
    unique_names,
)

_NOT_QUANTIZED: Final = QUANTIZATIONS[0]
_Entry = TypeVar("_Entry")


def refuse_without_gpus(config: LaunchConfig) -> None:
    """Raise ConfigError for flags that mean nothing where models do not run on GPUs."""
    placement = config.placement
    if placement.gpus:
        shown = "/".join(",".join(map(str, group)) for group in placement.gpus)
        raise ConfigError(f"--gpus {shown}: is for --device cuda, not {placement.device}")
    if placement.mps == ON:
        raise ConfigError(f"--mps on: is for --device cuda, not {placement.device}")


def plan_members(
    config: LaunchConfig, members: Sequence[Member], gpus: Sequence[Gpu] | None = None
) -> Planned:
    """Groups, blocks and MPS clients of ``members``, in their order.

    Args:
        gpus: those to choose from; asked of the driver if not given.

    Raises:
        ConfigError: a flag is wrong.
        ModelUnavailableError: there is no GPU, or the models do not fit.
    """
    tensor_parallel(config, members)  # refuses what no placement could make right
    if config.model.quantization != _NOT_QUANTIZED:
        raise ConfigError(
            f"--quantization {config.model.quantization}: is for the CPU; a GPU runs bfloat16 or "
            "float32 (--dtype)"
        )
    here = [index for index, member in enumerate(members) if member.is_here]
    models = [_gpu_model(config, member, name) for member, name in _named(members)]
    wishes = _wishes(config, here, len(members))
    planned = plan_gpus(wishes, models, find_gpus() if gpus is None else gpus)
    gpu_plan = planned.gpu_plan
    count = len(members)
    return planned._replace(
        groups=_spread(planned.groups, here, count, ()),
        blocks=_spread(planned.blocks, here, count, 0),
        gpu_plan=msgspec.structs.replace(
            gpu_plan,
            uuids=_spread(gpu_plan.uuids, here, count, []),
            percentages=_spread(gpu_plan.percentages, here, count, 0),
            memory_limits=_spread(gpu_plan.memory_limits, here, count, 0),
            clients={gpu: [here[m] for m in each] for gpu, each in gpu_plan.clients.items()},
        ),
    )


def _named(members: Sequence[Member]) -> list[tuple[Member, str]]:
    pairs = zip(members, unique_names(members), strict=True)
    return [(member, name) for member, name in pairs if member.is_here]


def _gpu_model(config: LaunchConfig, member: Member, name: str) -> GpuModel:
    model = member.model
    assert model is not None, name
    return GpuModel(
        name=name,
        spec=model.spec,
        width=DTYPE_BYTES[choose_dtype(model, config.model.dtype)],
        row_tokens=model_length(model, config.model.max_model_len),
    )


def _wishes(config: LaunchConfig, here: Sequence[int], count: int) -> Wishes:
    placement, engine = config.placement, config.engine
    wishes = Wishes(
        gpus=placement.gpus,
        tp=placement.tp,
        mps=placement.mps,
        memory=engine.memory,
        of_total=engine.gpu_memory_utilization,
        of_free=engine.mem_fraction_static,
        kv_tokens=engine.kv_tokens,
        block_size=engine.block_size,
        max_rows=engine.max_num_seqs,
        max_tokens=engine.max_num_batched_tokens,
        max_requests=engine.max_requests,
    )

    def own(given: Sequence[_Entry]) -> Sequence[_Entry]:
        """Of one entry for each of ``--models``, those of the models that are here."""
        return [given[index] for index in here] if len(given) == count else given

    gpus, tp, kv_tokens = own(wishes.gpus), own(wishes.tp), own(wishes.kv_tokens)
    return replace(wishes, gpus=gpus, tp=tp, kv_tokens=kv_tokens)


def _spread(
    values: Sequence[_Entry], here: Sequence[int], count: int, absent: _Entry
) -> list[_Entry]:
    found = [absent] * count
    for index, value in zip(here, values, strict=True):
        found[index] = value
    return found
