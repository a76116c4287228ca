"""What the driver says of GPUs is understood, and what it does not say is not made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpus.programs import MIB, install, install_smi, line, matrix, uuid
from trserve.gpus import programs, topology
from trserve.gpus.programs import QUERY, DriverError, find_program
from trserve.gpus.topology import parse_peer_access, read_gpus, read_peer_access, visible_gpus


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is all of PATH, beside the system's."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_gpus(place: Path) -> None:
    install_smi(place, [line(1, name="EMULATED, with a comma"), line(0, free="[N/A]")])
    first, second = read_gpus()
    assert (first.number, first.uuid, first.free) == (0, uuid(0), 0)
    assert second.name == "EMULATED, with a comma"
    assert second.memory == 143771 * MIB
    assert second.capability == (9, 0)


def test_a_driver_that_does_not_know_compute_capabilities(place: Path) -> None:
    short = "0, GPU-0, 450.80, 16160, 16000, Default, EMULATED V100"
    install(
        place,
        QUERY,
        'case "$1" in *compute_cap*) '
        "echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2;; "
        f"*) echo '{short}';; esac",
    )
    (gpu,) = read_gpus()
    assert gpu.capability == (0, 0)
    assert gpu.name == "EMULATED V100"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo No devices were found", "no list of GPUs"),
        ("echo NVML: Driver/library version mismatch; exit 18", "version mismatch"),
        ("exit 9", "ends with 9: no word"),
    ],
)
def test_answers_that_are_no_gpus(place: Path, script: str, expected: str) -> None:
    install(place, QUERY, script)
    with pytest.raises(DriverError, match=expected):
        read_gpus()


def test_a_driver_that_hangs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(place, QUERY, "exec sleep 30")
    monkeypatch.setattr(programs, "TIMEOUT_S", 0.2)
    with pytest.raises(DriverError, match=r"does not answer within 0.2 s"):
        read_gpus()


def test_programs_beside_the_driver_are_found(tmp_path: Path, monkeypatch) -> None:
    """On PATH is a link to nvidia-smi alone."""
    beside = install(tmp_path / "driver", "nvidia-thing", "exit 0")
    smi = install(tmp_path / "driver", QUERY, "exit 0")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / QUERY).symlink_to(smi)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find_program("nvidia-thing") == str(beside)
    with pytest.raises(DriverError, match="no nvidia-other on PATH"):
        find_program("nvidia-other")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        (f"{uuid(1)},0", [1, 0]),
        (uuid(2)[:12], [2]),
        ("1,7,0", [1]),
        ("1,1", [1]),
        ("-1", []),
        ("MIG-abc", []),
    ],
)
def test_visible_gpus(place: Path, given: str | None, expected: list[int]) -> None:
    install_smi(place, [line(index) for index in range(3)])
    environ = {} if given is None else {topology.VISIBLE: given}
    assert [gpu.number for gpu in visible_gpus(read_gpus(), environ)] == expected


def test_peer_access(place: Path) -> None:
    install_smi(place, [line(0), line(1)])
    access = read_peer_access()
    assert access.reaches(0, 1) and access.reaches(1, 0) and access.reaches(0, 0)
    assert not access.reaches(0, 2)
    assert "does not know" in access.why_not(0, 2)


def test_gpus_that_do_not_reach_each_other() -> None:
    access = parse_peer_access(matrix(2, away="CNS"))
    assert not access.reaches(0, 1)
    assert "chipset" in access.why_not(0, 1)


def test_a_matrix_with_spaces_and_an_asymmetry() -> None:
    text = "P2P Connectivity Matrix\n        GPU0    GPU1\n GPU0   X       OK\n GPU1   TNS     X\n"
    access = parse_peer_access(text)
    assert access.reaches(0, 1) and not access.reaches(1, 0)


def test_what_is_no_matrix() -> None:
    with pytest.raises(DriverError, match="no matrix"):
        parse_peer_access("Failed to retrieve topology\n")
