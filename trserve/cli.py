"""The command line. Declares commands and flags; everything heavy is imported inside a command.

Flags of ``trserve launch`` are made from the configuration tree (``trserve/launch_options.py``).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import click

from trserve import __version__
from trserve.calibration.options import calibrate_command
from trserve.completion import completion_command
from trserve.config_show import config_command
from trserve.doctor.options import doctor_command
from trserve.edge.keys_command import edge_command
from trserve.edge.onnx.options import export_onnx_command
from trserve.edge.options import edge_device_command
from trserve.exits import one_line_errors
from trserve.launch_options import TopicsCommand, launch_options, settings_of
from trserve.launch_scripts import ForeignFlagError, translate
from trserve.planning.options import plan_command
from trserve.router_check.options import router_command
from trserve.router_convert.options import convert_router_command
from trserve.terminal.options import chat_command, top_command
from trserve.training.options import train_router_command


def _launch(**values: Any) -> None:
    from trserve.launch import launch

    with one_line_errors():
        settings = settings_of(values)
        for note in settings.notes:
            click.echo(f"trserve: {note}", err=True)
        config = settings.config()
        with settings.blame():
            code = launch(config)
    sys.exit(code)


class _LaunchCommand(TopicsCommand):
    """A launch that understands launch scripts of other servers."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The words after the command's name."""
        from trserve.models.aliases import ALIASES

        try:
            return super().parse_args(ctx, translate(args, ALIASES))
        except ForeignFlagError as error:
            raise click.UsageError(str(error), ctx) from None


def _launch_command(name: str, *, hidden: bool = False) -> click.Command:
    return _LaunchCommand(
        name,
        params=launch_options(),
        callback=_launch,
        help="Start a server and run it in the foreground.\n\nPrints one line on standard output "
        "once every model can serve. Ctrl-C drains it, a second Ctrl-C forces it.",
        short_help="Start a server.",
        hidden=hidden,
    )


def _trace(**values: Any) -> None:
    from trserve.trace.command import trace

    with one_line_errors():
        click.echo(trace(**values), err=True)


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

    group = click.Group("keys", help="Keys for --api-key, --admin-key and --edge-keys.")
    group.add_command(
        click.Command(
            "new",
            callback=new,
            help="Print a fresh key; it is stored nowhere.\n\nKeep it in a file that only you can "
            "read, and start the server with --api-key @FILE.",
            short_help="Print a fresh key.",
        )
    )
    group.add_command(edge_command())
    return group


class _Purposes(click.Group):
    """The commands, below what they are for."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One section a purpose; every command is in one."""
        for purpose, commands in PURPOSES.items():
            with formatter.section(purpose):
                formatter.write_dl([(c.name or "", c.get_short_help_str(80)) for c in commands])


@click.group(
    cls=_Purposes,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="trserve")
def main() -> None:
    """Several language models write each answer together, behind one OpenAI-compatible endpoint."""


PURPOSES: Final[dict[str, list[click.Command]]] = {
    "Serve": [_launch_command("launch"), config_command(), doctor_command(), _keys_command()],
    "Use and watch a server that runs": [chat_command(), top_command(), _trace_command()],
    "Routers": [
        router_command(),
        calibrate_command(),
        train_router_command(),
        convert_router_command(),
    ],
    "Scheduling": [plan_command()],
    "Other hosts": [edge_device_command(), export_onnx_command()],
    "This command": [completion_command()],
}
"""The commands that the help shows, by what they are for."""

for _commands in PURPOSES.values():
    for _command in _commands:
        main.add_command(_command)
main.add_command(_launch_command("serve", hidden=True))
