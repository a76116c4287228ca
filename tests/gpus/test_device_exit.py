"""A worker on a GPU whose launcher dies: its work ends, then it does, within three seconds.

The device is EMULATED by functions that wait as long as a device would.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests import procfs
from trserve.gpus.attributes import MPS_ENABLED, mps_enabled
from trserve.gpus.mps_client import why_not

WORKER = """
import os, sys, time
from trserve.gpus.device_exit import DeviceExit

launched = done = 0

def synchronize():
    print("synchronizing", flush=True)
    {device}
    print("done", launched, flush=True)

DeviceExit(int(sys.argv[1]), synchronize, within_s=0.5).install()
print("ready", os.getpid(), flush=True)
while True:
    launched += 1
    {step}
"""
LAUNCHER = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
sys.stdin.read()
"""


DEADLOCK = (
    "import ctypes; mutex = ctypes.create_string_buffer(64); "
    "lock = ctypes.CDLL(None).pthread_mutex_lock; lock(mutex), lock(mutex)"
)
"""A call that no signal interrupts, as waiting for a device is."""


class Pair:
    """A launcher and its worker."""

    def __init__(self, device: str, step: str = "time.sleep(0.001)") -> None:
        worker = WORKER.format(device=device, step=step)
        self.launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.launcher.stdout is not None
        self.lines = self.launcher.stdout
        self.pid = int(self.lines.readline().split()[1])

    def die(self) -> tuple[list[str], float]:
        """Kill the launcher; what the worker says, and how long it takes."""
        began = time.monotonic()
        self.launcher.kill()
        said = self.lines.read().decode().split()
        while procfs.stat(self.pid) is not None:
            assert time.monotonic() < began + 10
            time.sleep(0.01)
        self.launcher.wait()
        self.lines.close()
        assert self.launcher.stdin is not None
        self.launcher.stdin.close()
        return said, time.monotonic() - began


def test_the_work_on_the_device_ends_first():
    said, seconds = Pair("time.sleep(0.2)").die()
    assert said[:2] == ["synchronizing", "done"]
    assert 0.2 <= seconds < 0.2 + 1.0


@pytest.mark.parametrize(
    ("device", "step"),
    [
        ("time.sleep(60)", "time.sleep(0.001)"),
        ("pass", DEADLOCK),
    ],
    ids=["device-hangs", "launch-hangs"],
)
def test_a_device_that_hangs_is_not_waited_for(device, step):
    """In the second case the handler cannot even run: the main thread is within a call."""
    pair = Pair(device, step)
    time.sleep(0.2)  # until it is within the call
    said, seconds = pair.die()
    assert "done" not in said
    assert 0.4 <= seconds < 0.5 + 1.5


def test_a_device_in_a_fault_ends_it_too():
    said, seconds = Pair("raise RuntimeError('EMULATED fault')").die()
    assert said == ["synchronizing"]
    assert seconds < 1.5


def test_a_signal_of_a_service_manager_means_nothing():
    pair = Pair("pass")
    for _ in range(3):
        os.kill(pair.pid, signal.SIGTERM)
    time.sleep(0.1)
    assert procfs.stat(pair.pid) is not None
    said, _ = pair.die()
    assert said[:2] == ["synchronizing", "done"]


class EmulatedDriver:
    """libcuda's functions, EMULATED."""

    def __init__(self, enabled: int, error: int = 0, context_error: int = 0) -> None:
        self.enabled, self.error, self.context_error = enabled, error, context_error

    def cuInit(self, flags: int) -> int:
        return self.error

    def cuDevicePrimaryCtxRetain(self, context: object, device: object) -> int:
        return self.context_error

    def cuDevicePrimaryCtxRelease_v2(self, device: object) -> int:
        return 0

    def cuDeviceGet(self, device: object, number: int) -> int:
        return 0

    def cuDeviceGetAttribute(self, value, attribute: int, device: object) -> int:
        value._obj.value = self.enabled if attribute == MPS_ENABLED else 7
        return 0


def test_whether_a_device_is_used_through_mps():
    assert mps_enabled(EmulatedDriver(1)) is True
    assert mps_enabled(EmulatedDriver(0)) is False
    assert mps_enabled(EmulatedDriver(1, error=100)) is None


def test_a_client_says_why_it_is_none():
    assert why_not(EmulatedDriver(1)) == ""
    assert "not used through MPS" in why_not(EmulatedDriver(0))
    assert "805 (the MPS server cannot be reached)" in why_not(EmulatedDriver(1, error=805))
    assert "cuDevicePrimaryCtxRetain: CUDA error 2" in why_not(EmulatedDriver(1, context_error=2))
