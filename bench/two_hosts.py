"""A pair of models on two hosts, joined by the ``tcp`` link: here two loopback addresses of one.

Each side is a server of its own with keys of its own, as it would be on two machines; what a wire
between them adds is missing, and rows say so. Knows flags and servers; measures nothing.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.endpoint import Address, launched

if TYPE_CHECKING:
    from bench.systems import Setup

SYSTEM: Final = "eager-2-hosts"
BETWEEN: Final = "loopback addresses of one machine"
OTHER: Final = "127.0.0.2"

PAPER: Final = {1: 69.9 / 74.9, 4: 202.4 / 228.9}
"""arXiv 2610.12242: R2R on two nodes over RoCE beside one node, by concurrency."""


@contextmanager
def two_hosts(setup: Setup) -> Iterator[Address]:
    """The home's address; the last model stands at the other one. NotAvailableError if refused."""
    from trserve.edge.keys_command import make_files

    *here, there = setup.models
    router = setup.algorithm.router_arguments(setup.device)
    with tempfile.TemporaryDirectory() as folder:
        server_keys, client_keys = Path(folder, "server"), Path(folder, "client")
        make_files(server_keys, client_keys, "home")
        port = _free_port()
        cloud = setup.arguments([*(f"{name}@edge" for name in here), there])
        cloud += ["--edge-listen", f"{OTHER}:{port}", "--edge-keys", str(server_keys)]
        home = setup.arguments([*here, f"{there}@{OTHER}:{port}"])
        home += ["--edge-keys", str(client_keys)]
        with launched([*cloud, *router]), launched([*home, *router]) as address:
            yield address


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((OTHER, 0))
        return int(probe.getsockname()[1])
