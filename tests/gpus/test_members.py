"""GPUs for the models of a configuration that are here; the driver is EMULATED."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.gpus.programs import install_mps, install_smi, line, uuid
from trserve import plan
from trserve.config import LaunchConfig, config_from_flags
from trserve.errors import ConfigError
from trserve.gpus.links import chosen_links, link_topology, unreached
from trserve.gpus.members import plan_members
from trserve.gpus.planning import Planned
from trserve.gpus.topology import PeerAccess
from trserve.ipc.device import choice
from trserve.model_plans import Member, find_members
from trserve.places import split_places

HERE_THERE_HERE = ("tiny", "32b@10.0.0.2:9000", "small")


@pytest.fixture(autouse=True)
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    install_smi(tmp_path, [line(0), line(1)])
    install_mps(tmp_path)
    return tmp_path


def planned(**flags: Any) -> Planned:
    config: LaunchConfig = config_from_flags({"device": "cuda", **flags})
    members: list[Member] = find_members(config, split_places(config.model.models))
    return plan_members(config, members)


def test_models_at_other_hosts_take_nothing() -> None:
    found = planned(models=HERE_THERE_HERE)
    assert found.groups == [(0,), (), (0,)]
    assert found.blocks[1] == 0 and found.blocks[0] == found.blocks[2] > 0
    assert found.gpu_plan.uuids == [[uuid(0)], [], [uuid(0)]]
    assert found.gpu_plan.clients == {uuid(0): [0, 2]}
    assert found.gpu_plan.percentages == [100, 0, 100]
    assert found.gpu_plan.memory_limits[1] == 0


def test_a_group_is_named_for_each_of_the_models() -> None:
    found = planned(models=HERE_THERE_HERE, gpus=((1,), (0,), (0,)))
    assert found.groups == [(1,), (), (0,)]
    with pytest.raises(ConfigError, match="32b is at another host"):
        planned(models=HERE_THERE_HERE, gpus=((1,), (0, 1), (0,)))


def test_gpus_are_counted_among_those_that_can_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert planned().gpu_plan.uuids == [[uuid(1)], [uuid(1)]]
    with pytest.raises(ConfigError, match="there is no GPU 1; there are 0"):
        planned(gpus=((0,), (1,)))


def test_weights_of_eight_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match="--quantization int8: is for the CPU"):
        planned(quantization="int8")


def test_what_links_are_chosen_by() -> None:
    apart = planned(models=HERE_THERE_HERE, gpus=((1,), (0,), (0,)))
    found = link_topology(["tiny", "small"], [0, 2], apart, 4096)
    assert found.gpus == (uuid(1), uuid(0))
    assert found.peers == {(uuid(0), uuid(1)), (uuid(1), uuid(0))}
    assert found.mps == frozenset()
    together = link_topology(["tiny", "small"], [0, 2], planned(models=HERE_THERE_HERE), 4096)
    assert together.mps == {uuid(0)} and together.peers == frozenset()


def test_links_of_models_here_and_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: object())
    names, here = ["tiny", "32b", "small"], [True, False, True]
    found = chosen_links("auto", names, here, planned(models=HERE_THERE_HERE), 4096)
    assert found == [["", "shm", "cuda_ipc"], ["shm", "", "shm"], ["cuda_ipc", "shm", ""]]
    assert chosen_links("auto", names, here, None, 4096)[0] == ["", "shm", "shm"]
    with pytest.raises(ConfigError, match="--link cuda_ipc cannot join tiny and small"):
        chosen_links("cuda_ipc", names, here, None, 4096)
    for wanted in ("cuda_ipc", "host_mapped", "nccl"):
        with pytest.raises(ConfigError, match=f"--link {wanted} joins models on GPUs, and here"):
            chosen_links(wanted, names, [True, False, False], None, 4096)
    assert chosen_links("tcp", names, [True, False, False], None, 4096)[0] == ["", "shm", "shm"]


def test_a_pair_is_unreached_if_one_way_is_missing() -> None:
    access = PeerAccess({(0, 1): "OK", (1, 0): "TNS"})
    found = unreached(planned(gpus=((0,), (1,))), access)
    assert found == {(0, 1): "the topology does not support it"}


def test_the_whole_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose torch is for CUDA."""
    monkeypatch.setattr(plan, "check_torch_for_gpus", lambda: None)
    monkeypatch.setattr(choice, "find_spec", lambda name: object())
    made = plan.make_plan(config_from_flags({"device": "cuda", "gpus": ((0,), (0, 1))}))
    assert made.device == "cuda"
    assert [model.gpus for model in made.models] == [(0,), (0, 1)]
    assert [model.tp for model in made.models] == [1, 2]
    assert all(model.num_blocks > 0 for model in made.models)
    assert made.gpu.uuids == [[uuid(0)], [uuid(0), uuid(1)]] and made.gpu.clients == {}
    assert made.links == [["", "host_mapped"], ["host_mapped", ""]]
    sent = msgspec.convert(msgspec.to_builtins(made), plan.ServerPlan)
    assert sent == made
