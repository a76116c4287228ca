"""From ``--router-config`` to the values of a router. Knows no torch and reads no checkpoint.

A number stays a number and a text a text; what is wrong is found before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trserve.errors import ConfigError
from trserve.router_lib.parameters import (
    Parameter,
    TextParameter,
    WeightsParameter,
    check_values,
    split_weights,
)

Values = dict[str, float | str]


def read_values(
    pairs: Sequence[tuple[str, str]],
    router: str,
    parameters: Sequence[Parameter],
    *,
    found: Mapping[str, str],
    models: int,
) -> Values:
    """The values of the router's ``parameters``, those of ``pairs`` over the defaults.

    Args:
        found: what is known from ``--models``, by the names of parameters that default to it.
        models: how many there are.

    Raises:
        ConfigError: a value is wrong, unknown or missing; the message names it.
    """
    by_name = {parameter.name: parameter for parameter in parameters}
    given: Values = {}
    for name, text in pairs:
        is_text = isinstance(by_name.get(name), TextParameter)
        given[name] = text if is_text else _number(name, text)
    if problem := check_values(given, router, parameters):
        raise ConfigError(f"--router-config: {problem}")
    values = _defaults(parameters) | {n: v for n, v in found.items() if n in by_name} | given
    for parameter in parameters:
        if parameter.name not in values:
            raise ConfigError(
                f"--router {router} needs --router-config {parameter.name}=...: {parameter.help}"
            )
        if isinstance(parameter, WeightsParameter):
            _check_count(parameter.name, str(values[parameter.name]), models)
    return values


def read_untyped(pairs: Sequence[tuple[str, str]]) -> Values:
    """``pairs`` for a router whose parameters are not known here: numbers where they are such."""
    values: Values = {}
    for name, text in pairs:
        try:
            values[name] = float(text)
        except ValueError:
            values[name] = text
    return values


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--router-config {name}={text}: not a number") from None


def _defaults(parameters: Sequence[Parameter]) -> Values:
    return {p.name: p.default for p in parameters if p.default is not None}


def _check_count(name: str, text: str, models: int) -> None:
    count = len(split_weights(text))
    if count not in (0, models):
        raise ConfigError(
            f"--router-config {name}={text}: {count} weights, but --models names {models} models"
        )
