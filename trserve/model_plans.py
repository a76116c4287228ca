"""What is planned of each model: where it is, which checkpoint, how long a row, how much KV.

Knows models' files and places; nothing of routers, endpoints or processes. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple, cast

import msgspec

from trserve.config import LaunchConfig
from trserve.edge.facts import RemoteFacts
from trserve.errors import ConfigError
from trserve.gpus.planning import Planned
from trserve.ipc.slab import available_memory
from trserve.kv_blocks import DTYPE_BYTES, kv_blocks
from trserve.models.aliases import LoadFormat, ResolvedModel, resolve_model, resolve_tokenizer
from trserve.models.division import check_divisible
from trserve.models.fit import check_weights_fit
from trserve.models.token_map import TokenMap
from trserve.places import Place

_BFLOAT16_FROM: Final = 50_000_000


class ModelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One model and its worker.

    ``num_blocks`` KV blocks; ``dtype`` a torch dtype's name; with ``int8`` 8-bit weights;
    ``token_map`` how its rows are put in the order of the server's ids; ``active_parameters`` how
    many weights a token meets, 0 where nobody counted. ``remote`` is empty for a model that is
    here, else where it is (see ``places``): then there is no path, no KV and no thread. ``tp``
    tensor parallel processes, on the GPUs ``gpus``.
    """

    name: str
    path: str = ""
    load_format: LoadFormat = "auto"
    dtype: str = ""
    int8: bool = False
    token_map: TokenMap = TokenMap()
    max_model_len: int
    num_blocks: int = 0
    threads: int = 1
    active_parameters: int = 0
    remote: str = ""
    tp: int = 1
    gpus: tuple[int, ...] = ()

    @property
    def place(self) -> Place:
        """Where it is."""
        return Place(self.name, self.remote)


class Member(NamedTuple):
    """A model of the server: its place, and its checkpoint if it is here (or only emulated)."""

    place: Place
    model: ResolvedModel | None

    @property
    def is_here(self) -> bool:
        """Whether a worker of this server runs it."""
        return not self.place.remote


def find_members(config: LaunchConfig, places: Sequence[Place]) -> list[Member]:
    """The checkpoints of the models that are here. ModelUnavailableError if one is not."""
    return [
        Member(place, None if place.remote else checkpoint_of(config, place.name))
        for place in places
    ]


def checkpoint_of(config: LaunchConfig, name: str) -> ResolvedModel:
    """That of the model ``name``, with the tokenizer that is asked for.

    Raises:
        ModelUnavailableError: one of them is not here.
    """
    model = resolve_model(name, cast(LoadFormat, config.model.load_format))
    if not config.model.tokenizer:
        return model
    path = resolve_tokenizer(config.model.tokenizer)
    return replace(model, tokenizer_path=path, own_tokenizer=True)


def with_profile(places: Sequence[Place], models: Sequence[ResolvedModel]) -> list[Member]:
    """The members of an emulated server; ``models`` are a profile's where none was named."""
    if len(places) != len(models):
        places = [Place(model.name) for model in models]
    return [Member(*pair) for pair in zip(places, models, strict=True)]


def local_models(members: Sequence[Member]) -> list[ResolvedModel]:
    """The checkpoints of those that are here."""
    return [member.model for member in members if member.is_here and member.model is not None]


def plan_models(
    config: LaunchConfig,
    members: Sequence[Member],
    facts: Sequence[RemoteFacts | None],
    maps: Sequence[TokenMap],
    planned: Planned | None = None,
) -> list[ModelPlan]:
    """The plans of ``members``.

    Args:
        facts: what is known of each member that is elsewhere.
        maps: of those that are here, in their order.
        planned: what GPUs they have, and the KV blocks there; None where they have none.

    Raises:
        ConfigError: a flag is wrong; the message names it.
        ModelUnavailableError: the weights do not fit.
    """
    models = local_models(members)
    lengths = [model_length(model, config.model.max_model_len) for model in models]
    dtypes = [choose_dtype(model, config.model.dtype) for model in models]
    int8 = config.model.quantization == "int8"
    groups: Sequence[tuple[int, ...]] = ((),) * len(members)
    if planned is None:
        check_memory(models, dtypes, int8=int8)
        blocks = kv_blocks(_of_locals(config, members), models, dtypes, lengths)
        tp = tensor_parallel(config, members)
    else:
        blocks = [n for n, member in zip(planned.blocks, members, strict=True) if member.is_here]
        groups, tp = planned.groups, tuple(max(1, len(group)) for group in planned.groups)
    names = unique_names(members)
    threads = config.placement.threads or _shared_threads(members, tp)
    here = iter(range(len(models)))
    plans: list[ModelPlan] = []
    for index, member in enumerate(members):
        if not member.is_here:
            plans.append(_elsewhere(names[index], member.place, facts[index], max(lengths)))
            continue
        local = next(here)
        model = models[local]
        plans.append(
            ModelPlan(
                name=names[index],
                path=str(model.path),
                load_format=cast(LoadFormat, config.model.load_format),
                dtype=dtypes[local],
                int8=int8,
                token_map=maps[local],
                max_model_len=lengths[local],
                num_blocks=blocks[local],
                threads=threads[index],
                active_parameters=model.spec.active_parameters,
                tp=tp[index],
                gpus=groups[index],
            )
        )
    return plans


