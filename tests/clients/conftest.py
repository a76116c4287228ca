"""One server for all clients: the embedded pair, with a chat template that shows tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serverproc import Server

TEMPLATE = Path(__file__).with_name("tools.jinja")
ADMIN_KEY = "key-for-tests-alone"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    key = tmp_path_factory.mktemp("keys") / "admin"
    key.write_text(ADMIN_KEY)
    arguments = ["--device", "cpu", "--max-model-len", "512", "--chat-template", str(TEMPLATE)]
    with Server([*arguments, "--admin-key", f"@{key}"]) as running:
        yield running


@pytest.fixture(scope="session")
def base_url(server: Server) -> str:
    """What clients of OpenAI's take as their address."""
    return f"{server.url}/v1"
