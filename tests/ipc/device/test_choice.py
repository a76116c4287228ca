"""Which link is chosen, and what is said of it; and that what a device refuses is stepped down."""

from __future__ import annotations

import logging
import sys

import pytest

from tests.ipc.memory import memory
from trserve.errors import ConfigError, StartupError
from trserve.ipc.device.api import DeviceError
from trserve.ipc.device.choice import LinkTopology, choose_link, missing_packages
from trserve.ipc.device.cpu_device import CpuDevice
from trserve.ipc.device.opening import open_links
from trserve.ipc.rings import Descriptor, Kind

BOTH_WAYS = frozenset({("A", "B"), ("B", "A")})


def topology(*gpus, **settings):
    models = ("small", "large", "huge")[: len(gpus)]
    return LinkTopology(models, gpus, **({"missing": {}} | settings))


@pytest.mark.parametrize(
    ("gpus", "settings", "name", "reason"),
    [
        (("A", "A"), {"mps": frozenset("A")}, "cuda_ipc", "one GPU under MPS"),
        (("A", "B"), {"peers": BOTH_WAYS}, "cuda_ipc", "reach each other"),
        (("A", "A"), {}, "host_mapped", "without MPS"),
        (("A", "A"), {"mps": frozenset("B")}, "host_mapped", "without MPS"),
        (("A", "B"), {}, "host_mapped", "cannot reach"),
        (("A", "B"), {"peers": frozenset({("A", "B")})}, "host_mapped", "cannot reach"),
        (("A", "B"), {"row_bytes": 2, "free_bytes": 15}, "shm", "1/8 of the memory"),
        (("A", "B"), {"row_bytes": 2, "free_bytes": 16}, "host_mapped", "cannot reach"),
        (("A", ""), {}, "shm", "large is on no GPU"),
        (("", ""), {}, "shm", "small and large are on no GPU"),
        (("A", "A"), {"missing": {"cuda_ipc": "no CuPy"}}, "shm", "no CuPy"),
        (
            ("A", "B"),
            {"missing": {"host_mapped": "not here"}},
            "shm",
            "cannot reach each other's memory; not here",
        ),
    ],
)
def test_auto(gpus, settings, name, reason):
    choice = choose_link(topology(*gpus, **settings))
    assert choice.names == [["", name], [name, ""]]
    assert len(choice.reasons) == 1
    assert choice.reasons[0].startswith(f"small - large: {name} (")
    assert reason in choice.reasons[0]


@pytest.mark.parametrize(
    ("wanted", "gpus", "settings"),
    [
        ("shm", ("", ""), {}),
        ("shm", ("A", "A"), {"mps": frozenset("A")}),
        ("host_mapped", ("A", "B"), {"row_bytes": 5, "free_bytes": 10}),
        ("cuda_ipc", ("A", "A"), {}),
        ("cuda_ipc", ("A", "B"), {"peers": BOTH_WAYS}),
        ("nccl", ("A", "B"), {}),
    ],
)
def test_what_is_asked_for_is_taken(wanted, gpus, settings):
    choice = choose_link(topology(*gpus, **settings), wanted)
    assert choice.names[0][1] == choice.names[1][0] == wanted


@pytest.mark.parametrize(
    ("wanted", "gpus", "settings", "reason"),
    [
        ("cuda_ipc", ("A", "B"), {}, "cannot reach each other's memory"),
        ("cuda_ipc", ("A", ""), {}, "large is on no GPU"),
        ("cuda_ipc", ("A", "A"), {"missing": {"cuda_ipc": "no CuPy"}}, "no CuPy"),
        ("host_mapped", ("", ""), {}, "are on no GPU"),
        ("host_mapped", ("A", "A"), {"row_bytes": 6, "free_bytes": 11}, "1/2 of the memory"),
        ("nccl", ("A", "A"), {}, "NCCL refuses to join two processes"),
        ("nccl", ("A", "B"), {"missing": {"nccl": "no library"}}, "no library"),
        ("tcp", ("A", "B"), {}, "NAME@HOST:PORT"),
    ],
)
def test_what_is_asked_for_and_cannot_be_is_refused_with_the_reason(wanted, gpus, settings, reason):
    with pytest.raises(ConfigError, match=f"--link {wanted} cannot join small and large") as info:
        choose_link(topology(*gpus, **settings), wanted)
    assert reason in str(info.value)
    assert "leave --link out" in str(info.value)