def _elsewhere(name: str, place: Place, facts: RemoteFacts | None, length: int) -> ModelPlan:
    """Of a model at another host; what nobody has said is as it is here.

    Its rows are those of the slab here, which have ``length`` tokens at most.
    """
    facts = facts or RemoteFacts(max_model_len=length)
    return ModelPlan(
        name=name,
        dtype=facts.dtype,
        max_model_len=min(facts.max_model_len, length),
        active_parameters=facts.active_parameters,
        remote=place.remote,
    )


def _of_locals(config: LaunchConfig, members: Sequence[Member]) -> LaunchConfig:
    """``config`` with ``--kv-tokens`` of those that are here alone."""
    tokens = config.engine.kv_tokens
    if len(tokens) == len(members):
        pairs = zip(tokens, members, strict=True)
        tokens = tuple(count for count, member in pairs if member.is_here)
    return replace(config, engine=replace(config.engine, kv_tokens=tokens))


def tensor_parallel(config: LaunchConfig, members: Sequence[Member]) -> tuple[int, ...]:
    """Processes of each model.

    Raises:
        ConfigError: one cannot have several.
        ModelUnavailableError: it cannot have so many.
    """
    given = config.placement.tp or tuple(len(g) for g in config.placement.gpus)
    sizes = given or (1,) * len(members)
    for size, member in zip(sizes, members, strict=True):
        if size > 1 and not member.is_here:
            raise ConfigError(f"--tp {size}: {member.place.name} is at another host")
        if size > 1 and config.placement.device in ("onnx", "emulated"):
            raise ConfigError(f"--tp {size}: means nothing with --device {config.placement.device}")
        if member.model is not None:
            check_divisible(member.model.spec, size, member.model.name)
    return sizes


def unique_names(members: Sequence[Member]) -> list[str]:
    """What to call each; one that comes twice gets a number."""
    names: list[str] = []
    for member in members:
        wanted = member.model.name if member.model is not None else member.place.name
        name, count = wanted, 1
        while name in names:
            count += 1
            name = f"{wanted}-{count}"
        names.append(name)
    return names


def model_length(model: ResolvedModel, wanted: int) -> int:
    """The longest row of ``model``, ``wanted`` if that is not 0. ConfigError if it is too long."""
    most = model.spec.max_position_embeddings
    if wanted > most:
        raise ConfigError(f"--max-model-len {wanted}: model {model.name} has {most} positions")
    return wanted or most


def choose_dtype(model: ResolvedModel, wanted: str) -> str:
    """The dtype's name that ``--dtype`` means for ``model``."""
    if wanted != "auto":
        return wanted
    return "bfloat16" if model.spec.num_parameters >= _BFLOAT16_FROM else "float32"


def check_memory(models: Sequence[ResolvedModel], dtypes: Sequence[str], *, int8: bool) -> None:
    """Raise ModelUnavailableError unless the weights fit into the memory that is free."""
    sizes = [
        (model.name, model.spec, DTYPE_BYTES[dtype], int8)
        for model, dtype in zip(models, dtypes, strict=True)
    ]
    check_weights_fit(sizes, available_memory())


def _shared_threads(members: Sequence[Member], tp: Sequence[int]) -> tuple[int, ...]:
    """The cores shared out among the processes that compute."""
    processes = sum(size for size, member in zip(tp, members, strict=True) if member.is_here)
    share = max(1, len(os.sched_getaffinity(0)) // processes)
    return tuple(share if member.is_here else 1 for member in members)
