"""Models onto GPUs: what is asked for is checked, and what is not asked for is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.gpus.programs import install_mps, uuid
from trserve.errors import ConfigError, ModelUnavailableError
from trserve.gpus import memory
from trserve.gpus.placement import describe, sharers
from trserve.gpus.plan import restart_unit
from trserve.gpus.planning import GpuModel, Planned, Wishes, find_gpus, plan_gpus
from trserve.gpus.topology import EXCLUSIVE, PROHIBITED, Gpu
from trserve.models.aliases import alias_spec

GIB = 2**30


def gpus(*free_gib: float, **changes: Any) -> list[Gpu]:
    return [
        Gpu(
            n, uuid(n), "EMULATED H200", "580", 144 * GIB, int(free * GIB), "Default", (9, 0)
        )._replace(**changes)
        for n, free in enumerate(free_gib)
    ]


def model(name: str, row_tokens: int = 32768) -> GpuModel:
    return GpuModel(name, alias_spec(name), 2, row_tokens=row_tokens)


PAIR = (model("0.6b"), model("32b"))
NOTHING_ASKED = Wishes(
    gpus=(),
    tp=(),
    mps="auto",
    memory=0,
    kv_tokens=(),
    block_size=16,
    max_rows=64,
    max_tokens=2048,
    max_requests=256,
)


def plan(there: Sequence[Gpu], models: Sequence[GpuModel] = PAIR, **asked: Any) -> Planned:
    return plan_gpus(replace(NOTHING_ASKED, **asked), models, there)


@pytest.fixture(autouse=True)
def programs(tmp_path, monkeypatch):
    """The MPS control program, EMULATED: that it is there is all that is asked."""
    install_mps(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_all_share_the_first_gpu_where_they_fit():
    found = plan(gpus(140, 140))
    assert found.groups == [(0,), (0,)]
    assert found.gpu_plan.uuids == [[uuid(0)], [uuid(0)]]
    assert found.gpu_plan.clients == {uuid(0): [0, 1]}
    assert found.blocks[0] == found.blocks[1] > 0


@pytest.mark.parametrize(
    ("asked", "most_gib"),
    [
        ({"of_total": 0.7}, 0.7 * 144),
        ({"of_free": 0.8}, 0.8 * 120),
        ({"of_total": 0.9, "of_free": 0.7}, 0.7 * 120),
        ({"of_total": 1.0}, 120),  # no more than is free
    ],
)
def test_models_take_the_share_that_they_may(asked, most_gib):
    all_free, found = plan(gpus(120), memory=0), plan(gpus(120), **asked)
    taken = memory.used(found.needs, found.blocks[0] * 16, 0)
    assert taken <= memory.room_of(int(most_gib * GIB))
    assert taken + 16 * sum(need.per_token for need in found.needs) > memory.room_of(
        int(most_gib * GIB)
    )
    assert sum(found.gpu_plan.memory_limits) <= most_gib * GIB
    assert (found.blocks[0] < all_free.blocks[0]) == (most_gib < 120)


def test_they_are_spread_where_they_do_not():
    found = plan(gpus(80, 80), (model("8b"), model("32b")))
    assert found.groups == [(1,), (0,)]
    assert found.gpu_plan.clients == {}
    assert found.gpu_plan.memory_limits == [0, 0]


def test_one_gpu_that_holds_less_than_a_row_is_used_all_the_same():
    found = plan(gpus(74))
    assert found.groups == [(0,), (0,)]
    assert 0 < found.blocks[0] * 16 < 32768


def test_tensor_parallel_without_groups():
    found = plan(gpus(140, 140), tp=(1, 2))
    assert found.groups == [(0,), (0, 1)]


@pytest.mark.parametrize(
    ("asked", "groups", "shared"),
    [
        ("overlapping", ((0,), (0, 1)), {}),
        ("apart", ((0,), (1, 2)), {}),
        ("together", ((2,), (2,)), {2: [0, 1]}),
    ],
)
def test_what_is_asked_for(asked, groups, shared):
    """A model that spans GPUs takes no part in MPS."""
    found = plan(gpus(140, 140, 140), gpus=groups)
    assert found.groups == list(groups)
    assert sharers(groups) == shared
    assert found.gpu_plan.clients == {uuid(gpu): models for gpu, models in shared.items()}
    assert ("no GPU" in describe(["a", "b"], groups)) == (asked == "apart")


def test_kv_and_limits_never_exceed_a_gpu():
    found = plan(gpus(140, 100), gpus=((0,), (0, 1)))
    for number, gpu in enumerate(found.gpus):
        taken = memory.used(found.needs, found.blocks[0] * 16, number)
        assert taken <= memory.room_of(gpu.free)
    shared = plan(gpus(100))
    assert sum(shared.gpu_plan.memory_limits) <= memory.limits_of(int(100 * GIB))
    # What else a process takes is an estimate: most of the reserve is there for what it missed.
    for need, limit, blocks in zip(
        shared.needs, shared.gpu_plan.memory_limits, shared.blocks, strict=True
    ):
        assert limit - need.size(16 * blocks) > GIB


def test_given_tokens_and_given_memory():
    assert plan(gpus(140), kv_tokens=(32000, 1000)).blocks == [2000, 62]
    found = plan(gpus(140), memory=GIB)
    per_block = 16 * sum(need.per_token for need in found.needs)
    assert found.blocks == [GIB // per_block] * 2


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"gpus": ((0,), (2,))}, r"--gpus 0/2: there is no GPU 2; there are 0, 1"),
        ({"gpus": ((0,),)}, r"--gpus 0: 1 groups for 2 models"),
        ({"gpus": ((0,), (0, 0))}, r"32b needs GPUs, each named once"),
        ({"gpus": ((0,), (0, 1)), "tp": (1, 1)}, r"32b has 1 processes and 2 GPUs"),
        ({"gpus": ((0,), (1,)), "tp": (1,)}, r"--tp: 1 numbers for 2 models"),
        ({"tp": (1, 3)}, r"--tp 3: 32b needs 3 GPUs; this machine has 2"),
        ({"mps": "on", "gpus": ((0,), (1,))}, r"--mps on: no two models .* use --mps auto"),
        ({"mps": "on", "gpus": ((0,), (0, 1))}, r"spans GPUs takes no part"),
        ({"kv_tokens": (8, 8)}, r"a block has 16 tokens"),
        ({"kv_tokens": (320,)}, r"2 models need a number each"),
        ({"kv_tokens": (10**9, 10**9)}, r"GPU 0 would hold"),
    ],
)
def test_flags_that_are_wrong(asked, expected):
    with pytest.raises(ConfigError, match=expected):
        plan(gpus(140, 140), **asked)


def test_heads_that_cannot_be_divided():
    spec = replace(alias_spec("32b"), num_heads=40, num_kv_heads=8)
    odd = GpuModel("odd", spec, 2, row_tokens=4096)
    with pytest.raises(ConfigError, match="--tp 3: the 40 attention heads of odd"):
        plan(gpus(140, 140, 140), (odd,), gpus=((0, 1, 2),))
    narrow = replace(odd, spec=replace(spec, num_kv_heads=2))
    with pytest.raises(ConfigError, match="--tp 4: the 2 KV heads"):
        plan(gpus(140, 140, 140, 140), (narrow,), tp=(4,))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"capability": (7, 5)}, "compute capability 7.5, but 8.0"),
        ({"compute_mode": PROHIBITED}, "nvidia-smi -i 0 -c DEFAULT"),
        ({"free": 20 * GIB}, r"GPU 0 .* has 20.0 GiB free.*32b"),
    ],
)
def test_gpus_that_will_not_do(changes, expected):
    with pytest.raises(ModelUnavailableError, match=expected):
        plan(gpus(140, **changes))


def test_a_capability_that_nobody_states_is_believed():
    assert plan(gpus(140, capability=(0, 0))).groups == [(0,), (0,)]


@pytest.mark.parametrize("mps", ["auto", "off"])
def test_an_exclusive_gpu_is_shared_through_mps_or_not_at_all(mps):
    there = gpus(140, compute_mode=EXCLUSIVE)
    if mps == "auto":
        assert plan(there, mps=mps).gpu_plan.clients
        return
    with pytest.raises(ConfigError, match="takes one process, but 2 models share it"):
        plan(there, mps=mps)


def test_mps_that_cannot_be_had(programs):
    (programs / "nvidia-cuda-mps-control").unlink()
    with pytest.raises(ConfigError, match="--mps on: there is no nvidia-cuda-mps-control"):
        plan(gpus(140), mps="on")
    assert plan(gpus(140)).gpu_plan.clients, "the launcher says what came of it"


def test_shares_and_restart_units():
    four = plan(gpus(140), [model("0.6b")] * 4).gpu_plan
    assert four.percentages == [50] * 4
    assert restart_unit(four, 2) == {0, 1, 2, 3}
    two = plan(gpus(140, 140), [model("0.6b")] * 3, gpus=((0,), (1,), (1,))).gpu_plan
    assert two.percentages == [0, 100, 100]
    assert restart_unit(two, 0) == {0}
    assert restart_unit(two, 1) == restart_unit(two, 2) == {1, 2}


def test_no_driver(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ModelUnavailableError, match="--device cuda: there is no nvidia-smi"):
        find_gpus({})
