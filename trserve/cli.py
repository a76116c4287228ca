"""The command line. Declares commands and flags; everything heavy is imported inside a command.

Flags of ``trserve launch`` are generated from the configuration tree, so this file spells none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import click

from trserve import __version__
from trserve.calibration.options import calibrate_command
from trserve.config import GROUPS, config_from_flags, flag_name
from trserve.errors import StartupError
from trserve.planning.options import plan_command
from trserve.router_check.options import router_command
from trserve.router_convert.options import convert_router_command
from trserve.training.options import train_router_command


class _Parsed(click.ParamType[Any]):
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


def _launch_options() -> list[click.Parameter]:
    return [_option(setting) for group in GROUPS.values() for setting in fields(group)]


_REPEATABLE = [
    setting.name
    for group in GROUPS.values()
    for setting in fields(group)
    if setting.metadata["multiple"]
]


def _merge_repeated(values: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in values.items() if value is not None and value != ()}
    for name in _REPEATABLE:
        if texts := given.get(name):
            given[name] = tuple(part for flag in texts for part in flag)
    return given


def _launch(**values: Any) -> None:
    from trserve.launch import launch

    try:
        code = launch(config_from_flags(_merge_repeated(values)))
    except StartupError as error:
        click.echo(f"trserve: {error}", err=True)
        code = error.exit_code
    sys.exit(code)


def _launch_command(name: str, *, hidden: bool = False) -> click.Command:
    return click.Command(
        name,
        params=_launch_options(),
        callback=_launch,
        help="Start a server and run it in the foreground.\n\nPrints one line on standard output "
        "once every model can serve. Ctrl-C drains it, a second Ctrl-C forces it.",
        short_help="Start a server.",
        hidden=hidden,
    )


def _trace(**values: Any) -> None:
    from trserve.trace.command import trace

    try:
        click.echo(trace(**values), err=True)
    except StartupError as error:
        click.echo(f"trserve: {error}", err=True)
        sys.exit(error.exit_code)


def _trace_command() -> click.Command:
    output = click.Path(dir_okay=False, path_type=Path)
    return click.Command(
        "trace",
        params=[
            click.Option(["-o", "--output"], required=True, type=output, help="The file to write."),
            click.Option(
                ["--seconds"],
                default=5.0,
                type=click.FloatRange(min=0, min_open=True),
                help="How long to watch.",
                show_default=True,
            ),
            click.Option(["--pid"], type=int, help="The server whose launcher this is."),
            click.Option(["--port"], type=int, help="The server that listens there."),
        ],
        callback=_trace,
        help="Watch a running server and write its steps and handoffs as a Trace Event file, "
        "to be opened in Perfetto.\n\nThe server is the one of this user that runs; with "
        "several, name one by --pid or --port. It need not be told: its processes always note "
        "what they do.",
        short_help="Write a running server's steps and handoffs for Perfetto.",
    )


def _keys_command() -> click.Group:
    def new() -> None:
        from trserve.keys import new_key

        click.echo(new_key())

    group = click.Group("keys", help="Keys for `trserve launch --api-key` and `--admin-key`.")
    group.add_command(
        click.Command(
            "new",
            callback=new,
            help="Print a fresh key; it is stored nowhere.\n\nKeep it in a file that only you can "
            "read, and start the server with --api-key @FILE.",
            short_help="Print a fresh key.",
        )
    )
    return group


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="trserve")
def main() -> None:
    """Several language models write each answer together, behind one OpenAI-compatible endpoint."""


main.add_command(_launch_command("launch"))
main.add_command(_launch_command("serve", hidden=True))
main.add_command(_trace_command())
main.add_command(plan_command())
main.add_command(router_command())
main.add_command(convert_router_command())
main.add_command(calibrate_command())
main.add_command(train_router_command())
main.add_command(_keys_command())
