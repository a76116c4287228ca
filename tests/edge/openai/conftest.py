"""The embedded pair's large model as a server that takes token ids."""

import pytest

from tests.serverproc import Server


@pytest.fixture(scope="session")
def trserve():
    with Server(["--models", "small", "--device", "cpu", "--threads", "1"]) as server:
        yield server
