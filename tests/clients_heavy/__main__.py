"""Third-party clients that are too large for the tests, unmodified, against a server of this tree.

    python -m tests.clients_heavy [NAME ...]

Each is installed into an environment of its own under .clients/ and driven against one server of
the embedded pair. One line a client: pass, skip or fail, and why; exit status 1 if one failed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.clients_heavy.clients import CLIENTS, Endpoint
from tests.clients_heavy.places import Unavailable
from tests.serverproc import Server

TEMPLATE = Path("tests/clients/tools.jinja")
ARGUMENTS = ("--device", "cpu", "--threads", "1,1", "--chat-template", str(TEMPLATE))
_LONGEST = 300


def verdict(name: str, endpoint: Endpoint) -> tuple[str, str]:
    """``pass``, ``skip`` or ``fail``, and what there is to say."""
    try:
        return "pass", CLIENTS[name][1](endpoint)
    except Unavailable as error:
        return "skip", str(error)
    except AssertionError as error:
        return "fail", " ".join(str(error).split())[-_LONGEST:]


def main(names: Sequence[str]) -> int:
    """Drive the clients of these names, or all."""
    if unknown := [name for name in names if name not in CLIENTS]:
        print(f"no client {', '.join(unknown)}; there are {', '.join(CLIENTS)}", file=sys.stderr)
        return 2
    found = []
    print(f"Python {sys.version.split()[0]}; trserve launch {' '.join(ARGUMENTS)}")
    with Server(ARGUMENTS) as server:
        for name in names or CLIENTS:
            began = time.monotonic()
            kind, told = verdict(name, Endpoint(server.url))
            found.append(kind)
            seconds = time.monotonic() - began
            print(f"{kind}  {name:20} {CLIENTS[name][0]:9} {seconds:4.0f} s  {told}", flush=True)
    counts = [f"{found.count(kind)} {word}" for kind, word in KINDS.items() if kind in found]
    print(", ".join(counts))
    return int("fail" in found)


KINDS = {"pass": "passed", "skip": "skipped", "fail": "failed"}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
