"""The emulated device keeps CUDA's rules: the contract of a DeviceApi, not proof of a GPU."""

from __future__ import annotations

import mmap
import os
import time

import numpy as np
import pytest

from tests.ipc.device.processes import peer
from trserve.ipc.device.api import GRANULE, HANDLE_BYTES, DeviceError, Forward, Piece, Push, sync
from trserve.ipc.device.cpu_device import CpuDevice
from trserve.ipc.device.inbox import HEADER_BYTES, RECORD_BYTES, Suffix, encode
from trserve.ipc.device.memory_file import MemoryFile, Place


@pytest.fixture
def api():
    return CpuDevice()


def pages(nbytes=4096):
    memory = mmap.mmap(-1, nbytes)
    return memory, int(np.frombuffer(memory, np.uint8).ctypes.data)


@pytest.mark.parametrize("nbytes", [0, -GRANULE, 4096, GRANULE + 4096])
def test_a_size_that_shares_its_block_is_refused(api, nbytes):
    with pytest.raises(DeviceError, match="multiple of"):
        api.allocate(nbytes)


def test_a_process_cannot_open_its_own_handle(api):
    handle = api.export(api.allocate(GRANULE))
    assert len(handle) == HANDLE_BYTES
    with pytest.raises(DeviceError, match="its own handle"):
        api.open(handle)


def test_only_the_base_of_an_own_allocation_is_exported(api):
    pointer = api.allocate(GRANULE)
    with pytest.raises(DeviceError, match="not the base"):
        api.export(pointer + 512)
    memory, address = pages()
    api.register(address, len(memory))
    with pytest.raises(DeviceError, match="not an allocation"):
        api.export(address)


@pytest.mark.parametrize("handle", [b"", bytes(63), bytes(64)])
def test_what_is_no_handle_is_refused(api, handle):
    with pytest.raises(DeviceError, match="not a handle"):
        api.open(handle)


def test_another_process_opens_counts_and_closes(api):
    with peer("export") as other:
        handle = bytes.fromhex(other.hear())
        pointer = api.open(handle)
        assert api.open(handle) == pointer, "opening again gives the same mapping"
        with pytest.raises(DeviceError, match="not an allocation"):
            api.export(pointer)
        with pytest.raises(DeviceError, match="not allocated by this process"):
            api.free(pointer)
        memory, address = pages()
        line = api.register(address, len(memory))
        api.push([Push(encode(Suffix(1, 2, 3, 4, b"abcd"), 5, 6), pointer, line)])
        found = bytes.fromhex(other.ask("read"))
        assert found == memory[:HEADER_BYTES], "its memory is not ours"
        assert "has" in other.ask("free"), "it may not free what others have open"
        api.close(pointer)
        assert "has" in other.ask("free")
        api.close(pointer)
        with pytest.raises(DeviceError, match="close"):
            api.close(pointer)
        with pytest.raises(DeviceError, match="illegal memory access"):
            api.read(pointer, 8)
        assert other.ask("free") == "freed"
        with pytest.raises(DeviceError, match="exporter is gone"):
            api.open(handle)


def test_the_exporter_must_be_alive(api):
    with peer("export") as other:
        handle = bytes.fromhex(other.hear())
    with pytest.raises(DeviceError, match="exporter is gone"):
        api.open(handle)


def test_what_a_killed_process_had_open_can_be_freed():
    memory = MemoryFile.create("trserve-test", 4096)
    with peer("open-place", str(list(memory.place))) as other:
        assert other.hear() == "open"
        assert memory.words[0] == 42
        assert memory.is_open_elsewhere()
    assert not memory.is_open_elsewhere()
    memory.close()


def test_a_descriptor_that_is_another_files_by_now_is_not_opened():
    memory = MemoryFile.create("trserve-test", 4096)
    with pytest.raises(OSError, match="given that memory back"):
        MemoryFile.open(memory.place._replace(inode=memory.place.inode + 1))
    with pytest.raises(OSError):
        MemoryFile.open(Place(os.getpid(), 10**6, 1, 4096))
    with pytest.raises(PermissionError):
        os.ftruncate(memory.place.fd, 0)
    memory.close()


@pytest.mark.parametrize(("offset", "nbytes"), [(1, 4096), (0, 0), (0, 100)])
def test_host_memory_is_registered_by_whole_pages(api, offset, nbytes):
    _memory, address = pages(8192)
    with pytest.raises(DeviceError, match="whole pages"):
        api.register(address + offset, nbytes)


def test_host_memory_is_registered_once_and_given_back_once(api):
    memory, address = pages()
    pointer = api.register(address, 4096)
    memory[:4] = b"word"
    assert api.read(pointer, 4) == b"word"
    with pytest.raises(DeviceError, match="registered already"):
        api.register(address, 4096)
    api.unregister(address)
    with pytest.raises(DeviceError, match="not the base"):
        api.unregister(address)
    with pytest.raises(DeviceError, match="illegal memory access"):
        api.read(pointer, 4)


def test_peers_and_names():
    two = CpuDevice(devices=2)
    assert (two.device_count(), two.can_access_peer(0, 1)) == (2, True)
    assert not CpuDevice(devices=2, peers=False).can_access_peer(0, 1)
    assert "emulated" in two.name


@pytest.mark.parametrize("lag_s", [None, 0.1])
def test_records_are_forwarded_and_ids_collected_in_stream_order(lag_s):
    api = CpuDevice(lag_s=lag_s)
    pointer = api.allocate(GRANULE)
    memory, address = pages()
    line = api.register(address, len(memory))
    ids = np.arange(7, dtype=np.int32)
    record = encode(Suffix(1, 2, 3, 7, ids.tobytes()), 5, 6)
    assert api.push([Push(record, pointer, line)])
    assert api.forward([Forward(pointer, pointer + RECORD_BYTES, line + HEADER_BYTES)])
    out = pointer + 2 * RECORD_BYTES
    source = pointer + RECORD_BYTES + HEADER_BYTES + 8
    assert api.collect([Piece(source, out, 3), Piece(source, out + 16, -3)])
    if lag_s:
        assert api.read(pointer, 8) == bytes(8), "copies come later"
        with pytest.raises(DeviceError, match="within 0 s"):
            sync(api, 0.0)
    sync(api, 10.0)
    assert np.frombuffer(api.read(out, 12), np.int32).tolist() == [2, 3, 4]
    assert np.frombuffer(api.read(out + 16, 24), np.int64).tolist() == [2, 3, 4]
    assert memory[:HEADER_BYTES] == memory[HEADER_BYTES : 2 * HEADER_BYTES] == record[:64]


def test_a_wait_for_the_device_ends():
    api, began = CpuDevice(lag_s=30.0), time.monotonic()
    pointer = api.allocate(GRANULE)
    api.collect([Piece(pointer, pointer, 1)])
    with pytest.raises(DeviceError, match="did not finish"):
        sync(api, 0.05)
    assert time.monotonic() - began < 10
