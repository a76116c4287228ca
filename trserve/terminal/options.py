"""The flags of ``trserve top`` and ``trserve chat``. Imports nothing heavy."""

from __future__ import annotations

from typing import Any

import click

from trserve.exits import one_line_errors

_TOP = """Watch a running server: its models, its routing and its requests, anew every second.

Keys: q quits, p pauses, ? explains the columns. Where there is no terminal, or with --once, one
look is printed.
"""

_CHAT = """Talk to a running server, and see who writes each token.

Colours and a second cue (underlining, then italics) tell the models apart; NO_COLOR, or an output
that is no terminal, turns both off. /help lists what a line that begins with a slash does. Ctrl-C
stops an answer; at the prompt it ends the chat, as Ctrl-D does.

\b
    trserve chat
    trserve chat --only small --temperature 0
    echo "What is 3 times 4?" | trserve chat
"""


def _server_options() -> list[click.Parameter]:
    return [
        click.Option(
            ["--url"],
            default="http://127.0.0.1:8000",
            show_default=True,
            metavar="URL",
            help="Where the server is.",
        ),
        click.Option(
            ["--api-key"],
            default="",
            metavar="KEY|@FILE",
            help="A key of the server's, if it asks for one. Also TRSERVE_API_KEY.",
        ),
    ]


def _client(url: str, api_key: str) -> Any:
    from trserve.keys import read_api_keys
    from trserve.terminal.client import Client

    keys = read_api_keys((api_key,) if api_key else ())
    return Client(url, keys[0] if keys else None)


def _top(url: str, api_key: str, once: bool, json: bool) -> None:
    from trserve.terminal.top import top

    with one_line_errors():
        code = top(_client(url, api_key), once=once, as_json=json)
    raise SystemExit(code)


def _chat(url: str, api_key: str, **values: Any) -> None:
    from trserve.terminal.chat import chat
    from trserve.terminal.conversation import Settings

    with one_line_errors():
        code = chat(_client(url, api_key), Settings(**values))
    raise SystemExit(code)


def top_command() -> click.Command:
    """The command, for the command line to register."""
    return click.Command(
        "top",
        params=[
            *_server_options(),
            click.Option(["--once"], is_flag=True, help="Print one look and end."),
            click.Option(["--json"], is_flag=True, help="The same as JSON."),
        ],
        callback=_top,
        help=_TOP,
        short_help="Watch a running server's models, routing and requests.",
    )


def chat_command() -> click.Command:
    """The command, for the command line to register."""
    return click.Command(
        "chat",
        params=[
            *_server_options(),
            click.Option(
                ["--model"], metavar="NAME", help="The endpoint's model.  [default: its first]"
            ),
            click.Option(["--system"], default="", metavar="TEXT", help="Said before all else."),
            click.Option(["--max-tokens"], type=click.IntRange(min=1), help="Longest answer."),
            click.Option(["--temperature"], type=click.FloatRange(min=0), help="0 is greedy."),
            click.Option(["--only"], metavar="NAME", help="Have one of the models write all."),
        ],
        callback=_chat,
        help=_CHAT,
        short_help="Talk to a running server, and see who writes each token.",
    )
