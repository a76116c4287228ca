"""The flags of ``trserve train-router``. Knows nothing of what they mean; imports only click."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trserve.exits import one_line_errors

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(file_okay=False, path_type=Path)

_HELP = """Train a router for a pair of models.

Runs both models through the engine on the prompts, trains on what they said at the same prefixes,
and writes a checkpoint that `trserve launch --router NAME` loads, with a report: precision and
recall on held-out prompts over the threshold.

\b
    trserve train-router --router r2r --models tiny,small --prompts prompts.txt --out my-router
    trserve launch --router r2r --router-config checkpoint=my-router

Prompts: a user's message a line; or *.jsonl with {"messages": [...]} or {"prompt": text}, and
optionally {"answer": text}, the right one, a line. The same seed gives the same file.
"""


def _flag(name: str, help: str, **more: Any) -> click.Option:
    return click.Option([name], help=help, show_default="default" in more, **more)


def _parameters() -> list[click.Parameter]:
    share = click.FloatRange(0, 1, min_open=True, max_open=True)
    return [
        _flag(
            "--router",
            "Which router.",
            required=True,
            type=click.Choice(["r2r", "citer", "co-llm", "confidence"]),
        ),
        _flag("--models", "The small model and the large one.", default="tiny,small"),
        _flag("--prompts", "A file of prompts.", required=True, type=_FILE),
        _flag("--out", "A folder for the checkpoint and its report.", required=True, type=_FOLDER),
        _flag("--steps", "Steps of gradient descent.", default=3000, type=click.IntRange(min=1)),
        _flag("--seed", "Of the held-out split, the weights and the batches.", default=0),
        _flag("--max-tokens", "Longest answer.", default=256, type=click.IntRange(min=1)),
        _flag(
            "--held-out", "Share of the prompts that is only measured on.", default=0.1, type=share
        ),
        _flag("--recall", "Of the threshold to begin with.", default=0.95, type=share),
        _flag(
            "--hidden-dims",
            "Widths of R2R's blocks; the paper's are six times 1024.",
            default="128,128",
            metavar="D,...",
        ),
        _flag("--expansion", "Of R2R's blocks.", default=4, type=click.IntRange(min=1)),
        _flag(
            "--neutral/--no-neutral",
            "R2R: count a difference only where the answer comes to another result.",
            default=True,
        ),
        _flag(
            "--dtype",
            "Precision of the models, as for launch.",
            default="auto",
            type=click.Choice(["auto", "float32", "bfloat16"]),
        ),
    ]


def _train_router(**values: Any) -> None:
    from trserve.training.command import train_router

    with one_line_errors():
        train_router(**values)


def train_router_command() -> click.Command:
    """The command, for the command line to register."""
    return click.Command(
        "train-router",
        params=_parameters(),
        callback=_train_router,
        help=_HELP,
        short_help="Train a router for a pair of models.",
    )
