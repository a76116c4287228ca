"""One server for all that a terminal shows of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serverproc import Server


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    """The embedded pair on the CPU, by its default router."""
    with Server(["--device", "cpu"]) as running:
        yield running
