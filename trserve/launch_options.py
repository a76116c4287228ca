"""The flags of every command that takes a server's settings, made from the configuration tree.

So no flag is spelled here. Knows click; nothing of what a setting does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from trserve.config import GROUPS, flag_name
from trserve.config_sources import FILE_VARIABLE, Settings, gather

FILE: Final = "config_file"

TOPICS: Final[dict[str, str]] = {
    "model": "Models",
    "router": "Router",
    "placement": "Placement",
    "hosts": "Links and other hosts",
    "engine": "Engine",
    "scheduling": "Scheduling",
    "recording": "Recording",
    "endpoint": "Endpoint",
    "faults": "Faults and the end",
}
"""The heading of each group's flags in a help text."""

_SOURCES: Final = "Settings from elsewhere"
_REST: Final = "Other options"


# Only newer versions of click have a type that takes another.
if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType


class _Parsed(_ParamType):
    """A flag whose text a function of the configuration tree turns into its value."""

    def __init__(self, parse: Callable[[str], Any], name: str) -> None:
        self._parse = parse
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class TopicsCommand(click.Command):
    """A command whose help shows the settings below the names of their topics."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section a topic, and one for what is no setting."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                sections.setdefault(_TOPIC_OF.get(str(param.name), _REST), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


_TOPIC_OF: Final[dict[str, str]] = {
    FILE: _SOURCES,
    **{each.name: TOPICS[name] for name, group in GROUPS.items() for each in fields(group)},
}


def _flag_type(setting: Field[Any]) -> Any:
    if choices := setting.metadata["choices"]:
        return click.Choice(choices)
    if parse := setting.metadata["parse"]:
        return _Parsed(parse, setting.name)
    return type(setting.default)


def _help(setting: Field[Any]) -> str:
    text: str = setting.metadata["help"]
    if "[default" in text or setting.metadata["multiple"]:
        return text
    default = setting.default
    if isinstance(default, bool):
        default = "on" if default else "off"
    return f"{text}  [default: {','.join(default) if isinstance(default, tuple) else default}]"


def _spellings(setting: Field[Any]) -> list[str]:
    flag, meta = flag_name(setting), setting.metadata
    if isinstance(setting.default, bool):
        flag = f"{flag}/--no-{flag[2:]}"
    # To click, what follows " /" turns the switch off.
    return [flag, *meta["also"], *(f" /{spelling}" for spelling in meta["off"])]


def _option(setting: Field[Any]) -> click.Option:
    meta = setting.metadata
    return click.Option(
        [*_spellings(setting), setting.name],
        type=_flag_type(setting),
        multiple=meta["multiple"],
        default=None,
        help=_help(setting),
        metavar=meta["metavar"],
    )


def launch_options() -> list[click.Parameter]:
    """A flag for each setting, and ``--config``."""
    file = click.Option(
        ["--config", FILE],
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="The same settings in YAML, one `name: value` a line. A flag wins over TRSERVE_NAME "
        f"in the environment, that over the file. Also {FILE_VARIABLE}.",
    )
    return [*(_option(each) for group in GROUPS.values() for each in fields(group)), file]


_REPEATABLE: Final = [
    setting.name
    for group in GROUPS.values()
    for setting in fields(group)
    if setting.metadata["multiple"]
]


def settings_of(values: dict[str, Any]) -> Settings:
    """What the flags of :func:`launch_options`, the environment and a file say.

    Raises ConfigError where the file or a variable is wrong.
    """
    given = {name: value for name, value in values.items() if value is not None and value != ()}
    file = given.pop(FILE, None)
    for name in _REPEATABLE:
        if texts := given.get(name):
            given[name] = tuple(part for flag in texts for part in flag)
    return gather(given, file, os.environ)
