"""Servers that take token ids: the embedded pair's large model, and one that does as it is told."""

import time

import pytest

from tests.edge.openai.stub import Stub, wait
from tests.serverproc import Server
from trserve.edge.openai_cloud import OpenAiCloud


@pytest.fixture(scope="session")
def trserve():
    with Server(["--models", "small", "--device", "cpu", "--threads", "1"]) as server:
        yield server


@pytest.fixture
def stub():
    with Stub() as server:
        yield server
        server.shutdown()


@pytest.fixture
def cloud(stub):
    made = OpenAiCloud(f"{stub.url}/v1", key="secret")
    made.start(time.monotonic())
    wait(made, lambda _: made.connected)
    yield made
    made.close()
