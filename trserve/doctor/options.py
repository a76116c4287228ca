"""The flags of ``trserve doctor``: those of a launch, and ``--json``. Imports nothing heavy."""

from __future__ import annotations

from typing import Any

import click

from trserve.exits import one_line_errors
from trserve.launch_options import TopicsCommand, launch_options

_HELP = """Find what would keep a server from starting or serving well here.

Takes the flags of `trserve launch`, so that it looks at that server: its models, ports and limits.
Starts nothing. Each finding says what there is, which parameter decides it and what to do. The exit
code is 0 where all is well, 1 with warnings, 2 with faults.

\b
    trserve doctor
    trserve doctor --models 0.6b,32b --port 8100 --json
"""


def _doctor(json: bool, **values: Any) -> None:
    from trserve.doctor.command import doctor

    with one_line_errors():
        code = doctor(values, as_json=json)
    raise SystemExit(code)


def doctor_command() -> click.Command:
    """The command, for the command line to register."""
    as_json = click.Option(["--json"], is_flag=True, help="Print JSON.")
    return TopicsCommand(
        "doctor",
        params=[as_json, *launch_options()],
        callback=_doctor,
        help=_HELP,
        short_help="Find what would keep a server from starting or serving well.",
    )
