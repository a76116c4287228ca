"""The flags of ``trserve convert-router``. Imports nothing but click."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trserve.exits import one_line_errors

_HELP = """Convert an official router checkpoint to safetensors and JSON.

\b
    trserve convert-router default_router.pt -o my-router
    trserve convert-router mlp_iter_1234.pth -o citer.safetensors --threshold 0.9
    trserve convert-router CO_LLM_FOLDER -o my-router

FILE_OR_DIR is R2R's .pt (or a folder with one), CITER's .pth (its BatchNorm is folded), a Co-LLM
model's folder, or a file with its deferral vector alone. OUT is a .safetensors file, beside which
a .json of the same name is written, or a folder; `--router-config checkpoint=OUT` takes either. A
file that only running code could read is refused.
"""


def _convert(
    source: Path, out: Path, router: str | None, threshold: float | None, keep_embedding: bool
) -> None:
    from trserve.router_convert.convert import convert, write

    with one_line_errors():
        found = convert(source, router, keep_embedding=keep_embedding)
        file = write(found, out, threshold)
    if threshold is not None and found.threshold not in (None, threshold):
        click.echo(f"threshold {threshold:g} overrides {found.threshold:g} of {source}", err=True)
    click.echo(f"wrote {file}: {_described(found, threshold)}")
    click.echo(f"trserve launch --router {found.router} --router-config checkpoint={out}")


def _described(found: Any, threshold: float | None) -> str:
    parts = [found.router]
    if "model_type" in found.facts:
        parts.append(found.facts["model_type"])
    if (hidden := found.facts["hidden_size"]) is not None:
        parts.append(f"hidden size {hidden}")
    parts.append(f"{found.num_parameters:,} parameters")
    stored = found.threshold if threshold is None else threshold
    parts.append("no threshold" if stored is None else f"threshold {stored:g}")
    return ", ".join(parts)


def convert_router_command() -> click.Command:
    """The command, for the command line to register."""
    return click.Command(
        "convert-router",
        params=[
            click.Argument(["source"], metavar="FILE_OR_DIR", type=click.Path(path_type=Path)),
            click.Option(
                ["-o", "--out"],
                required=True,
                type=click.Path(path_type=Path),
                metavar="OUT",
                help="What to write; nothing that is there is overwritten.",
            ),
            click.Option(
                ["--router"],
                type=click.Choice(["r2r", "citer", "confidence", "co-llm"]),
                help="Whose layout it is.  [default: told from what is there]",
            ),
            click.Option(
                ["--threshold"],
                type=click.FloatRange(0, 1),
                help="Store this one, as `trserve calibrate` found it say.",
            ),
            click.Option(
                ["--keep-embedding/--drop-embedding"],
                default=True,
                help="Whether R2R's *_all.pt keeps its token embedding; without it, the served "
                "model's is used.",
            ),
        ],
        callback=_convert,
        help=_HELP,
        short_help="Convert an official router checkpoint to safetensors and JSON.",
    )
