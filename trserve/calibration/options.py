"""The flags of ``trserve calibrate``. Knows nothing of what they mean; imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trserve.config_values import parse_counts
from trserve.exits import one_line_errors
from trserve.router_check.options import router_options

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

_HELP = """Find the router's threshold for a share of tokens from other models than the first.

\b
    trserve calibrate --router r-stitch --target-share 0.07
    trserve calibrate --router r2r --router-config checkpoint=DIR --models A,B \\
        --target-share 0.1 --prompts prompts.jsonl

The threshold is the router's first number that a request may set. Every trial answers half of the
prompts with the real router, because routing changes the text; what is found is verified on the
other half, and printed with its standard error. Prompts: a user's message a line; or *.jsonl with
{"messages": [...]} or {"prompt": text} a line; by default, for the embedded pair, problems of its
own.
"""


def _threads(
    context: click.Context, option: click.Parameter, given: str | None
) -> tuple[int, ...] | None:
    try:
        return None if given is None else parse_counts(given)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from None


def _flag(name: str, help: str, **more: Any) -> click.Option:
    return click.Option([name], help=help, show_default="default" in more, **more)


def _parameters() -> list[click.Parameter]:
    share = click.FloatRange(0, 1, min_open=True, max_open=True)
    return [
        _flag("--router", "Which router, as for launch.", required=True),
        *router_options(),
        _flag("--target-share", "Wanted: 0.07 for 7 % of all tokens.", required=True, type=share),
        _flag("--prompts", "A file of prompts.", type=_FILE),
        _flag("--max-tokens", "Longest answer.", default=160, type=click.IntRange(min=1)),
        _flag(
            "--temperature",
            "As the requests will have it; 0 is greedy.",
            default=0.0,
            type=click.FloatRange(min=0),
        ),
        _flag("--json", "Print JSON.", is_flag=True),
        _flag(
            "--dtype",
            "Precision of the models, as for launch.",
            default="auto",
            type=click.Choice(["auto", "float32", "bfloat16"]),
        ),
        _flag(
            "--quantization",
            "Of their weights, as for launch.",
            default="none",
            type=click.Choice(["none", "int8"]),
        ),
        click.Option(
            ["--threads"], callback=_threads, metavar="1,1", help="CPU threads, one number a model."
        ),
    ]


def _calibrate(
    target_share: float,
    max_tokens: int,
    temperature: float,
    prompts: Path | None,
    models: tuple[str, ...],
    router: str,
    router_config: dict[str, str],
    json: bool,
    threads: tuple[int, ...] | None,
    **settings: Any,
) -> None:
    from trserve.calibration.command import Request, calibrate
    from trserve.calibration.runs import Sampling

    if threads is not None:
        settings["threads"] = threads
    request = Request(
        target_share,
        Sampling(max_tokens, temperature),
        prompts,
        models,
        router,
        router_config,
        settings,
    )
    with one_line_errors():
        calibrate(request, as_json=json)


def calibrate_command() -> click.Command:
    """The command, for the command line to register."""
    return click.Command(
        "calibrate",
        params=_parameters(),
        callback=_calibrate,
        help=_HELP,
        short_help="Find the threshold for a share of the large model's tokens.",
    )
