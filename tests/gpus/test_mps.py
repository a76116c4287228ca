"""One MPS daemon, EMULATED: started in private, proven by its answers, asked, and gone afterwards.

No GPU and no driver: what is tested is our side, with a daemon of the same language that can also
refuse, hang, die and be killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import procfs
from tests.gpus.programs import install_mps, misbehave, uuid
from trserve.gpus import mps, mps_control
from trserve.gpus.mps import MpsDaemon
from trserve.gpus.mps_control import PIPE_DIRECTORY
from trserve.gpus.programs import DriverError
from trserve.gpus.side import PERCENTAGE
from trserve.gpus.topology import VISIBLE

MARK = "TRSERVE_TEST_MPS"
GONE_S = 10.0


@contextmanager
def emulated(place: Path) -> Iterator[Path]:
    """Where the emulated program is; at the end nothing of the test's processes may be left."""
    install_mps(place / "bin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{place / 'bin'}:/usr/bin:/bin")
        patch.setenv(MARK, str(place))
        yield place / "bin"
        until(lambda: not procfs.marked(MARK, str(place)))


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Path]:
    with emulated(tmp_path) as place:
        yield place


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GONE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def daemon(programs: Path, tmp_path: Path) -> Iterator[MpsDaemon]:
    found = MpsDaemon(uuid(0), tmp_path / "mps-0", 100)
    yield found
    found.close()


@pytest.fixture(scope="module")
def well(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MpsDaemon]:
    """One that nothing happens to."""
    place = tmp_path_factory.mktemp("well")
    with emulated(place):
        found = MpsDaemon(uuid(3), place / "mps-0", 100)
        yield found
        found.close()


@contextmanager
def client_of(daemon: MpsDaemon) -> Iterator[int]:
    """A process that was started as a worker on the daemon's GPU is."""
    env = {**os.environ, **daemon.environment, PERCENTAGE: "100"}
    process = subprocess.Popen(["sleep", "60"], env=env)
    yield process.pid
    process.kill()
    process.wait()


def orders(daemon: MpsDaemon) -> list[str]:
    return (daemon.logs / "orders").read_text().splitlines()


def test_it_is_private_and_answers(well: MpsDaemon) -> None:
    assert well.is_alive and well.is_well()
    assert not well.is_in_background
    for path in (well.pipe.parent, well.pipe, well.logs):
        assert path.stat().st_mode & 0o777 == 0o700
    assert well.control.probe() == 100.0
    assert orders(well)[1] == "set_default_active_thread_percentage 100", "right after its start"
    assert not well.control.clients()


def test_it_sees_only_its_gpu(well: MpsDaemon) -> None:
    pid = mps_control.daemon_pid(well.pipe)
    assert f"CUDA_VISIBLE_DEVICES={uuid(3)}\0" in Path(f"/proc/{pid}/environ").read_text()


def test_a_client_is_taken_off_by_its_own_server_and_nobody_else_is(well: MpsDaemon) -> None:
    with client_of(well) as pid:
        (found,) = well.control.clients()
        assert found.pid == pid
        assert not well.terminate_client(os.getpid())
        assert not any(order.startswith("terminate_client") for order in orders(well))
        assert well.terminate_client(pid)
        assert orders(well)[-1] == f"terminate_client {found.server} {pid}"


def test_one_that_refuses_the_foreground_is_held_all_the_same(
    programs: Path, tmp_path: Path
) -> None:
    misbehave(programs, "refuse-f")
    daemon = MpsDaemon(uuid(0), tmp_path / "mps-0", 100)
    assert daemon.is_in_background and daemon.is_well()
    daemon.close()
    assert not daemon.is_alive


@pytest.mark.parametrize("kind", ["refuse", "missing"])
def test_one_that_cannot_be_had(programs: Path, tmp_path: Path, kind: str) -> None:
    misbehave(programs, kind)
    if kind == "missing":
        (programs / mps.MPS_CONTROL).unlink()
    expected = "an option is refused: -d" if kind == "refuse" else "there is no nvidia-cuda-mps"
    with pytest.raises(DriverError, match=expected):
        MpsDaemon(uuid(0), tmp_path / "mps-0", 100)


