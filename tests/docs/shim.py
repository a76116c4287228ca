"""The ``trserve`` that snippets of the documents find: the real one, on the test's server.

``launch`` comes back: its settings are resolved by ``config show``, and with TRSERVE_FULL=1 the
server is started, waited for and stopped. Commands that ask a server at its usual address are
given the address of the tests' one, and `doctor` looks at no port, which others may have taken.
All else is passed on as it is.
"""

from __future__ import annotations

import os
import sys

from tests.serverproc import Server
from trserve.cli import main

URL = "DOCS_URL"


def _launch(arguments: list[str]) -> None:
    with Server([*arguments, "--port", "0"], env=_settings()) as running:
        code = running.stop()
    sys.exit(code)


def _settings() -> dict[str, str]:
    """The variables that a snippet set; the tests' own are gone by now."""
    return {name: value for name, value in os.environ.items() if name.startswith("TRSERVE_")}


def _passed_on(arguments: list[str]) -> list[str]:
    if arguments[:1] == ["launch"]:
        return ["config", "show", *arguments[1:]]
    if arguments[:1] in (["chat"], ["top"]) and "--url" not in arguments:
        return [*arguments, "--url", os.environ[URL]]
    if arguments[:1] == ["doctor"] and "--port" not in arguments:
        return [*arguments, "--port", "0"]
    return arguments


if __name__ == "__main__":
    given = sys.argv[1:]
    if given[:1] == ["launch"] and os.environ.get("DOCS_FULL"):
        _launch(given[1:])
    main(_passed_on(given), prog_name="trserve")
