"""What a router lets its users set, and what of it a request may change. Knows no torch.

The launcher checks ``--router-config`` and the gateway checks a request's ``router`` object
against these, before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec


class Parameter(msgspec.Struct, frozen=True):
    """One number that a router takes.

    ``default`` None means that it must be given; ``per_request`` that a request may override it.
    Bounds are inclusive. A router's *first* parameter is the one that ``NAME:threshold=0.3`` sets.
    """

    name: str
    help: str
    default: float | None = None
    minimum: float = -math.inf
    maximum: float = math.inf
    per_request: bool = True

    def problem(self, value: object) -> str | None:
        """Why ``value`` cannot be taken, or None."""
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            return f"{self.name} must be a finite number, not {value!r}"
        if not self.minimum <= value <= self.maximum:
            return f"{self.name} = {value:g} is outside {self.minimum:g} to {self.maximum:g}"
        return None


def unknown_parameter(name: str, router: str, known: Sequence[Parameter]) -> str:
    """The message for a parameter that ``router`` does not have."""
    names = ", ".join(parameter.name for parameter in known) or "none"
    return f"router {router} has no parameter {name!r}; it has: {names}"


def check_values(
    values: Mapping[str, object], router: str, known: Sequence[Parameter]
) -> str | None:
    """The first problem with ``values`` as parameters of ``router``, or None."""
    by_name = {parameter.name: parameter for parameter in known}
    for name, value in values.items():
        if name not in by_name:
            return unknown_parameter(name, router, known)
        if problem := by_name[name].problem(value):
            return problem
    return None
