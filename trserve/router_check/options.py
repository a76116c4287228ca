"""The flags of ``trserve router``. Knows nothing of what they mean; imports nothing heavy."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import click

from trserve.config_values import parse_assignments, parse_names
from trserve.exits import one_line_errors

_CHECK_HELP = """Run the contract of all routers against one, in this process, in a few seconds.

\b
    trserve router check mymodule:MyRouter --router-config threshold=0.4
    trserve router check r2r --router-config checkpoint=DIR

On the embedded pair, or on --models (for a learned router: those that it was trained for), eight
requests are answered alone, together, again, with all workers replaced in between, with further
stop ids and with router parameters of their own. One line a check: ok, or FAIL with the first thing
that is wrong. The exit code is 1 if anything is.
"""


def _assignments(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> dict[str, str]:
    try:
        return {name: value for text in given for name, value in parse_assignments(text)}
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from None


def _names(context: click.Context, option: click.Parameter, given: str) -> tuple[str, ...]:
    try:
        return parse_names(given)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from None


def router_options() -> list[click.Parameter]:
    """``--router-config`` and ``--models``, for any command about a router."""
    return [
        click.Option(
            ["--router-config"],
            multiple=True,
            callback=_assignments,
            metavar="K=V,...",
            help="Router parameters; may be repeated.",
        ),
        click.Option(
            ["--models"],
            default="tiny,small",
            callback=_names,
            metavar="A,B",
            help="Models, the entry model first.  [default: the embedded pair, tiny,small]",
        ),
    ]


def _check(router: str, router_config: dict[str, str], models: tuple[str, ...]) -> None:
    # Before torch is imported: the models are too small for more threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from trserve.errors import StartupError
    from trserve.router_check.command import check

    # What fails is printed once, as the line of its check.
    logger = logging.getLogger("trserve")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        code = check(router, router_config, models)
    except StartupError as error:
        click.echo(f"FAIL  start       {error}", err=True)
        code = 1
    finally:
        logger.setLevel(before)
    raise SystemExit(code)


def _new(name: str, folder: Path) -> None:
    from trserve.router_check.command import new

    with one_line_errors():
        new(name, folder)


def _new_command() -> click.Command:
    folder = click.Path(file_okay=False, path_type=Path)
    return click.Command(
        "new",
        params=[
            click.Argument(["name"]),
            click.Option(
                ["--dir", "folder"],
                type=folder,
                default=Path(),
                show_default="here",
                help="Folder for the files.",
            ),
        ],
        callback=_new,
        help="Write NAME.py, a router to begin with, and test_NAME.py, its test.\n\nThe router is "
        "R-Stitch in about 15 lines, with comments; files that are there stay as they are.",
        short_help="Write a router to begin with, and its test.",
    )


def _check_command() -> click.Command:
    params: list[Any] = [click.Argument(["router"]), *router_options()]
    return click.Command(
        "check",
        params=params,
        callback=_check,
        help=_CHECK_HELP,
        short_help="Run the contract of all routers against one.",
    )


def router_command() -> click.Group:
    """The group, for the command line to register."""
    group = click.Group("router", help="Begin a router of your own, or check one.")
    group.add_command(_new_command())
    group.add_command(_check_command())
    return group
