"""What can be said of the CUDA device without one: its source compiles, its order, its calls exist.

That it works, only ``bench/gpu_check.py`` on a device may say.
"""

from __future__ import annotations

import ast
import inspect
import shutil
import subprocess
import sys
import threading
import warnings
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from trserve.ipc.device import cuda_device, cupy_communicator
from trserve.ipc.device.api import DeviceError, Push
from trserve.ipc.device.cpu_device import CpuDevice
from trserve.ipc.device.cuda_device import CudaDevice, why_unavailable
from trserve.ipc.device.inbox import RECORD_BYTES
from trserve.ipc.device.kernels import COMMAND_WORDS, SOURCE, THREADS
from trserve.ipc.device.staging import CAPACITY, STAGING_BYTES, Staging

NVCC = shutil.which("nvcc")
ARCHITECTURES = ("80", "90", "100")


@pytest.fixture(scope="module")
def ptx(tmp_path_factory):
    """The PTX of one architecture, after the machine code of all was made."""
    if NVCC is None:
        pytest.skip("nvcc is not installed: the CUDA source was not compiled")
    folder = tmp_path_factory.mktemp("kernels")
    source = folder / "kernels.cu"
    source.write_text(SOURCE)
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
    command = [NVCC, *targets, "-fatbin", source, "--keep", "--keep-dir", folder]
    subprocess.run(command, check=True, timeout=120, cwd=folder)
    cubins = sorted(path.name for path in folder.glob("*.cubin"))
    assert len(cubins) == len(ARCHITECTURES), cubins
    (text,) = folder.glob("*90*.ptx")
    return text.read_text()


def test_the_source_compiles_and_releases_to_the_whole_system_last(ptx):
    push = ptx[ptx.index("trserve_push") : ptx.index("trserve_collect(")]
    clear, payload = push.index("st.relaxed.sys.u64"), push.rindex("st.relaxed.sys.u64")
    fence = push.index("membar.sys") if "membar.sys" in push else push.index("fence")
    first, last = push.index("bar.sync"), push.rindex("bar.sync")
    released = push.index("st.release.sys.u64")
    assert clear < fence < first < payload < last < released
    assert push.count("st.release.sys.u64") == 3, "the entry, the notice, the command"
    assert push.count("st.relaxed.sys.u64") == 4, "both cleared; payload and header"
    for word in ("ld.acquire", "nanosleep", "atom."):
        assert word not in ptx, "a kernel that waits"


def test_a_block_has_a_thread_for_every_word():
    assert 8 * THREADS == RECORD_BYTES
    assert f"commands + {COMMAND_WORDS} *" in SOURCE
    assert CAPACITY & (CAPACITY - 1) == 0, "the kernel masks the index"


def _calls(module, *owners):
    """Names that a module's source takes of what it calls ``owners``."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in owners:
            yield node.attr


def test_every_call_of_cupy_exists():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed: its names are not checked")
    names = set(_calls(cuda_device, "rt", "self._rt", "cupy.cuda.runtime"))
    assert {"ipcOpenMemHandle", "hostRegister", "malloc", "memset", "setDevice"} <= names
    missing = [name for name in names if not hasattr(cupy.cuda.runtime, name)]
    assert missing == []
    for name in set(_calls(cuda_device, "cupy.cuda", "self._cuda")) | {"nccl", "Stream"}:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            __import__("cupy.cuda.nccl")
        assert hasattr(cupy.cuda, name), name
    assert {"RawModule"} <= set(dir(cupy))
    runtime = set(_calls(cupy_communicator, "self._rt"))
    assert [name for name in runtime if not hasattr(cupy.cuda.runtime, name)] == []


def test_without_a_device_it_says_why():
    why = why_unavailable()
    if not why:
        pytest.skip("there is a device")
    with pytest.raises(DeviceError, match="CUDA links cannot be used: "):
        CudaDevice()


def test_both_devices_have_all_of_the_interface():
    from trserve.ipc.device.api import DeviceApi

    wanted = {name: value for name, value in vars(DeviceApi).items() if inspect.isfunction(value)}
    wanted = {name: value for name, value in wanted.items() if not name.startswith("_")}
    assert len(wanted) > 12
    for made in (CpuDevice, CudaDevice):
        for name, function in wanted.items():
            found = inspect.signature(getattr(made, name))
            assert list(found.parameters) == list(inspect.signature(function).parameters), name


def test_it_is_short():
    assert len(inspect.getsource(cuda_device).splitlines()) < 300


IMPORTS = "cupy", "torch", "transformers"


def test_links_and_their_media_import_neither_cupy_nor_torch():
    folder = Path(inspect.getfile(cuda_device)).parent
    modules = [f"trserve.ipc.device.{path.stem}" for path in folder.glob("[a-z]*.py")]
    assert len(modules) > 8
    code = (
        f"import importlib, sys\n"
        f"for name in {['trserve.ipc.links', *modules]!r}: importlib.import_module(name)\n"
        f"print(sorted(set({IMPORTS!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


# -- the bounded queue of commands ---------------------------------------------------------------


@pytest.fixture
def staging():
    memory = memoryview(bytearray(STAGING_BYTES))
    return Staging(memory, 1 << 30), memory.cast("q")


def give_back(words, ticket):
    """What the kernel's last store does."""
    at = COMMAND_WORDS * (ticket % CAPACITY) + COMMAND_WORDS - 1
    assert words[at] == -ticket
    words[at] = ticket


