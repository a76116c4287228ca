"""The settings of a server in a YAML file. Knows their names; turns no text into a value.

Every scalar is read as the text it is written as (``off`` stays ``off``), so that one parser per
setting serves flags, the environment and files alike. A file may have the settings at its top, or
below the names of their groups; names are those of the flags, with hyphens or underscores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from trserve.config import GROUPS
from trserve.config_sources import SETTINGS, did_you_mean
from trserve.config_values import parse_switch
from trserve.errors import ConfigError

_NOTHING: Final = ("", "~", "null")


def read_config_file(path: Path) -> dict[str, tuple[str, str]]:
    """By name of setting: the key as it is written, and the text of its value.

    Raises:
        ConfigError: the file cannot be read, is no YAML mapping, or has a key that is no setting.
    """
    found: dict[str, tuple[str, str]] = {}
    for key, value in _flat(_read(path), path):
        name, text = _setting(key, value, path)
        if value in _NOTHING or (value == [] and not SETTINGS[name].default):
            continue
        if name in found:
            raise ConfigError(f"{path}: {key} and {found[name][0]} are the same setting; keep one")
        found[name] = key, text
    return found


def _read(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        # BaseLoader makes texts, lists and mappings only; it runs and guesses nothing.
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; give a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config {path}: no YAML: {reason}") from None
    if found in (None, ""):
        return {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"--config {path}: expected settings, one `name: value` a line")
    return found


def _flat(content: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if key in GROUPS and isinstance(value, Mapping):
            yield from value.items()
        elif not (key in GROUPS and value in _NOTHING):  # a group without settings
            yield key, value


def _setting(key: str, value: Any, path: Path) -> tuple[str, str]:
    name = _normal(key)
    if name in _SWITCHED_OFF:
        try:
            return _SWITCHED_OFF[name], str(not parse_switch(str(value)))
        except ValueError as error:
            raise ConfigError(f"{path}: {key}: {error}") from None
    if name not in _NAMES:
        hint = did_you_mean(name, {**_NAMES, **_SWITCHED_OFF})
        known = "; `trserve config show` lists what there is"
        meant = f"; did you mean {hint}?" if hint else known
        raise ConfigError(f"{path}: {key} is no setting{meant}")
    return _NAMES[name], _text(key, value, path)


def _text(key: str, value: Any, path: Path) -> str:
    """As the flag would have it: lists by commas, mappings as k=v, lists inside those by /."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ",".join(f"{name}={_inner(key, each, path)}" for name, each in value.items())
    return ",".join(_inner(key, each, path) for each in value)


def _inner(key: str, value: Any, path: Path) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return "/".join(value)
    raise ConfigError(f"{path}: {key}: values lie too deep; give texts, numbers or one list")


def _normal(key: str) -> str:
    return str(key).lstrip("-").replace("-", "_")


_NAMES: Final[dict[str, str]] = {
    _normal(spelling): name
    for name, setting in SETTINGS.items()
    for spelling in (name, *setting.metadata["also"])
}
_SWITCHED_OFF: Final[dict[str, str]] = {
    _normal(spelling): name
    for name, setting in SETTINGS.items()
    for spelling in setting.metadata["off"]
}
