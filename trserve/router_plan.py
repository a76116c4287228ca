"""Which router a server runs, and with which values. Knows no weights and makes no router."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trserve import demo
from trserve.config import LaunchConfig
from trserve.errors import ConfigError
from trserve.model_plans import Member, local_models
from trserve.models.aliases import EMBEDDED
from trserve.router_lib.configuration import Values, read_untyped, read_values
from trserve.router_lib.registry import MODEL, TOKENIZER, RouterEntry, describe

_DEFAULT_ROUTER: Final = "r-stitch"


def choose_router(config: LaunchConfig, members: Sequence[Member]) -> tuple[str, Values]:
    """Its name and configuration, complete with defaults for a built-in one.

    Raises ConfigError where it does not go with these models, or a value is wrong.
    """
    name, pairs = config.router.router, config.router.router_config
    if name == "auto":
        name = _DEFAULT_ROUTER if len(members) == 2 else "none"
    entry = describe(name)
    if entry is None:
        return name, read_untyped(pairs)
    _check_model_count(name, entry, len(members))
    first = local_models(members)[0]
    found = {MODEL: str(first.path), TOKENIZER: str(first.tokenizer_path)}
    pairs = (*_stored_pairs(name, members), *pairs)  # the last one of a name counts
    return name, read_values(pairs, name, entry.parameters, found=found, models=len(members))


def _check_model_count(name: str, entry: RouterEntry, count: int) -> None:
    most = entry.max_models
    if count < entry.min_models or (most is not None and count > most):
        wanted = (
            str(entry.min_models) if entry.min_models == most else f"at least {entry.min_models}"
        )
        raise ConfigError(f"--router {name} needs {wanted} models; --models names {count}")


def _stored_pairs(name: str, members: Sequence[Member]) -> Sequence[tuple[str, str]]:
    """What ships with the embedded pair, wherever its members are."""
    stored = [demo.model_path("tiny"), demo.model_path("small")]
    if [_path(member) for member in members] != stored:
        return ()
    if name == _DEFAULT_ROUTER:
        return (("tau", repr(demo.default_tau())),)
    checkpoint = demo.router_checkpoint(name)
    return (("checkpoint", str(checkpoint)),) if checkpoint else ()


def _path(member: Member) -> Path | None:
    """Where its checkpoint is; of one elsewhere, where that of its name would be."""
    if member.model is not None:
        return member.model.path
    name = member.place.name.lower()
    return demo.model_path("tiny" if name == "tiny" else "small") if name in EMBEDDED else None