def test_every_pair_has_its_own_link():
    found = choose_link(topology("A", "A", "B", mps=frozenset("A"), peers=BOTH_WAYS))
    assert found.names[0] == ["", "cuda_ipc", "cuda_ipc"]
    found = choose_link(topology("A", "A", "", mps=frozenset("A")))
    assert found.names == [["", "cuda_ipc", "shm"], ["cuda_ipc", "", "shm"], ["shm", "shm", ""]]
    assert len(found.reasons) == 3


def test_packages_are_looked_for_and_not_imported(monkeypatch):
    from trserve.ipc.device import choice

    before = set(sys.modules)
    missing_packages()
    assert set(sys.modules) == before
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    assert set(missing_packages()) == {"host_mapped", "cuda_ipc", "nccl"}
    monkeypatch.setattr(choice, "find_spec", lambda name: object())
    assert missing_packages() == {}


# -- opening -------------------------------------------------------------------------------------


class NoHandles(CpuDevice):
    """Refuses to export, as a driver in a container may."""

    def export(self, pointer):
        raise DeviceError("ipcGetMemHandle failed: operation not supported")


class NoHostMemory(NoHandles):
    def register(self, address, nbytes):
        raise DeviceError("hostRegister failed: operation not supported")


def no_device():
    raise DeviceError("no device")


@pytest.fixture
def slab():
    with memory(workers=3) as made:
        yield made.slab()


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (CpuDevice, "emulated-cuda_ipc"),
        (NoHandles, "emulated-host_mapped"),
        (NoHostMemory, "shm"),
        (no_device, "shm"),
    ],
)
def test_auto_steps_down_and_says_so(slab, caplog, device, name):
    caplog.set_level(logging.WARNING)
    medium = open_links(slab, 0, ["", "cuda_ipc", "cuda_ipc"], device=device)
    assert medium.name == name
    assert bool(caplog.records) is (device is not CpuDevice)
    assert medium.sender(0, 1).push([Descriptor(Kind.RUN, 0, 1, 1)])
    medium.close()


@pytest.mark.parametrize("device", [NoHandles, no_device])
def test_a_link_that_was_asked_for_is_not_replaced(slab, device):
    names = ["", "cuda_ipc", "cuda_ipc"]
    with pytest.raises(StartupError, match=r"--link cuda_ipc: .*(not supported|no device)"):
        open_links(slab, 0, names, wanted="cuda_ipc", device=device)


def test_nccl_joins_cuda_devices_only(slab):
    with pytest.raises(StartupError, match="not emulated-device"):
        open_links(slab, 0, ["", "nccl", "nccl"], wanted="nccl", device=CpuDevice)


def test_no_device_is_made_for_rings(slab):
    assert open_links(slab, 1, ["shm", "", "shm"], device=no_device).name == "shm"


def test_several_media_are_joined(slab):
    names = ["", "cuda_ipc", "host_mapped"]
    api = CpuDevice()
    joined = open_links(slab, 0, names, device=lambda: api)
    assert joined.name == "emulated-cuda_ipc+emulated-host_mapped"
    offers = joined.offers()
    assert [(offer["to"], offer["link"]) for offer in offers] == [(1, "emulated-cuda_ipc")]
    other = open_links(slab, 1, ["cuda_ipc", "", "shm"], device=lambda: api)
    (answer,) = other.accept(offers[0])
    assert [again["to"] for again in joined.accept(answer)] == [1]
    gateway = slab.layout.gateway
    for producer, consumer in ((0, 1), (0, 2), (gateway, 0), (1, 0), (2, 0)):
        assert joined.sender(producer, consumer).push([Descriptor(Kind.RUN, 0, 1, 1)])
        assert len(joined.receiver(producer, consumer).drain()) == 1
    slab.gen[1], slab.baton[1] = 7, 10 << 35
    view = joined.take(1, 7, 10, 4)
    assert view is not None and joined.holds(view), "the row itself"
    assert joined.take(1, 8, 10, 4) is None
    joined.close()
    other.close()
