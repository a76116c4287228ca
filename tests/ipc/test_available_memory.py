"""The memory that is free within a control group's limit, as a container has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trserve import control_groups
from trserve.control_groups import memory_left
from trserve.ipc import slab
from trserve.ipc.slab import available_memory

MIB = 2**20
V1 = ("7:memory:/pod/own", "memory/pod/own", "memory.limit_in_bytes", "memory.usage_in_bytes")
V2 = ("0::/pod/own", "pod/own", "memory.max", "memory.current")
NAMESPACED_V2 = ("0::/", "", "memory.max", "memory.current")
HOSTS_PATH_V1 = ("7:memory:/docker/3f", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
UNLIMITED = {"memory.max": "max", "memory.limit_in_bytes": "9223372036854771712"}


@pytest.fixture(params=[V1, V2, NAMESPACED_V2, HOSTS_PATH_V1])
def group(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, str, str]:
    """This process's group with 100 MiB in use, and the names of its limit and its use.

    The machine has 1000 MiB free.
    """
    line, path, limit, used = request.param
    own, meminfo, root = tmp_path / "own", tmp_path / "meminfo", tmp_path / "cgroup"
    own.write_text(f"3:cpu,cpuacct:/\n{line}\n")
    meminfo.write_text(f"MemTotal: 9999999 kB\nMemAvailable: {1000 * 1024} kB\n")
    (root / path).mkdir(parents=True)
    (root / path / used).write_text(f"{100 * MIB}\n")
    monkeypatch.setattr(control_groups, "_OWN_CGROUPS", own)
    monkeypatch.setattr(control_groups, "_CGROUPS", root)
    monkeypatch.setattr(slab, "_MEMINFO", str(meminfo))
    return root / path, limit, used


@pytest.mark.parametrize(("most", "free"), [(300, 200), (5000, 1000), (60, 0)])
def test_a_limit_leaves_what_is_not_in_use(
    group: tuple[Path, str, str], most: int, free: int
) -> None:
    """The machine's memory counts where it is less."""
    directory, limit, _ = group
    (directory / limit).write_text(f"{most * MIB}\n")
    assert available_memory() == free * MIB


def test_the_page_cache_of_a_group_counts_as_free(group: tuple[Path, str, str]) -> None:
    directory, limit, _ = group
    (directory / limit).write_text(f"{300 * MIB}\n")
    (directory / "memory.stat").write_text(f"anon 5\ninactive_file {40 * MIB}\n")
    assert available_memory() == 240 * MIB


def test_no_limit_is_none(group: tuple[Path, str, str]) -> None:
    directory, limit, _ = group
    (directory / limit).write_text(UNLIMITED[limit] + "\n")
    assert memory_left() is None
    assert available_memory() == 1000 * MIB


def test_a_machine_without_control_groups_has_no_limit(
    group: tuple[Path, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_groups, "_OWN_CGROUPS", tmp_path / "nowhere")
    assert available_memory() == 1000 * MIB


def test_the_least_of_all_groups_above_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, inner = tmp_path / "own", tmp_path / "cgroup" / "pod" / "own"
    own.write_text("0::/pod/own\n")
    inner.mkdir(parents=True)
    for directory, most in ((inner, 900), (inner.parent, 500)):
        (directory / "memory.max").write_text(f"{most * MIB}\n")
        (directory / "memory.current").write_text(f"{100 * MIB}\n")
    monkeypatch.setattr(control_groups, "_OWN_CGROUPS", own)
    monkeypatch.setattr(control_groups, "_CGROUPS", tmp_path / "cgroup")
    assert memory_left() == 400 * MIB
