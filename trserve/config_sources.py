"""Where each setting of a server comes from: a flag, the environment, a file, or its default.

The first of these that says anything about a setting says all of it: lists and router parameters
are not merged. Knows no click, no model and no machine, and no key's text from the environment
(``trserve/keys.py`` reads and removes those).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from trserve.config import GROUPS, LaunchConfig, config_from_flags, flag_name
from trserve.config_values import parse_switch
from trserve.errors import ConfigError, StartupError
from trserve.keys import ADMIN_VARIABLE, API_VARIABLE

PREFIX: Final = "TRSERVE_"
FILE_VARIABLE: Final = "TRSERVE_CONFIG"
"""Names the file where no ``--config`` does."""

DEFAULT: Final = "default"
SECRETS: Final = ("api_key", "admin_key")

_OTHER_VARIABLES: Final = frozenset(
    {FILE_VARIABLE, API_VARIABLE, ADMIN_VARIABLE, "TRSERVE_CPU_KERNELS", "TRSERVE_FULL"}
)
_KEY_VARIABLES: Final = {"api_key": API_VARIABLE, "admin_key": ADMIN_VARIABLE}
# Of a Service that is called trserve, Kubernetes tells every pod its ports and addresses so.
_SERVICE_LINK: Final = re.compile(r"SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?")
_SERVICE_PORT: Final = re.compile(r"(tcp|udp|sctp)://")
_FLAG: Final = re.compile(r"--[a-z][a-z-]*")

SETTINGS: Final[dict[str, Field[Any]]] = {
    setting.name: setting for group in GROUPS.values() for setting in fields(group)
}
"""Every setting by its name, as ``max_num_seqs``."""


@dataclass(frozen=True)
class Settings:
    """What was said, before it is checked as a whole.

    Attributes:
        values: those of settings that anything said something about.
        origins: by name of every setting: ``flag --port``, ``environment TRSERVE_PORT``,
            ``file NAME``, or ``default``.
        notes: what a person should know, one line each: variables that are ignored.
    """

    values: Mapping[str, Any]
    origins: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def config(self) -> LaunchConfig:
        """The tree. Raises ConfigError naming the flag, and whence its value came."""
        with self.blame():
            return config_from_flags(self.values)

    @contextmanager
    def blame(self) -> Iterator[None]:
        """Add to a StartupError about a setting where its value came from, if not from a flag."""
        try:
            yield
        except StartupError as error:
            raise type(error)(self._located(str(error))) from error

    def _located(self, message: str) -> str:
        named = (flag[2:].replace("-", "_") for flag in _FLAG.findall(message))
        first = next((name for name in named if name in self.origins), None)
        origin = self.origins[first] if first else DEFAULT
        if first is None or origin == DEFAULT or origin.startswith("flag "):
            return message
        return f"{message}\n{flag_name(SETTINGS[first])} comes from {origin}"


def gather(flags: Mapping[str, Any], file: Path | None, environment: Mapping[str, str]) -> Settings:
    """What flags, the environment and a file say, in this order.

    Args:
        flags: values by name of setting, as a flag's own parser made them.
        file: what ``--config`` names; None: what the environment names, if anything.

    Raises:
        ConfigError: a file or a variable is wrong; the message names it and the key in it.
    """
    from trserve.config_file import read_config_file

    if file is None and environment.get(FILE_VARIABLE):
        file = Path(environment[FILE_VARIABLE])
    in_file = read_config_file(file.expanduser()) if file else {}
    in_environment, notes = _read_environment(environment)
    values = {
        **{name: value_of(name, text, f"{file}: {key}") for name, (key, text) in in_file.items()},
        **{name: value_of(name, text, variable(name)) for name, text in in_environment.items()},
        **flags,
    }
    origins = {
        **dict.fromkeys(SETTINGS, DEFAULT),
        **dict.fromkeys(in_file, f"file {file}"),
        **{name: f"environment {variable(name)}" for name in in_environment},
        **{n: f"environment {v}" for n, v in _KEY_VARIABLES.items() if v in environment},
        **{name: f"flag {flag_name(SETTINGS[name])}" for name in flags},
    }
    for name, held in _KEY_VARIABLES.items():
        if held in environment and name not in flags:
            values.pop(name, None)  # the launcher reads the variable itself
    return Settings(values, origins, tuple(notes))


def variable(name: str) -> str:
    """``max_num_seqs`` as ``TRSERVE_MAX_NUM_SEQS``."""
    return PREFIX + name.upper()


def value_of(name: str, text: str, source: str) -> Any:
    """The value of a setting from its text. ConfigError naming ``source`` and the reason."""
    setting = SETTINGS[name]
    try:
        return _parsed(setting, text)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}; see {flag_name(setting)}") from None


def _parsed(setting: Field[Any], text: str) -> Any:
    if choices := setting.metadata["choices"]:
        if text not in choices:
            raise ValueError(f"{text!r} is none of: {', '.join(choices)}")
        return text
    if parse := setting.metadata["parse"]:
        return parse(text)
    kind: Any = type(setting.default)
    if kind is bool:
        return parse_switch(text)
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{text!r} is no {_KINDS.get(kind, 'value')}") from None


_KINDS: Final = {int: "whole number", float: "number"}


def _read_environment(environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Texts by name of setting, and what is to be told of variables that are none."""
    found: dict[str, str] = {}
    notes: list[str] = []
    for key in sorted(environment):
        if not key.startswith(PREFIX) or key in _OTHER_VARIABLES:
            continue
        text, name = environment[key], key.removeprefix(PREFIX).lower()
        if not text or is_service_link(key, text):
            continue  # a variable that is empty is how compose files say that there is none
        if name in SETTINGS:
            found[name] = text
        elif hint := did_you_mean(name, SETTINGS):
            notes.append(f"{key} is no setting and is ignored; did you mean {variable(hint)}?")
    return found, notes


def is_service_link(key: str, text: str) -> bool:
    """Whether Kubernetes put this variable here for a Service that is called ``trserve``.

    Of these only ``TRSERVE_PORT`` has a setting's name; its text is an address then.
    """
    rest = key.removeprefix(PREFIX)
    if rest == "PORT":
        return bool(_SERVICE_PORT.match(text))
    return bool(_SERVICE_LINK.fullmatch(rest))


def did_you_mean(name: str, known: Mapping[str, Any]) -> str | None:
    """The one of ``known`` that ``name`` is most like, if it is like any."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=0.7)), None)
