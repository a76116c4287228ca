"""Which model runs on which GPUs: ``--gpus`` and ``--tp`` checked, or chosen if they say nothing.

``0/0,1`` puts the second model over two GPUs, of which it shares one with the first; ``0/1,2`` is
the form without overlap. Knows shapes and sizes of models and what the driver says of GPUs; starts
nothing and sets no environment.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

from trserve.errors import ConfigError, ModelUnavailableError
from trserve.gpus.memory import Need, common_tokens, room_of
from trserve.gpus.topology import PROHIBITED, Gpu
from trserve.models.spec import ModelSpec

OLDEST_CAPABILITY: Final = (8, 0)
"""Ampere: the first with bfloat16, and what the kernels are compiled for."""

_GIB: Final = 2**30

Group = tuple[int, ...]
"""The numbers of the GPUs of one model."""

NeedOf = Callable[[int, Group], Need]
"""What the model of an index takes on such a group."""


class Shape(NamedTuple):
    """A model as far as its placement depends on it."""

    name: str
    spec: ModelSpec
    row_tokens: int


def check_tensor_parallel(name: str, spec: ModelSpec, size: int) -> None:
    """Raise ConfigError unless ``spec`` can be divided among ``size`` processes."""
    for what, count in (
        ("attention heads", spec.num_heads),
        ("KV heads", spec.num_kv_heads),
        ("inner features", _inner_features(spec)),
    ):
        if count % size:
            raise ConfigError(
                f"--tp {size}: the {count} {what} of {name} cannot be divided by {size}; give a "
                "number of processes that divides them"
            )


def _inner_features(spec: ModelSpec) -> int:
    return spec.intermediate_size if spec.experts is None else spec.experts.intermediate_size


def check_gpus(gpus: Sequence[Gpu], used: Collection[int]) -> None:
    """Raise ModelUnavailableError unless each GPU in ``used`` takes programs like ours.

    ``used`` are positions in ``gpus``.
    """
    for number in sorted(used):
        gpu = gpus[number]
        if gpu.compute_mode == PROHIBITED:
            raise ModelUnavailableError(
                f"--gpus: GPU {number} ({gpu.name}) is in the mode {PROHIBITED}\n"
                f"lift it: nvidia-smi -i {gpu.number} -c DEFAULT"
            )
        if (0, 0) < gpu.capability < OLDEST_CAPABILITY:
            had = ".".join(map(str, gpu.capability))
            least = ".".join(map(str, OLDEST_CAPABILITY))
            raise ModelUnavailableError(
                f"--gpus: GPU {number} ({gpu.name}) has compute capability {had}, but {least} is "
                "the oldest that the kernels are made for\nuse a newer GPU, or --device cpu"
            )


def given_groups(
    groups: Sequence[Group], sizes: Sequence[int], names: Sequence[str], count: int
) -> list[Group]:
    """What ``--gpus`` says, checked against ``--tp`` and the ``count`` GPUs that there are.

    Args:
        groups: one a model.
        sizes: what ``--tp`` says, one a model, or nothing.

    Raises:
        ConfigError: one of them is wrong.
    """
    shown = "/".join(",".join(map(str, group)) for group in groups)
    if len(groups) != len(names):
        raise ConfigError(
            f"--gpus {shown}: {len(groups)} groups for {len(names)} models; give one a model, "
            "separated by /"
        )
    if sizes and len(sizes) != len(names):
        raise ConfigError(f"--tp: {len(sizes)} numbers for {len(names)} models; give one a model")
    for group, name, size in zip(groups, names, sizes or map(len, groups), strict=True):
        unknown = [number for number in group if not 0 <= number < count]
        if unknown:
            there = ", ".join(map(str, range(count)))
            raise ConfigError(f"--gpus {shown}: there is no GPU {unknown[0]}; there are {there}")
        if len(set(group)) < len(group) or not group:
            raise ConfigError(f"--gpus {shown}: {name} needs GPUs, each named once")
        if size != len(group):
            raise ConfigError(
                f"--gpus {shown}, --tp {size}: {name} has {size} processes and {len(group)} GPUs; "
                "each process takes one GPU"
            )
    return list(groups)


def choose_groups(
    shapes: Sequence[Shape], sizes: Sequence[int], gpus: Sequence[Gpu], block: int, need_of: NeedOf
) -> list[Group]:
    """Groups where ``--gpus`` says nothing: all from GPU 0 on, or spread where they do not fit.

    Sharing comes first because a handoff within a GPU is the shortest, and a small model leaves
    most of a GPU idle. It fits if each model can hold one row of its full length.

    Args:
        sizes: how many processes each model has.
        need_of: what a model takes.

    Raises:
        ConfigError: ``--tp`` asks for more GPUs than there are.
    """
    for shape, size in zip(shapes, sizes, strict=True):
        if size > len(gpus):
            raise ConfigError(
                f"--tp {size}: {shape.name} needs {size} GPUs; this machine has {len(gpus)}"
            )
    shared = [tuple(range(size)) for size in sizes]
    if _holds_a_row(shapes, shared, gpus, block, need_of):
        return shared
    return _spread(shapes, sizes, gpus, need_of)


def _holds_a_row(
    shapes: Sequence[Shape],
    groups: Sequence[Group],
    gpus: Sequence[Gpu],
    block: int,
    need_of: NeedOf,
) -> bool:
    needs = [need_of(index, group) for index, group in enumerate(groups)]
    room = {number: room_of(gpu.free) for number, gpu in enumerate(gpus)}
    tokens = common_tokens(needs, room, block)
    return tokens is not None and tokens >= max(shape.row_tokens for shape in shapes)


def _spread(
    shapes: Sequence[Shape], sizes: Sequence[int], gpus: Sequence[Gpu], need_of: NeedOf
) -> list[Group]:
    """The largest model first, each onto the GPUs that have most left."""
    left = {number: room_of(gpu.free) for number, gpu in enumerate(gpus)}
    groups: dict[int, Group] = {}

    def takes(index: int) -> int:
        return need_of(index, tuple(range(sizes[index]))).size(shapes[index].row_tokens)

    for index in sorted(range(len(shapes)), key=takes, reverse=True):
        roomiest = sorted(left, key=lambda number: (-left[number], number))
        groups[index] = tuple(sorted(roomiest[: sizes[index]]))
        for number in groups[index]:
            left[number] -= takes(index)
    return [groups[index] for index in range(len(shapes))]


def sharers(groups: Sequence[Group]) -> dict[int, list[int]]:
    """By GPU, the models that MPS can help there: those with one process, where there are several.

    A model that spans GPUs is none: as an MPS client it would join the domains in which a fault is
    everybody's, of all its GPUs.
    """
    found: dict[int, list[int]] = {}
    for model, group in enumerate(groups):
        if len(group) == 1:
            found.setdefault(group[0], []).append(model)
    return {gpu: models for gpu, models in found.items() if len(models) > 1}


def describe(names: Sequence[str], groups: Sequence[Group]) -> str:
    """``0.6b on GPU 0, 32b on GPUs 0,1; GPU 0 is shared``."""
    parts = [
        f"{name} on GPU{'s' * (len(group) > 1)} {','.join(map(str, group))}"
        for name, group in zip(names, groups, strict=True)
    ]
    everywhere = [number for group in groups for number in group]
    shared = sorted({number for number in everywhere if everywhere.count(number) > 1})
    form = "no GPU is shared"
    if shared:
        form = f"GPU{'s' * (len(shared) > 1)} {','.join(map(str, shared))} {_are(shared)} shared"
    return f"{', '.join(parts)}; {form}" if len(names) > 1 else parts[0]


def _are(numbers: Sequence[int]) -> str:
    return "is" if len(numbers) == 1 else "are"


def check_room(needs: Sequence[Need], gpus: Sequence[Gpu], tokens: int | None, block: int) -> None:
    """Raise ModelUnavailableError unless every GPU holds its models and a block of KV for each."""
    if tokens is not None and tokens >= block:
        return
    for number, gpu in enumerate(gpus):
        here = [need for need in needs if number in need.gpus]
        wanted = sum(need.size(block) for need in here)
        if wanted <= room_of(gpu.free):
            continue
        parts = ", ".join(f"{need.name} {need.size(block) / _GIB:.1f} GiB" for need in here)
        raise ModelUnavailableError(
            f"--gpus: GPU {number} ({gpu.name}) has {gpu.free / _GIB:.1f} GiB free, of which "
            f"{room_of(gpu.free) / _GIB:.1f} may be planned with; models and one block of KV need "
            f"{wanted / _GIB:.1f}: {parts}\n"
            "name smaller models, spread them over more GPUs (--gpus, --tp), or end what else "
            "uses the GPU"
        )
    raise ConfigError("--memory: too little for one block of KV of every model")
