"""From a configuration with ``--device emulated`` to its models, their profile and a router.

Names of models mean entries of a profile here: no checkpoint, no weights, and KV blocks that are
only counted. Knows no worker and takes nothing; what is wrong with a flag is said here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from trserve import demo
from trserve.config import LaunchConfig, ModelConfig, RecordConfig, RouterConfig
from trserve.emulated.behaviour import behaviour_of, matrix_text
from trserve.emulated.profile import (
    LONGEST_ROW,
    EmulatedModel,
    InvalidProfile,
    Profile,
    load_profile,
    shipped_profiles,
)
from trserve.errors import ConfigError
from trserve.models.aliases import ZERO_LAYER, ResolvedModel, alias_spec
from trserve.router_lib.configuration import read_values
from trserve.router_lib.registry import describe

ROUTER: Final = "emulated"
_OWN_ROUTING: Final = {"algorithm", "routing"}
"""With one of these, the router needs no profile's matrices."""

_NEEDS_STATES: Final = "checkpoint"
"""Routers with this parameter read hidden states."""


class Placement(NamedTuple):
    """``config`` is the one given, with what the profile decides filled in; ``profile`` has the
    server's models alone, in their order."""

    config: LaunchConfig
    profile: Profile
    models: list[ResolvedModel]


def place(config: LaunchConfig, names: Sequence[str]) -> Placement:
    """``names`` are those of ``--models``, wherever each of them is.

    Raises ConfigError, which names the flag or the profile's key that is wrong.
    """
    _refuse_what_means_nothing(config)
    whole = _profile(config, names)
    wanted = _wanted(config, names) or whole.names
    models = [_entry(whole, name) for name in wanted]
    profile = msgspec.structs.replace(whole, models=models)
    router = _router(config, whole, [model.name for model in models])
    threads = config.placement.threads or (1,) * len(models)
    _check_count("--threads", threads, models)
    _check_count("--tp", config.placement.tp, models)
    _check_count("--batch-threshold", config.scheduling.batch_threshold, models)
    length = config.model.max_model_len or whole.max_model_len
    if length > LONGEST_ROW:
        raise ConfigError(f"--max-model-len {length}: emulated rows have at most {LONGEST_ROW}")
    filled = replace(
        config,
        model=replace(config.model, models=tuple(profile.names), max_model_len=length),
        placement=replace(config.placement, threads=threads),
        router=router,
    )
    return Placement(filled, profile, [_resolved(model.name) for model in models])


def _refuse_what_means_nothing(config: LaunchConfig) -> None:
    default, model = ModelConfig(), config.model
    given = {
        "--load-format": model.load_format != default.load_format,
        "--tokenizer": model.tokenizer != default.tokenizer,
        "--dtype": model.dtype != default.dtype,
        "--quantization": model.quantization != default.quantization,
        "--record": config.recording.record != RecordConfig().record,
        "--memory": bool(config.engine.memory),
    }
    for flag, is_given in given.items():
        if is_given:
            instead = "; --kv-tokens sizes the KV cache" if flag == "--memory" else ""
            raise ConfigError(
                f"{flag}: emulated models have no weights, tokenizer, hidden states or KV "
                f"bytes{instead}"
            )


def _check_count(flag: str, values: Sequence[int], models: Sequence[EmulatedModel]) -> None:
    if values and len(values) != len(models):
        names = ",".join(model.name for model in models)
        raise ConfigError(
            f"{flag} names {len(values)} numbers for the models {names}: give one a model"
        )


def _wanted(config: LaunchConfig, names: Sequence[str]) -> tuple[str, ...]:
    """The names of ``--models``; none where it was left out."""
    return () if config.model.models == ModelConfig().models else tuple(names)


def _profile(config: LaunchConfig, wanted: Sequence[str]) -> Profile:
    if config.placement.profile:
        return load_profile(config.placement.profile)
    names = [name.lower() for name in _wanted(config, wanted)]
    profiles = {name: load_profile(name) for name in shipped_profiles()}
    for profile in profiles.values():
        if [name.lower() for name in profile.names] == names:
            return profile
    known = "; ".join(f"{name} ({','.join(p.names)})" for name, p in profiles.items())
    shown = ",".join(_wanted(config, wanted)) or "none named"
    raise ConfigError(
        f"--models {shown}: no profile has exactly these models, in this order; name one with "
        f"--profile: a file, or {known}"
    )


def _entry(profile: Profile, name: str) -> EmulatedModel:
    if model := profile.model(name):
        return model
    raise ConfigError(
        f"--models {name}: profile {profile.name} has no such model; it has: "
        f"{', '.join(profile.names)}"
    )


def _resolved(name: str) -> ResolvedModel:
    spec = replace(alias_spec(ZERO_LAYER), eos_token_ids=(), max_position_embeddings=LONGEST_ROW)
    # A checkpoint's suggestions for sampling lie below its path: below a file, there are none.
    return ResolvedModel(name, Path(__file__), spec, demo.model_path("tiny"), own_tokenizer=False)


def _router(config: LaunchConfig, profile: Profile, names: Sequence[str]) -> RouterConfig:
    """The router's settings, complete with the matrices of ``profile`` where it needs them."""
    wanted = config.router
    name = wanted.router
    if name == "auto":
        name = ROUTER if len(names) > 1 else "none"
    entry = describe(name)
    if entry is not None and any(each.name == _NEEDS_STATES for each in entry.parameters):
        raise ConfigError(
            f"--router {name}: reads hidden states, which emulated models do not have; the "
            f"requests travel alike with --router {ROUTER} --router-config algorithm={name},p=..."
        )
    if entry is None or name != ROUTER:
        return replace(wanted, router=name)
    pairs = (*_matrices(profile, names, wanted.router_config), *wanted.router_config)
    values = read_values(pairs, name, entry.parameters, found={}, models=len(names))
    behaviour_of(values, len(names))
    return replace(wanted, router=name, router_config=pairs)


def _matrices(
    profile: Profile, names: Sequence[str], given: Sequence[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """The profile's P and C as parameters; none where those ``given`` say enough."""
    keys, routing = {key for key, _ in given}, profile.routing
    if keys & _OWN_ROUTING:
        return ()
    if routing is not None and tuple(names) == profile.names:
        return ("routing", matrix_text(routing.routing)), ("tokens", matrix_text(routing.tokens))
    if len(names) == 2 and "p" in keys:
        return ()
    which = "says nothing of routing"
    if routing is not None:
        which = f"says how requests travel between {','.join(profile.names)}, in this order"
    raise InvalidProfile(
        f"--profile {profile.name}: {which}; give --router, or --router-config algorithm=..., "
        f"for the models {','.join(names)}"
    )
