"""From the launcher's descriptors to a group: what is made, closed, chosen and refused."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from tests.workers.tp.groups import grouped
from trserve.errors import ConfigError, ModelUnavailableError, StartFailedError
from trserve.plan import ModelPlan, ServerPlan
from trserve.workers.tp import group_files, joining
from trserve.workers.tp.group_files import group_fds, group_layout
from trserve.workers.tp.joining import Place, create_group
from trserve.workers.tp.memory import GroupMemory
from trserve.workers.tp.shared_sum import SharedMemoryGroup
from trserve.workers.tp.waiting import LONG_SPIN, SHORT_SPIN


def plan_of(*tp: int, **changes: object) -> ServerPlan:
    """A plan whose models have so many ranks, and one thread a rank."""
    models = [
        ModelPlan(name=f"m{i}", path="", dtype="float32", max_model_len=64, threads=1, tp=size)
        for i, size in enumerate(tp)
    ]
    settings = {
        "models": models,
        "device": "cpu",
        "router": "none",
        "router_config": {},
        "tokenizer_path": "",
        "tokenizer_size": 64,
        "eos_token_ids": [],
        "served_names": [],
        "slots": 4,
        "row_tokens": 64,
        "block_size": 4,
        "max_rows": 8,
        "max_tokens": 64,
    }
    return ServerPlan(**{**settings, **changes})


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_descriptors_are_for_one_start_and_closed_after_it():
    plan, before = plan_of(1, 3), open_fds()
    with group_fds(plan, 1) as fds:
        assert len(fds) == 2 + 2
        assert not any(os.get_inheritable(fd) for fd in fds)
        GroupMemory(fds[0], group_layout(plan, 1), 2)
        names = [os.readlink(f"/proc/self/fd/{fd}") for fd in fds]
        assert all(name.startswith(("/memfd:", "anon_inode:")) for name in names)
    with group_fds(plan, 0) as none:
        assert none == ()
    assert open_fds() == before


def test_a_start_without_room_says_what_to_look_at(monkeypatch):
    def no_room(name: str, flags: int) -> int:
        raise OSError(24, "Too many open files")

    before = open_fds()
    monkeypatch.setattr(group_files.os, "memfd_create", no_room)
    refused = pytest.raises(StartFailedError, match=r"m1 cannot be given .* Too many open files")
    with refused, group_fds(plan_of(1, 2), 1):
        raise AssertionError("nothing may be started")
    assert open_fds() == before


def test_the_memory_is_as_large_as_the_steps_of_the_worker():
    plan = plan_of(1, 2, max_rows=5, max_tokens=70, row_tokens=100, block_size=16)
    layout = group_layout(plan, 1)
    assert (layout.ranks, layout.max_rows, layout.max_tokens) == (2, 5, 70)
    assert layout.table_width == 7


def test_ranks_stay_awake_for_each_other_only_where_there_are_cores(monkeypatch):
    monkeypatch.setattr(joining.os, "sched_getaffinity", lambda _: set(range(3)))
    assert Place(plan_of(1, 2), 1, 0, ()).spin == LONG_SPIN
    assert Place(plan_of(2, 2), 1, 0, ()).spin == SHORT_SPIN


def test_the_way_to_add_up_can_be_chosen_and_must_exist(monkeypatch):
    with grouped(2) as group:
        place = Place(plan_of(1, 2), 1, 0, (group.fd, -1, *group.bells))
        monkeypatch.delenv(joining.CHOICE, raising=False)
        assert isinstance(create_group(place, group.memories[0]), SharedMemoryGroup)
        monkeypatch.setenv(joining.CHOICE, "carrier-pigeon")
        with pytest.raises(ConfigError, match=r"TRSERVE_TP_SUMS=carrier-pigeon: .* 'gloo'"):
            create_group(place, group.memories[0])


def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    """The launcher lets each rank see its own GPU alone, as its first."""
    from trserve.workers.tp.gpu import rank_device

    plan = plan_of(1, 2, device="cuda")
    assert rank_device(plan_of(1, 2), plan.models[1], 1) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert rank_device(plan, plan.models[1], 1) == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelUnavailableError, match="m1, rank 1: torch finds no GPU"):
        rank_device(plan, plan.models[1], 1)


@pytest.mark.parametrize("device", [None, torch.device("cuda", 0)])
def test_a_librarys_group_begins_once_all_ranks_have_loaded(monkeypatch, device):
    """It waits for a rank as long as a step may take, and the first has most to load."""
    began = []
    for name in ("GlooGroup", "NcclGroup"):
        monkeypatch.setattr(joining, name, lambda fd, rank, *_: began.append(rank))
    monkeypatch.setenv(joining.CHOICE, "gloo")
    with grouped(2) as group:
        places = [Place(plan_of(2), 0, rank, (group.fd, -1, *group.bells)) for rank in (0, 1)]
        early = threading.Thread(target=create_group, args=(places[1], group.memories[1], device))
        early.start()
        early.join(0.1)
        assert began == []
        create_group(places[0], group.memories[0], device)
        early.join(10)
        assert sorted(began) == [0, 1]
