"""Which links a worker opens through its device, and that others pay nothing for them."""

from __future__ import annotations

import logging
import subprocess
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from tests.ipc.memory import memory
from trserve.errors import ConfigError
from trserve.ipc.device.api import DeviceError
from trserve.workers.device_links import VARIABLE, links_of, open_device_links

READS = SimpleNamespace(read_sources=lambda: None)


def plan_of(device="cpu", links=(), remote=(), tp=1):
    models = [SimpleNamespace(remote="h:1" if i in remote else "", tp=tp) for i in range(3)]
    return SimpleNamespace(device=device, models=models, links=list(links), link="auto")


def test_links_are_the_plans_where_the_device_is_a_gpu(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    links = [["", "cuda_ipc", "shm"], ["cuda_ipc", "", "shm"], ["shm", "shm", ""]]
    assert links_of(plan_of("cuda", links), 0, READS) == ["", "cuda_ipc", "shm"]
    assert not links_of(plan_of("cuda", links), 2, READS)
    for device in ("cpu", "onnx", "emulated"):
        assert not links_of(plan_of(device, links), 0, READS)
    assert not links_of(plan_of("cuda"), 0, READS)


def test_emulated_links_join_the_models_here(monkeypatch):
    monkeypatch.setenv(VARIABLE, "cuda_ipc")
    assert links_of(plan_of(remote=(2,)), 1, READS) == ["cuda_ipc", "shm", "shm"]
    assert not links_of(plan_of(remote=(0, 2)), 1, READS)


@pytest.mark.parametrize(
    ("value", "device", "runner", "message"),
    [
        ("nccl", "cpu", READS, "is one of cuda_ipc, host_mapped"),
        ("cuda_ipc", "cuda", READS, "emulates a GPU's links"),
        ("cuda_ipc", "cpu", SimpleNamespace(), "TRSERVE_RUNNER=graphs-on-cpu"),
    ],
)
def test_what_cannot_be_emulated_is_refused(monkeypatch, value, device, runner, message):
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ConfigError, match=f"{VARIABLE}={value}: .*{message}"):
        links_of(plan_of(device), 0, runner)


def test_links_end_with_the_worker_and_a_device_that_is_behind_is_only_said(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    with memory(workers=3) as made, ExitStack() as leaving:
        names = ["", "cuda_ipc", "cuda_ipc"]
        links = open_device_links(plan_of(), made.slab(), 0, names, leaving)
        assert links.medium.name == "emulated-cuda_ipc"
        offers = []
        links.offer(SimpleNamespace(send=offers.append))
        assert [offer["to"] for offer in offers] == [1, 2]

        def behind():
            raise DeviceError("it did not finish its copies")

        monkeypatch.setattr(links.medium, "close", behind)
        leaving.close()
        assert caplog.messages[-1] == "link emulated-cuda_ipc: it did not finish its copies"
        assert open_device_links(plan_of(), made.slab(), 0, (), leaving) is None


_CODE = """
import sys
import trserve.workers.main
found = [name for name in sys.modules if name.startswith(("trserve.ipc.device.", "cupy"))]
assert found == ["trserve.ipc.device.choice"], found
"""


def test_a_worker_without_such_links_imports_nothing_for_them():
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