@pytest.mark.parametrize(
    ("client", "expected"),
    [
        ("print('cuInit: CUDA error 805'); raise SystemExit(1)", "cuInit: CUDA error 805"),
        ("import time; time.sleep(60)", "does not answer within 1 s"),
    ],
)
def test_one_that_answers_and_takes_in_nobody(
    programs: Path, tmp_path: Path, monkeypatch, client: str, expected: str
) -> None:
    monkeypatch.setattr(MpsDaemon, "CLIENT", (sys.executable, "-c", client))
    monkeypatch.setattr(mps, "_CLIENT_WITHIN_S", 1.0)
    with pytest.raises(DriverError, match=f"a client cannot use it: .*{expected}"):
        MpsDaemon(uuid(0), tmp_path / "mps-0", 100)


def test_its_client_is_started_as_a_worker_is(programs: Path, tmp_path: Path, monkeypatch) -> None:
    client = f"import os; e = os.environ; raise SystemExit(e['{VISIBLE}'] + e['{PIPE_DIRECTORY}'])"
    monkeypatch.setattr(MpsDaemon, "CLIENT", (sys.executable, "-c", client))
    place = tmp_path / "mps-0"
    with pytest.raises(DriverError, match=f"{uuid(1)}{place}/pipe"):
        MpsDaemon(uuid(1), place, 100)


@pytest.mark.slow
def test_one_that_never_answers(programs: Path, tmp_path: Path, monkeypatch) -> None:
    misbehave(programs, "hang")
    monkeypatch.setattr(mps, "_ANSWERS_WITHIN_S", 0.3)
    with pytest.raises(DriverError, match="does not answer"):
        MpsDaemon(uuid(0), tmp_path / "mps-0", 100)


def test_one_in_a_fault_is_noticed_and_one_that_hangs_is_asked_once(
    daemon: MpsDaemon, programs: Path, monkeypatch
) -> None:
    monkeypatch.setattr(mps_control.MpsControl.ask, "__kwdefaults__", {"timeout_s": 0.3})
    with client_of(daemon) as pid:
        assert daemon.control.servers() and daemon.is_well()
        misbehave(programs, "fault")
        assert not daemon.is_well()
        misbehave(programs, "hang")
        began = time.monotonic()
        for _ in range(5):
            assert not daemon.terminate_client(pid)
        assert time.monotonic() - began < 5 * 0.3
        misbehave(programs, "")
        assert not daemon.is_well(), "it had its chance"


def test_one_that_is_killed_is_noticed(daemon: MpsDaemon) -> None:
    pid = mps_control.daemon_pid(daemon.pipe)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: not daemon.is_alive)
    assert not daemon.terminate_client(os.getpid())


def test_one_whose_keeper_is_killed_does_not_outlive_the_server(daemon: MpsDaemon) -> None:
    daemon._keeper.kill()
    until(lambda: not daemon.is_alive)
    daemon.close()


LAUNCHER = """
import sys
from pathlib import Path
from trserve.gpus.mps import MpsDaemon
MpsDaemon(sys.argv[1], Path(sys.argv[2]), 100)
print("started", flush=True)
sys.stdin.read()
"""


def test_the_launcher_is_killed(programs: Path, tmp_path: Path) -> None:
    """The fixture looks for what is left; a client that stays does not keep the daemon."""
    command = [sys.executable, "-c", LAUNCHER, uuid(0), str(tmp_path / "mps-0")]
    launcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert launcher.stdout is not None and launcher.stdin is not None
    assert launcher.stdout.readline() == b"started\n"
    env = {**os.environ, PIPE_DIRECTORY: str(tmp_path / "mps-0" / "pipe"), PERCENTAGE: "50"}
    client = subprocess.Popen(["sleep", "0.3"], env=env)
    launcher.kill()
    launcher.wait()
    launcher.stdin.close()
    launcher.stdout.close()
    assert client.wait(GONE_S) == 0
