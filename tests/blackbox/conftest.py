"""One server for all black-box tests that do not end it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serverproc import Server

CONTEXT = 256


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The embedded pair on the CPU with a context that is short enough to exceed."""
    with Server(["--device", "cpu", "--max-model-len", str(CONTEXT)]) as running:
        yield running
