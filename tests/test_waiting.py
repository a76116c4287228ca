"""Waiting for a descriptor, one that is beyond what ``select`` takes too."""

from __future__ import annotations

import fcntl
import os
import resource
import time

import pytest

from tests.edge.openai.stub import Stub
from trserve.edge.openai_facts import ask_openai
from trserve.waiting import wait_readable

BEYOND = 1100


@pytest.fixture
def many_allowed():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * BEYOND)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_it_says_whether_there_is_something_to_read():
    reading, writing = os.pipe()
    began = time.monotonic()
    assert not wait_readable(reading, 0.05)
    assert time.monotonic() - began >= 0.05
    assert not wait_readable(reading, -1.0), "time that is over is no time"
    os.write(writing, b"x")
    assert wait_readable(reading, 5.0)
    os.read(reading, 1)
    os.close(writing)
    assert wait_readable(reading, 5.0), "the other side is gone"
    os.close(reading)


def test_descriptors_beyond_those_of_select(many_allowed):
    reading, writing = os.pipe()
    high = fcntl.fcntl(reading, fcntl.F_DUPFD_CLOEXEC, BEYOND)
    os.write(writing, b"x")
    assert wait_readable(high, 5.0)
    for fd in (reading, writing, high):
        os.close(fd)


def test_a_server_is_asked_by_a_process_that_has_many(many_allowed):
    """As one that embeds an engine may have."""
    stub = Stub()
    held = [os.dup(0) for _ in range(BEYOND)]
    try:
        assert ask_openai(stub.url, "big", "").max_model_len == 128
    finally:
        for fd in held:
            os.close(fd)
        stub.shutdown()
