"""``trserve router new`` and ``trserve router check``: what they print, and how they end.

Knows no contract; see ``checks``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from trserve.router_check.template import write_router

_MARKS: Final = {True: "ok  ", False: "FAIL", None: "-   "}
_WIDTH: Final = 11


def new(name: str, folder: Path) -> None:
    """Write the files and say how to go on. Raises ConfigError."""
    for file in write_router(name, folder):
        click.echo(f"wrote {file}")
    click.echo(f"next: pytest {folder / f'test_{name}.py'}")


def check(router: str, config: Mapping[str, Any], models: Sequence[str]) -> int:
    """Print one line a check; returns the exit code. Raises StartupError."""
    from trserve.router_check.checks import check_router

    checks = check_router(router, config, models)
    for each in checks:
        click.echo(f"{_MARKS[each.passed]}  {each.name:{_WIDTH}} {each.detail}")
    failed = [each.name for each in checks if each.passed is False]
    if failed:
        click.echo(f"{router}: {', '.join(failed)} failed", err=True)
    return 1 if failed else 0
