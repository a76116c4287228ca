"""Sums over ranks in shared memory: right, the same on every rank, and never waited for in vain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.workers.tp.groups import grouped, together
from trserve.errors import StartupError
from trserve.workers.tp.memory import (
    BANK_BYTES,
    GroupLayout,
    GroupLostError,
    GroupMemory,
    Trouble,
)
from trserve.workers.tp.waiting import Waiter

RANK_1 = """
import sys, torch
from trserve.workers.tp.memory import GroupLayout, GroupMemory
from trserve.workers.tp.shared_sum import SharedMemoryGroup
sums = SharedMemoryGroup(GroupMemory(int(sys.argv[1]), GroupLayout(2, 64, 8, 16), 1), spin=100)
print("here", flush=True)
while True:
    x = torch.ones(200)
    sums.all_reduce(x)
    assert bool((x == 3).all())
"""


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_get_the_same_sum(ranks, dtype):
    """Lengths below, at and beyond a bank, one after the other."""
    a_bank = BANK_BYTES // dtype.itemsize
    lengths = [1, 7, 192, 192, a_bank - 1, a_bank, a_bank + 1, 2 * a_bank + 3, 5]
    torch.manual_seed(ranks)
    parts = [torch.randn(ranks, length).to(dtype) for length in lengths]

    with grouped(ranks) as group:

        def work(rank):
            sums, found = group.sums(rank), []
            for part in parts:
                x = part[rank].clone().view(-1, 1)
                sums.all_reduce(x)
                found.append(x.view(-1))
            return found

        results = together([lambda rank=rank: work(rank) for rank in range(ranks)])
    for part, first, *others in zip(parts, *results, strict=True):
        assert all(torch.equal(first, other) for other in others)
        error = (first.double() - part.double().sum(0)).abs().max()
        assert error <= part.abs().sum(0).max() * torch.finfo(dtype).eps


def test_a_rank_that_does_not_come_is_named_as_the_reason():
    with grouped(2) as group:
        with pytest.raises(GroupLostError, match=r"rank 0 waited 0.2 s .* to come to a sum"):
            group.sums(0, timeout_s=0.2).all_reduce(torch.ones(3))
        with pytest.raises(GroupLostError, match=r"^rank 0 waited in vain .* sum: its group ends$"):
            group.memories[1].check()


def test_who_waits_learns_at_once_that_another_rank_has_stopped():
    with grouped(2) as group:

        def wait():
            began = time.monotonic()
            with pytest.raises(GroupLostError, match="rank 1 failed: its group ends"):
                group.sums(0).all_reduce(torch.ones(3))
            return time.monotonic() - began

        def stop():
            time.sleep(0.1)
            group.memories[1].stop(Trouble.FAILED)
            group.memories[1].stop(Trouble.LATE_FOR_SUM)  # a consequence: the first reason stays

        waited, _ = together([wait, stop])
    assert waited < 2.0


def test_a_wakeup_is_not_lost():
    """Two ranks that always sleep for each other: each sum needs a wake-up in either direction."""
    with grouped(2) as group:

        def work(rank):
            sums, x = group.sums(rank), torch.zeros(4)
            began = time.monotonic()
            for _ in range(3000):
                sums.all_reduce(x)
            return time.monotonic() - began

        slowest = max(together([lambda rank=rank: work(rank) for rank in range(2)]))
    # A lost one costs the 50 ms after which a sleeper looks by itself.
    assert slowest < 3000 * 0.002


def test_processes_add_up_and_one_that_is_killed_is_missed():
    with grouped(2) as group:
        os.set_inheritable(group.fd, True)
        command = [sys.executable, "-c", RANK_1, str(group.fd)]
        rank = subprocess.Popen(command, pass_fds=[group.fd], stdout=subprocess.PIPE, text=True)
        try:
            assert rank.stdout.readline() == "here\n"
            sums, x = group.sums(0, timeout_s=1.0), torch.empty(200)
            for _ in range(2000):
                sums.all_reduce(x.fill_(2))
                assert bool((x == 3).all())
            rank.send_signal(signal.SIGKILL)
            with pytest.raises(GroupLostError, match="waited 1 s"):
                for _ in range(1000):
                    sums.all_reduce(x.fill_(2))
                    rank.wait(10)
        finally:
            rank.kill()
            rank.wait(10)


def test_memory_of_another_shape_is_refused():
    with grouped(2) as group:
        with pytest.raises(StartupError, match=r"expects .* bytes"):
            GroupMemory(group.fd, GroupLayout(3, 64, 8, 16), 1)
        os.pwrite(group.fd, bytes(8), 0)
        with pytest.raises(StartupError, match="another version"):
            GroupMemory(group.fd, group.layout, 1)


def test_nothing_lies_over_anything_else():
    """Words, plans, tables and banks, by writing to each and looking at all others."""
    with grouped(3, max_tokens=5, max_rows=3, width=3) as group:
        memory = group.memories[0]
        regions = {"tables": memory.tables}
        for index, plan in enumerate(memory.plans):
            for name in ("token_ids", "positions", "slots", "also", "query_start", "kv_len"):
                regions[f"{name} {index}"] = getattr(plan, name)
        for bank in range(2):
            for rank in range(3):
                regions[f"bank {bank} of {rank}"] = memory.banks(bank)[rank]
        before = list(memory.words)
        for mark, array in enumerate(regions.values(), 1):
            array[:] = mark
        for mark, (name, array) in enumerate(regions.items(), 1):
            assert (array == mark).all(), name
        assert list(memory.words) == before
        named = {
            word(rank)
            for word in (memory.joined_at, memory.done_at, memory.summed_at, memory.trouble_at)
            for rank in range(3)
        }
        assert len(named | {memory.published_at}) == 13
        assert max(named) < len(before) and min(named) > len(group.layout.signature)


def test_waiting_is_bounded_without_anybody_else():
    with grouped(2) as group:
        memory = group.memories[0]
        waiter = Waiter(
            memory, memory.joined_at(1), spin=10, trouble=Trouble.LATE_TO_JOIN, timeout_s=0.1
        )
        waiter.reach(0)
        with pytest.raises(GroupLostError, match="to load their shares"):
            waiter.reach(1)
