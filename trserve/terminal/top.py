"""``trserve top``: a server's models, routing and requests, anew every second.

Follows the server's stream of statistics in a thread, so that a key is heard while the server is
silent. Knows what keys do, not how a look is drawn.
"""

from __future__ import annotations

import os
import sys
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, Final

import click
import orjson
from rich.console import Console
from rich.live import Live
from rich.text import Text

from trserve.terminal.client import Client, ServerError
from trserve.terminal.top_view import HELP, KEYS, view
from trserve.waiting import wait_readable

ABOUT: Final = "/v1/trserve/about"
STATS: Final = "/v1/trserve/stats/stream"
_SILENCE_S: Final = 10.0
_RETRY_S: Final = 1.0
_ABOUT_S: Final = 10.0
"""An administrator may move a parameter; each time it is asked for is a line in the log."""

_POLL_S: Final = 0.1
_RATES: Final = 40


def top(client: Client, *, once: bool, as_json: bool) -> int:
    """Show the server until q, Ctrl-C or Ctrl-D; returns the exit code.

    With ``once``, ``as_json``, or where there is no terminal: one look, over the server's usual
    interval, and no screen. Raises ServerError then.
    """
    if once or as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        _show_once(client, as_json=as_json)
        return 0
    with suppress(KeyboardInterrupt):
        _Screen(client).run()
    return 0


def _show_once(client: Client, *, as_json: bool) -> None:
    about = client.get(ABOUT)
    # The first event is from the beginning of an interval, and says little or nothing.
    looks = client.events("GET", STATS, None, _SILENCE_S)
    with closing(looks):
        stats = next((look for look in looks if look.get("interval_s")), None)
    if stats is None:
        raise ServerError(f"{client.url}: the statistics ended before they began")
    if as_json:
        click.echo(orjson.dumps({"schema_version": 1, "about": about, "stats": stats}))
        return
    Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(
        view(about, stats, [], f"{client.url}, {stats['interval_s']:.1f} s")
    )


class _Follower(threading.Thread):
    """Keeps the newest of the server's words; begins again where the server went away."""

    def __init__(self, client: Client) -> None:
        super().__init__(daemon=True)
        self._client = client
        self.about: dict[str, Any] = {}
        self.stats: dict[str, Any] = {}
        self.problem = "connecting"
        self.rates: deque[float] = deque(maxlen=_RATES)
        self.count = 0

    def run(self) -> None:
        """Follow for as long as the program lives."""
        while True:
            try:
                self._follow()
                self.problem = "the server has ended the statistics"
            except ServerError as error:
                self.problem = str(error)
            self.count += 1
            time.sleep(_RETRY_S)

    def _follow(self) -> None:
        self.about, asked = self._client.get(ABOUT), time.monotonic()
        for stats in self._client.events("GET", STATS, None, _SILENCE_S):
            self.problem = ""
            if "interval_s" not in stats:
                continue  # who comes second hears of the phase alone at first
            self.stats = stats
            if stats["interval_s"]:
                self.rates.append(stats["tokens_per_s"])
            self.count += 1
            if time.monotonic() - asked >= _ABOUT_S:
                self.about, asked = self._client.get(ABOUT), time.monotonic()


class _Screen:
    """The loop of keys and looks."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._follower = _Follower(client)
        self._paused = False
        self._helps = False

    def run(self) -> None:
        """Until somebody wants no more."""
        self._follower.start()
        shown = -1
        with _keys() as keys, Live(screen=True, auto_refresh=False, redirect_stderr=False) as live:
            live.update(self._content(), refresh=True)
            while True:
                key = _pressed(keys)
                if key in ("q", "\x04"):
                    return
                self._paused ^= key in ("p", " ")
                self._helps ^= key in ("?", "h")
                if key or (self._follower.count != shown and not self._paused):
                    shown = self._follower.count
                    live.update(self._content(), refresh=True)

    def _content(self) -> Any:
        follower = self._follower
        if follower.problem or not follower.stats:
            problem = f"{follower.problem}; trying again" if follower.problem else "connected"
            return Text(f"{self._client.url}: {problem}\n\n{KEYS}")
        state = "  PAUSED" if self._paused else ""
        footer = f"{self._client.url}{state}   {KEYS}"
        rates = list(follower.rates)
        if self._helps:
            footer = f"{HELP}\n{footer}"
        return view(follower.about, follower.stats, rates, footer)


@contextmanager
def _keys() -> Iterator[int]:
    """Standard input, a key at a time and unechoed; as it was afterwards."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _pressed(fd: int) -> str:
    """The key that was pressed within a moment, or nothing; the end of input is Ctrl-D."""
    if not wait_readable(fd, _POLL_S):
        return ""
    return os.read(fd, 1).decode(errors="replace") or "\x04"