def test_commands_and_records_are_where_the_kernel_looks(staging):
    made, words = staging
    first = made.write([(b"recordxx", 111, 222), (333, 444, 555)])
    assert first == 1
    source, entry, notice, state = words[4:8].tolist()
    assert (entry, notice, state) == (111, 222, -1)
    at = (source - (1 << 30)) // 8
    assert words[at : at + 1].tobytes() == b"recordxx"
    assert words[8:12].tolist() == [333, 444, 555, -2]


def test_no_more_commands_are_under_way_than_there_are(staging):
    made, words = staging
    assert made.write([(1, 2, 3)] * (CAPACITY + 1)) is None
    assert made.write([(1, 2, 3)] * CAPACITY) is not None
    before = words[: COMMAND_WORDS * CAPACITY].tolist()
    assert made.write([(9, 9, 9)]) is None
    assert words[: COMMAND_WORDS * CAPACITY].tolist() == before
    give_back(words, 2)
    assert made.write([(9, 9, 9)]) is None, "blocks end in any order; the oldest has not"
    give_back(words, 1)
    assert made.write([(9, 9, 9)] * 3) is None
    assert made.write([(9, 9, 9)] * 2) == 1
    assert not made.is_done(made.last)


def test_commands_that_were_never_launched_are_free_again(staging):
    made, words = staging
    assert made.write([(1, 2, 3)] * 200) is not None
    made.take_back(50)
    for ticket in range(1, 151):
        assert not made.is_done(ticket)
        give_back(words, ticket)
    assert made.is_done(made.last)
    assert made.write([(1, 2, 3)] * CAPACITY) is not None


class RefusingDevice(CudaDevice):
    """What ``_launch`` needs of one, with a driver that refuses launches."""

    def __init__(self, staging):
        self._staging, self._staging_lock = staging, threading.Lock()
        self._stream, self._errors, self._device = nullcontext(), (RuntimeError,), 0

    def _push_kernel(self, *_):
        raise RuntimeError("out of memory")


def test_a_launch_that_is_refused_keeps_no_command(staging):
    made, _ = staging
    device = RefusingDevice(made)
    for _ in range(2 * CAPACITY):
        with pytest.raises(DeviceError, match="out of memory"):
            device.push([Push(b"recordxx", 1, 2)])
    assert made.is_done(made.last)


def test_against_a_queue_over_many_rounds(staging):
    made, words = staging
    rng = np.random.default_rng(1)
    under_way: list[int] = []
    for _ in range(2000):
        count = int(rng.integers(1, 40))
        free = CAPACITY - (made.last - (min(under_way) - 1 if under_way else made.last))
        assert (made.write([(1, 2, 3)] * count) is not None) is (count <= free)
        if count <= free:
            under_way += range(made.last - count + 1, made.last + 1)
        rng.shuffle(under_way)
        for _ in range(int(rng.integers(0, len(under_way) + 1))):
            give_back(words, under_way.pop())
        assert made.is_done(made.last) is (not under_way)
