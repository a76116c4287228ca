"""The flags of ``trserve edge``: those of ``launch`` with other defaults. Imports nothing heavy."""

from __future__ import annotations

import re
import sys
from typing import Any, Final

import click

from trserve.exits import one_line_errors
from trserve.launch_options import TopicsCommand, launch_options, settings_of

DEFAULTS: Final[dict[str, Any]] = {
    "device": "onnx",
    "router": "confidence",
    "on_peer_loss": "degrade",
    "max_model_len": 4096,
}
"""What is another default here than for ``launch``."""

_OWN: Final = frozenset({"models", "edge_keys", "edge_listen", "edge_sessions"})
"""Settings of ``launch`` that have a flag of their own here, or none."""

_NOTES: Final = {
    "router": "confidence, where there is a checkpoint; else entropy",
    "max_model_len": "4096, or what the model has if that is less",
}
_DEFAULT: Final = re.compile(r"\s*\[default: .*\]$", re.DOTALL)

_HELP: Final = """Serve a small model here, whose hard tokens a large one elsewhere writes.

\b
    trserve edge --model 0.6b --cloud 10.0.0.2:9000 --keys edge.keys
    trserve edge --model qwen-onnx --cloud openai:http://10.0.0.2:8000/v1

The small model runs on ONNX Runtime; one that was not exported is exported first, once. The other
side of HOST:PORT is `trserve launch --edge-listen`; openai:URL is vLLM or SGLang, one HTTP call a
visit, which is slower. When the network goes, the answer goes on alone, its tokens are marked, and
the cloud is used again when it can be. Endpoint, page and further flags are those of `trserve
launch`, which this is with other defaults.
"""


def _edge(model: str, cloud: str, **values: Any) -> None:
    from trserve.edge.command import edge_settings
    from trserve.launch import launch

    with one_line_errors():
        settings, notes = edge_settings(model, cloud, settings_of(values))
        for note in (*settings.notes, *notes):
            click.echo(f"trserve: {note}", err=True)
        config = settings.config()
        with settings.blame():
            code = launch(config)
    sys.exit(code)


def _with_own_default(option: click.Parameter) -> click.Parameter:
    if isinstance(option, click.Option) and option.name in DEFAULTS:
        text = _NOTES.get(option.name, DEFAULTS[option.name])
        option.help = f"{_DEFAULT.sub('', option.help or '')}  [default: {text}]"
    return option


def edge_device_command() -> click.Command:
    """The command, for the command line to register."""
    own: list[click.Parameter] = [
        click.Option(
            ["--model"],
            required=True,
            metavar="PATH|ALIAS",
            help="The small model: what `trserve export-onnx` wrote, or any model that it takes.",
        ),
        click.Option(
            ["--cloud"],
            required=True,
            metavar="[NAME@]HOST:PORT|openai:URL",
            help="Where the large model is; NAME is what its server calls it.",
        ),
        click.Option(
            ["--keys", "--edge-keys", "edge_keys"],
            metavar="FILE",
            help="For HOST:PORT, the key file of this side (`trserve keys edge`); for openai:URL, "
            "a file with the server's API key, if it wants one.",
        ),
    ]
    others = [_with_own_default(each) for each in launch_options() if each.name not in _OWN]
    return TopicsCommand(
        "edge",
        params=[*own, *others],
        callback=_edge,
        help=_HELP,
        short_help="Serve a small model here with a large one elsewhere.",
    )
