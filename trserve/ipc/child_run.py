"""A child's loop from its beginning to its end, and what the launcher is told of that end.

Knows errors and exit codes; nothing of what a loop does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from trserve.errors import EXIT_OK, EXIT_UNAVAILABLE, EXIT_WORKER_LOST, StartupError
from trserve.ipc.control import ControlClient

log = logging.getLogger(__name__)
_LINGER_MS: Final = 1000


def run_child(control: ControlClient, title: str, prepare: Callable[[], Callable[[], None]]) -> int:
    """Prepare, run, leave; returns the exit code.

    Args:
        title: what to call the process in its log.
        prepare: returns the loop's ``run``; an error before that is one of starting.
    """
    exit_on_error = EXIT_UNAVAILABLE
    try:
        run = prepare()
        exit_on_error = EXIT_WORKER_LOST
        run()
    except StartupError as error:
        return fail(control, str(error), error.exit_code)
    except Exception as error:
        log.exception("%s cannot go on", title)
        return fail(control, f"{type(error).__name__}: {error}", exit_on_error)
    control.close()
    return EXIT_OK


def fail(control: ControlClient, message: str, exit_code: int) -> int:
    """Tell the launcher why this process ends; returns ``exit_code``."""
    control.send({"type": "failed", "message": message, "exit_code": exit_code})
    # The launcher reads the message before it reaps this process; give the socket its time.
    control.close(linger_ms=_LINGER_MS)
    return exit_code
