"""``trserve completion``: what a shell needs to complete commands and flags. Knows no command."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import get_completion_class

_PROGRAM: Final = "trserve"
_VARIABLE: Final = "_TRSERVE_COMPLETE"
_SHELLS: Final = ("bash", "zsh", "fish")
_HELP: Final = """Print what makes a shell complete trserve's commands and flags.

\b
    bash:  eval "$(trserve completion bash)"      in ~/.bashrc
    zsh:   eval "$(trserve completion zsh)"       in ~/.zshrc, after compinit
    fish:  trserve completion fish > ~/.config/fish/completions/trserve.fish
"""


def script(shell: str, root: click.Command) -> str:
    """The script of one of bash, zsh and fish."""
    found = get_completion_class(shell)
    assert found is not None, shell
    # Asks no shell for its version, as source() would: the script may be for another machine.
    complete = found(root, {}, _PROGRAM, _VARIABLE)
    return complete.source_template % complete.source_vars()


def completion_command() -> click.Command:
    """The command, for the command line to register."""

    def show(shell: str) -> None:
        click.echo(script(shell, click.get_current_context().find_root().command))

    return click.Command(
        "completion",
        params=[click.Argument(["shell"], type=click.Choice(_SHELLS))],
        callback=show,
        help=_HELP,
        short_help="Print a shell's completion of commands and flags.",
    )
