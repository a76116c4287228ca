"""The flags of ``trserve export-onnx``. Imports nothing but click."""

from __future__ import annotations

from pathlib import Path

import click

from trserve.exits import one_line_errors

_HELP = """Write a model as graphs for ONNX Runtime, for `--device onnx` and `trserve edge`.

\b
    trserve export-onnx --model 0.6b -o qwen-onnx
    trserve edge --model qwen-onnx --cloud HOST:PORT

DIR gets the graphs (model.onnx and the head alone), their weights, and the configuration and
tokenizer of the model: it is a model's path from then on. Before it counts as one, logits, hidden
states and taps are compared with torch's, and more than 1e-3 in float32 is refused. That takes the
memory of two models.
"""


def _export(name: str, out: Path, int8: bool) -> None:
    from trserve.edge.onnx.command import export_onnx

    with one_line_errors():
        for line in export_onnx(name, out, int8=int8):
            click.echo(line)


def export_onnx_command() -> click.Command:
    """The command, for the command line to register."""
    return click.Command(
        "export-onnx",
        params=[
            click.Option(
                ["--model", "name"],
                required=True,
                metavar="PATH|ALIAS",
                help="As `--models` takes it: alias, hub id in the local cache, or path.",
            ),
            click.Option(
                ["-o", "--out"],
                required=True,
                type=click.Path(file_okay=False, path_type=Path),
                metavar="DIR",
                help="An empty or new directory.",
            ),
            click.Option(
                ["--int8"],
                is_flag=True,
                help="Weights of the projections in 8 bits, a scale for every 32 inputs, and "
                "activations rounded alike: half the time a token, less exact.",
            ),
        ],
        callback=_export,
        help=_HELP,
        short_help="Write a model for ONNX Runtime.",
    )
