"""The flags of ``bench.serve`` and its help, where the definitions stand. Checks no values."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.common import parser
from bench.serve_metrics import LIMITED
from bench.serve_target import CHAT, COMPLETIONS
from bench.serve_traces import KINDS

DEFAULT_INPUT: Final = 128
DEFAULT_OUTPUT: Final = 64

DESCRIPTION: Final = """\
Load on any OpenAI-compatible endpoint, measured from the client.

TTFT: from sending a request to its first event with text. ITL: the time between two such events,
of all answers together; itl_token shares it among the tokens of an event. E2E: from sending to the
last event of the answer. TPOT: (E2E - TTFT) / (n - 1) for an answer of n tokens, as the server
counts them. Goodput: answers a second that keep to every limit. A failed answer, one whose stream
holds an error or ends without [DONE] included, is in no latency; if any failed, the exit code is
1, unless an assertion is about failed or failed_share."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags."""
    made = parser("serve", DESCRIPTION)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    _add_target(made.add_argument_group("what is measured"))
    _add_load(made.add_argument_group("load"))
    _add_workload(made.add_argument_group("what is asked"))
    _add_output(made.add_argument_group("what is made of it"))
    return made.parse_args(argv)


def _add_target(group: Any) -> None:
    group.add_argument("--url", help="of a running endpoint, as http://127.0.0.1:8000")
    group.add_argument(
        "--launch", metavar="ARGS", help='start `trserve launch ARGS`, as --launch="--models 1b,8b"'
    )
    group.add_argument("--model", help="its name [default: the first of /v1/models]")
    group.add_argument(
        "--endpoint", choices=(CHAT, COMPLETIONS), help="[default: what fits the prompts]"
    )
    group.add_argument(
        "--key-env",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="variable that holds the key [default: OPENAI_API_KEY]",
    )
    group.add_argument(
        "--extra-body", metavar="JSON", help="members for every body; null leaves one out"
    )
    group.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="for an answer [600]"
    )
    group.add_argument("--label", help="the row's system [default: trserve, or endpoint]")
    group.add_argument(
        "--count-tokens",
        action="store_true",
        help="ask for the usage in every event, so that itl_token is exact",
    )


def _add_load(group: Any) -> None:
    group.add_argument(
        "--concurrency",
        metavar="N,N",
        help="closed loop: so many users, a row each [default: 1]; with arrivals: at most so many",
    )
    group.add_argument(
        "--request-rate", metavar="R,R", help="open loop: requests a second, a row for each"
    )
    group.add_argument(
        "--arrivals",
        choices=("poisson", "constant"),
        default="poisson",
        help="[default: poisson]",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="shape of the Gamma distribution of gaps: below 1 they come in bursts [default: 1]",
    )
    group.add_argument("--num-prompts", type=int, metavar="N", help="requests of a row")
    group.add_argument("--duration", type=float, metavar="S", help="no new requests after that")
    group.add_argument("--warm-up", type=int, default=0, metavar="N", help="uncounted requests")
    group.add_argument("--seed", type=int, default=0, help="of prompts and arrivals")


def _add_workload(group: Any) -> None:
    group.add_argument(
        "--input-len", type=int, metavar="TOKENS", help=f"[default: {DEFAULT_INPUT}]"
    )
    group.add_argument(
        "--output-len", type=int, metavar="TOKENS", help=f"[default: {DEFAULT_OUTPUT}]"
    )
    group.add_argument(
        "--length-spread", type=float, default=0.0, metavar="SHARE", help="0.5: half to 1.5 times"
    )
    group.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="ShareGPT JSON (an answer's length is its letters / 4), or JSON lines with prompt, "
        "messages or question, and output_len",
    )
    group.add_argument("--trace", choices=KINDS, help="replay recorded traffic")
    group.add_argument("--trace-file", type=Path, metavar="FILE")
    group.add_argument("--speed-up", type=float, default=1.0, help="factor on recorded arrivals")
    group.add_argument("--scale", type=float, default=1.0, help="factor on recorded lengths")
    group.add_argument(
        "--longest", type=int, metavar="TOKENS", help="leave longer recorded requests out"
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="answers of exactly their length, where a server can [default: where it is known]",
    )


def _add_output(group: Any) -> None:
    group.add_argument("--csv", type=Path, metavar="FILE", help="write the rows there")
    group.add_argument("--markdown", type=Path, metavar="FILE", help="write a table there")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help=f"of {', '.join(LIMITED)}"
    )
    group.add_argument(
        "--assert",
        dest="assertions",
        action="append",
        default=[],
        metavar="EXPR",
        help='as "p99_itl_ms<50", of every row; may be repeated; exit code 1 if one does not hold',
    )
