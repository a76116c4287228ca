"""Routers by name: which class, which parameters, how many models. Imports no router, no torch.

A router from outside the package is named ``module:Class``; its parameters are known once a
worker has imported it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from trserve.errors import ConfigError
from trserve.router_lib.parameters import Parameter

if TYPE_CHECKING:
    from trserve.router_lib.base import BaseRouter


@dataclass(frozen=True)
class RouterEntry:
    """A router that ships with the package; ``max_models`` None means any number."""

    target: str
    help: str
    parameters: tuple[Parameter, ...] = ()
    min_models: int = 1
    max_models: int | None = None


R_STITCH_PARAMETERS: Final = (
    Parameter(
        "tau",
        "normalised entropy above which the large model writes (0 to 1)",
        default=0.03,
        minimum=0.0,
        maximum=1.0,
    ),
)

BUILTIN: Final[dict[str, RouterEntry]] = {
    "none": RouterEntry("trserve.router_lib.none:NoRouter", "the entry model writes everything"),
    "r-stitch": RouterEntry(
        "trserve.router_lib.r_stitch:RStitch",
        "entropy of the next-token distribution, both ways (arXiv 2507.17307)",
        R_STITCH_PARAMETERS,
        min_models=2,
        max_models=2,
    ),
}


def describe(name: str) -> RouterEntry | None:
    """The entry of a built-in router; None for a ``module:Class``.

    Raises ConfigError for a name that is neither.
    """
    if entry := BUILTIN.get(name):
        return entry
    if ":" in name:
        return None
    known = ", ".join(BUILTIN)
    raise ConfigError(f"--router {name}: unknown router; known: {known}, or module:Class")


def load_router_class(name: str) -> type[BaseRouter]:
    """Import the class of a router. Raises ConfigError when it is not there or is no router."""
    from trserve.router_lib.base import BaseRouter

    entry = describe(name)
    target = entry.target if entry else name
    module_name, _, class_name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--router {name}: cannot import {target}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, BaseRouter)):
        raise ConfigError(f"--router {name}: {target} is not a subclass of trserve.BaseRouter")
    return found
