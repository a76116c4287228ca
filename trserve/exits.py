"""From an error to one line and an exit code, for every command. Knows no command; imports click.

What is no :class:`TrserveError` is a bug and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click

from trserve.errors import StartupError, TrserveError

_OTHERS: Final = 1


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print an error that a user can meet on standard error, and exit with its code, else 1."""
    try:
        yield
    except TrserveError as error:
        click.echo(f"trserve: {error}", err=True)
        code = error.exit_code if isinstance(error, StartupError) else _OTHERS
        raise SystemExit(code) from None
