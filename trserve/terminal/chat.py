"""``trserve chat``: the loop of a conversation at a terminal, or of lines from a pipe.

Knows how a piece is shown and what ends what; what is said is the conversation's matter.
"""

from __future__ import annotations

import os
import re
import readline
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Final

from rich.console import Console
from rich.style import Style
from rich.text import Text

from trserve.errors import TrserveError
from trserve.terminal.client import Client
from trserve.terminal.commands import known_names, run, summary
from trserve.terminal.conversation import Conversation, Piece, Settings, require_model
from trserve.terminal.top import ABOUT

PROMPT: Final = "> "
# Okabe and Ito's colours, which colour-blind people tell apart; the cue beside each is for
# everybody else who cannot.
_STYLES: Final = (
    Style(color="#56b4e9"),
    Style(color="#e69f00", underline=True),
    Style(color="#009e73", italic=True),
    Style(color="#cc79a7", bold=True),
)
_QUIET: Final = Style(dim=True)
# A model may write what a terminal would obey.
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def chat(client: Client, settings: Settings) -> int:
    """Talk until Ctrl-C, Ctrl-D or the end of input; returns the exit code.

    Raises ServerError where there is no server, or no model as ``settings`` name it.
    """
    conversation = Conversation(client, client.get(ABOUT), settings)
    if settings.only:
        require_model(conversation, settings.only)
    if not sys.stdin.isatty():
        return _Pipe(conversation).run()
    return _Terminal(conversation).run()


class _Pipe:
    """A question a line, answers as plain text on standard output, all else on standard error."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    def run(self) -> int:
        """Until the input ends; 1 if anything was refused."""
        code = 0
        try:
            for line in map(str.strip, sys.stdin):
                if line:
                    code |= self._answer(line)
        except (KeyboardInterrupt, EOFError):
            pass  # an end that was asked for, by Ctrl-C or /quit
        return code

    def _answer(self, line: str) -> int:
        try:
            if line.startswith("/"):
                print(run(self._conversation, line), file=sys.stderr)
                return 0
            with closing(self._conversation.ask(line)) as pieces:
                for piece in pieces:
                    print(shown(piece.text), end="", flush=True)
            print(flush=True)
        except TrserveError as error:
            print(f"trserve: {error}", file=sys.stderr)
            return 1
        return 0


class _Terminal:
    """Prompts with editing and history, and answers in their writers' styles."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ
        self._console = Console(highlight=False, no_color=self._plain)

    def run(self) -> int:
        """Until Ctrl-C at the prompt, Ctrl-D or /quit; the exit code is 0."""
        self._console.print(self._banner())
        _complete(known_names())
        while True:
            try:
                line = input(PROMPT).strip()
                if line:
                    self._do(line)
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return 0

    def _do(self, line: str) -> None:
        try:
            if line.startswith("/"):
                self._tell(run(self._conversation, line))
            else:
                self._answer(line)
        except TrserveError as error:
            self._tell(f"trserve: {error}")

    def _answer(self, question: str) -> None:
        pieces = self._conversation.ask(question)
        try:
            with closing(pieces):
                for piece in pieces:
                    self._show(piece)
        except KeyboardInterrupt:
            self._console.print()
            self._tell("stopped; Ctrl-C once more ends the chat")
            return
        self._console.print()
        if self._conversation.answers:
            self._tell(summary(self._conversation.answers[-1]))

    def _show(self, piece: Piece) -> None:
        style = Style.null() if self._plain else style_of(piece)
        self._console.print(Text(shown(piece.text), style=style), end="", soft_wrap=True)

    def _tell(self, text: str) -> None:
        style = Style.null() if self._plain else _QUIET
        self._console.print(Text(shown(text), style=style), soft_wrap=True)

    def _banner(self) -> Text:
        about = self._conversation.about
        banner = Text(f"trserve {about['version']}, router {about['router']['name']}: ")
        for index, name in enumerate(self._conversation.models):
            banner.append(", " if index else "")
            style = Style.null() if self._plain else style_of(Piece(name, index))
            banner.append(name, style=style)
        return banner.append("\n/help lists commands; Ctrl-D ends")


def style_of(piece: Piece) -> Style:
    """The style of the model that wrote it; thoughts are dim besides."""
    style = Style.null() if piece.model is None else _STYLES[piece.model % len(_STYLES)]
    return style + _QUIET if piece.thought else style


def shown(text: str) -> str:
    """``text`` without what a terminal would take for orders."""
    return _CONTROLS.sub("�", text)


def _complete(words: Sequence[str]) -> None:
    """Have the tab key complete ``words`` at the beginning of a line."""

    def found(text: str, state: int) -> str | None:
        return dict(enumerate(word for word in words if word.startswith(text))).get(state)

    readline.set_completer(found)
    readline.set_completer_delims(" ")
    readline.parse_and_bind("tab: complete")
