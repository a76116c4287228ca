"""The keyword arguments of an ``Engine``, checked as flags are: names, choices, texts and types.

A text is read as the flag's would be; other values must be of the setting's kind. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field
from os import PathLike, fspath
from typing import Any, Final

from trserve.config import LaunchConfig, config_from_flags
from trserve.config_hosts import RAY
from trserve.config_sources import SETTINGS, did_you_mean, value_of
from trserve.errors import ConfigError
from trserve.ipc.child import LOG_LEVEL_VARIABLE
from trserve.process_environment import process_environment

_KINDS: Final[dict[type, str]] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a list",
}


def engine_config(settings: Mapping[str, Any]) -> LaunchConfig:
    """The configuration tree. Raises ConfigError naming the argument that is wrong."""
    config = config_from_flags({name: _value(name, each) for name, each in settings.items()})
    if config.hosts.executor == RAY:
        raise ConfigError(
            "--executor ray: is for `trserve launch`; an Engine's processes are on its own host"
        )
    return config


def engine_environment(config: LaunchConfig, settings: Mapping[str, Any]) -> dict[str, str]:
    """Variables for the engine's processes; a log level that none was named for is inherited."""
    found = process_environment(config)
    if "log_level" not in settings:
        del found[LOG_LEVEL_VARIABLE]
    return found


def _value(name: str, value: Any) -> Any:
    setting = SETTINGS.get(name)
    if setting is None:
        hint = did_you_mean(name, SETTINGS)
        meant = f"; did you mean {hint}?" if hint else "; see `trserve launch --help`"
        raise ConfigError(f"Engine({name}=...) is no setting{meant}")
    if isinstance(value, PathLike):
        value = fspath(value)
    if isinstance(value, Mapping) and setting.metadata["multiple"]:
        return tuple((str(key), str(each)) for key, each in value.items())
    if isinstance(value, str) and not _is_plain_text(setting):
        return value_of(name, value, f"Engine({name}={value!r})")
    kind: type = type(setting.default)
    if kind is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(tuple(each) if isinstance(each, list) else each for each in value)
    if kind is tuple and isinstance(value, int) and not isinstance(value, bool):
        return value_of(name, str(value), f"Engine({name}={value!r})")  # a list of one
    if not _is_of(kind, value):
        raise ConfigError(f"Engine({name}={value!r}): must be {_KINDS[kind]}")
    return value


def _is_plain_text(setting: Field[Any]) -> bool:
    meta = setting.metadata
    return isinstance(setting.default, str) and not meta["choices"] and not meta["parse"]


def _is_of(kind: type, value: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
