"""Log lines that strangers or a router of theirs cause, at most so many a minute. Knows neither."""

from __future__ import annotations

import logging
from typing import Final

MOST_LINES: Final = 20
EVERY_S: Final = 60.0


class LimitedLog:
    """Passes on up to :data:`MOST_LINES` warnings within :data:`EVERY_S` from the first.

    How many were left out is said before the first line after that.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._ends = 0.0
        self._lines = 0

    def warning(self, now: float, text: str, *args: object, trace: bool = False) -> None:
        """A warning at ``now`` (monotonic seconds), if there is room for it.

        ``trace``: with that of the exception that is handled.
        """
        if now >= self._ends:
            if self._lines > MOST_LINES:
                left_out = self._lines - MOST_LINES
                self._log.warning("%d more lines like those before were left out", left_out)
            self._ends, self._lines = now + EVERY_S, 0
        self._lines += 1
        if self._lines <= MOST_LINES:
            self._log.warning(text, *args, exc_info=trace)
