"""``trserve config show``: the settings of a server as they would hold, and where each is from.

The output is a file that ``--config`` takes. Checks nothing on the machine; shows no key.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, Final

import click

from trserve.config import GROUPS, LaunchConfig
from trserve.config_sources import DEFAULT, SECRETS, Settings
from trserve.exits import one_line_errors
from trserve.launch_options import TOPICS, TopicsCommand, launch_options, settings_of

_HIDDEN: Final = "<hidden>"
_NOTHING: Final = '""'
_HELP: Final = """Print the settings that a launch with the same flags would have, as YAML.

A flag wins over TRSERVE_NAME in the environment, that over the file of --config, that over the
default; with --origin each line says which it was. Keys are not shown.

\b
    trserve config show --origin --config server.yaml --port 8100
    trserve config show > server.yaml; trserve launch --config server.yaml
"""


def lines(settings: Settings, config: LaunchConfig, *, origin: bool) -> list[str]:
    """One ``name: value`` a setting below the names of their topics."""
    shown = []
    for group_name, group in GROUPS.items():
        shown.append(f"# {TOPICS[group_name]}")
        group_values = getattr(config, group_name)
        for each in fields(group):
            value, said = getattr(group_values, each.name), settings.origins[each.name]
            line = f"{each.name.replace('_', '-')}: {_yaml(each.name, value, said)}"
            shown.append(f"{line}  # {said}" if origin else line)
    return shown


def as_file(config: LaunchConfig) -> str:
    """``config`` as a file for ``--config``, without keys."""
    shown: list[str] = []
    for group_name, group in GROUPS.items():
        values = getattr(config, group_name)
        for each in fields(group):
            text = _yaml(each.name, getattr(values, each.name), DEFAULT)
            shown.append(f"{each.name.replace('_', '-')}: {text}\n")
    return "".join(shown)


def _yaml(name: str, value: Any, origin: str) -> str:
    """A value as YAML that :mod:`trserve.config_file` reads as the same value, but for a key."""
    if name in SECRETS:
        return _NOTHING if origin == DEFAULT else f"{_NOTHING}  # {_HIDDEN}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if value == ():
        return "[]"
    if name == "router_config":
        return _quoted(",".join(f"{key}={text}" for key, text in value))
    if isinstance(value, tuple):
        inner = isinstance(value[0], tuple)
        parts = [",".join(map(str, each)) for each in value] if inner else map(str, value)
        return _quoted(("/" if inner else ",").join(parts))
    if name == "memory" and not value:
        return _NOTHING  # what is free; 0 is no size that a flag takes
    return _quoted(str(value))


def _quoted(text: str) -> str:
    """``text`` as it is where YAML takes it for itself, else in quotes, which JSON's are too."""
    if text and text[0].isalnum() and all(each.isalnum() or each in "_./+-" for each in text):
        return text
    return json.dumps(text)


def _show(origin: bool, **values: Any) -> None:
    with one_line_errors():
        settings = settings_of(values)
        for note in settings.notes:
            click.echo(f"trserve: {note}", err=True)
        for line in lines(settings, settings.config(), origin=origin):
            click.echo(line)


def config_command() -> click.Group:
    """The group, for the command line to register."""
    group = click.Group("config", help="Look at a server's settings.")
    group.add_command(
        TopicsCommand(
            "show",
            params=[
                click.Option(["--origin"], is_flag=True, help="Say where each value comes from."),
                *launch_options(),
            ],
            callback=_show,
            help=_HELP,
            short_help="Print the settings that a launch would have.",
        )
    )
    return group
