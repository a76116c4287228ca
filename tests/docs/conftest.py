"""One server for the snippets of all pages, and the commands that they find."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.conftest import FULL
from tests.docs.pages import ROOT
from tests.docs.shim import URL
from tests.serverproc import Server, server_env

ADMIN_KEY = "key-for-tests-alone"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """What `trserve launch` of the quickstart serves, and an administrator's key."""
    key = tmp_path_factory.mktemp("keys") / "admin"
    key.write_text(ADMIN_KEY)
    with Server(["--admin-key", f"@{key}"]) as running:
        yield running


@pytest.fixture(scope="session")
def shell(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment of a snippet: `trserve` is the shim, `python` this one, no settings."""
    commands = tmp_path_factory.mktemp("bin")
    python = shlex.quote(sys.executable)
    for name, line in {
        "trserve": f'exec {python} -m tests.docs.shim "$@"',
        "python": f'exec {python} "$@"',
    }.items():
        (commands / name).write_text(f"#!/bin/sh\n{line}\n")
        (commands / name).chmod(0o755)
    return {
        **server_env(server.runtime),
        "PATH": f"{commands}:{os.environ['PATH']}",
        # The folder of the page comes first, as it does for who types.
        "PYTHONPATH": f".:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "ADMIN": ADMIN_KEY,
        URL: server.url,
        **({"DOCS_FULL": "1"} if FULL else {}),
    }


def at_server(text: str, server: Server) -> str:
    """``text`` with the test's server in the place of the usual address."""
    address = urlsplit(server.url).netloc
    for usual in ("127.0.0.1:8000", "localhost:8000"):
        text = text.replace(usual, address)
    return text


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """An empty folder with the results that the documents refer to, as a reader's checkout has."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "results").symlink_to(ROOT / "docs" / "results")
    return tmp_path
