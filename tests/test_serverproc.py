"""The harness sees what it must see: a stand-in server that leaks, hangs and dies on demand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid

import pytest

from tests.serverproc import Server, StartFailedError, wait_until

STAND_IN = """
import os, signal, subprocess, sys, tempfile, time
wish = sys.argv[1]
if wish == "fail":
    sys.exit("no such thing")
if wish == "leak":
    # A daemon: in a session of its own, so that no parent or group leads to it.
    subprocess.Popen(["sleep", "100"], start_new_session=True)
    open(os.path.join(tempfile.gettempdir(), "socket"), "w").close()
    open("/dev/shm/" + sys.argv[2], "w").close()
signal.signal(signal.SIGTERM, signal.SIG_IGN if wish == "hang" else lambda *_: sys.exit(7))
if wish != "mute":
    print("trserve ready http://127.0.0.1:9 models=a,b router=none device=cpu", flush=True)
time.sleep(100)
"""


class StandIn(Server):
    COMMAND = (sys.executable, "-c", STAND_IN)


def test_the_ready_line_is_read():
    with StandIn(["good"]) as server:
        assert server.models == ["a", "b"]
        assert (server.url, server.router, server.device) == ("http://127.0.0.1:9", "none", "cpu")
        assert server.stop() == 7
        assert not server.wait_gone(2.0)


def test_what_is_left_is_seen_and_cleaned_up():
    name = f"trserve-test-{uuid.uuid4().hex}"
    try:
        with StandIn(["leak", name]) as server:
            (child,) = server.children()
            server.kill()
            left = server.wait_gone(0.5)
            assert [item for item in left.processes if item.startswith(f"{child}: sleep")]
            assert [item for item in left.files if item.endswith("/socket")]
            assert left.shared_memory == [name]
        # Killed is not gone yet: the kernel takes its time.
        assert not wait_until(lambda: server.leftovers().processes, lambda left: not left, 5.0)
        assert not server.runtime.exists()
    finally:
        os.unlink(f"/dev/shm/{name}")


def test_a_server_that_ends_early_is_reported_with_its_words():
    with pytest.raises(StartFailedError, match="no such thing") as caught, StandIn(["fail"]):
        pass
    assert caught.value.code == 1


def test_a_server_that_never_gets_ready_is_given_up():
    server = StandIn(["mute"], ready_timeout_s=0.5)
    with pytest.raises(StartFailedError) as caught, server:
        pass
    assert caught.value.code is None
    assert not server.leftovers().processes


def test_a_server_that_ignores_sigterm_is_noticed():
    with StandIn(["hang"]) as server:
        with pytest.raises(subprocess.TimeoutExpired):
            server.stop(timeout_s=0.3)
        server.send_signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
