"""What a router lets its users set, and what of it a request may change. Knows no torch.

The launcher checks ``--router-config`` and the gateway checks a request's ``router`` object
against these, before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec


class Parameter(msgspec.Struct, frozen=True):
    """One number that a router takes.

    ``default`` None means that it must be given; ``per_request`` that a request may override it.
    Bounds are inclusive; a default outside of them stands for what only the router knows. A
    router's *first* parameter is the one that ``NAME:threshold=0.3`` sets.
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
        if value != self.default and not self.minimum <= value <= self.maximum:
            return f"{self.name} = {value:g} is outside {self.minimum:g} to {self.maximum:g}"
        return None


class ServerParameter(Parameter, frozen=True):
    """A number of the server's alone: routers see it in their configuration, never by request."""

    per_request: bool = False


class TextParameter(Parameter, frozen=True):
    """A text that a router takes with ``--router-config``, never from a request.

    ``choices`` are the texts that may be given, where not any; ``is_path`` says that it names a
    file or folder that exists.
    """

    # Whoever completes a configuration takes a default as it is.
    default: str | None = None  # type: ignore[assignment]
    choices: tuple[str, ...] = ()
    is_path: bool = False
    per_request: bool = False

    def problem(self, value: object) -> str | None:
        """Why ``value`` cannot be taken, or None."""
        if not isinstance(value, str):
            return f"{self.name} must be a text, not {value!r}"
        if self.choices and value not in self.choices:
            return f"{self.name} = {value} is not one of: {', '.join(self.choices)}"
        if self.is_path and not Path(value).expanduser().exists():
            return f"{self.name} = {value}: there is no such file or folder"
        return None


class WeightsParameter(TextParameter, frozen=True):
    """One weight for each model, in their order, as ``0.5/0.3/0.2``."""

    def problem(self, value: object) -> str | None:
        """Why ``value`` cannot be taken, or None."""
        if problem := super().problem(value):
            return problem
        try:
            weights = split_weights(str(value))
        except ValueError:
            return f"{self.name} = {value}: not numbers separated by /"
        if any(not math.isfinite(weight) or weight < 0 for weight in weights):
            return f"{self.name} = {value}: a weight is finite and not negative"
        if weights and not sum(weights) > 0:
            return f"{self.name} = {value}: no weight is above 0"
        return None


def split_weights(text: str) -> tuple[float, ...]:
    """The numbers of ``0.5/0.3/0.2``, none of an empty text. ValueError where one is no number."""
    return tuple(float(part) for part in text.split("/")) if text else ()


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
