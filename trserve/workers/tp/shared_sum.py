"""Sums over the ranks in the memory that they share: the collective of processes on one host's CPU.

Each rank puts its part into a bank of its own, says so by one word, waits for the others' words and
adds all parts up by itself, in the order of the ranks: so the sums agree to the last bit. There are
two banks, taken in turns. A rank that gives the sum after the next writes over a bank only once all
others have given the next one, for which they must have read this one.

Beside a library's collective over sockets (hundreds of microseconds on one host) a sum of a few
kilobytes takes some microseconds. Knows tensors and words; nothing of decoders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from trserve.ipc.fence import store_fence
from trserve.workers.tp.memory import BANK_BYTES, BANKS, GroupMemory, Trouble
from trserve.workers.tp.waiting import WAIT_S, Waiter, Wakeup

_KEPT_SHAPES: Final = 256


@dataclass(slots=True)
class _Parts:
    """The parts of a sum of one dtype and length: one's own, and all of them by rank."""

    own: torch.Tensor
    by_rank: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor


class SharedMemoryGroup:
    """The ranks of ``memory``; see :class:`trserve.models.sharding.Collective`.

    Args:
        spin: rounds that a rank stays awake for another.
    """

    def __init__(self, memory: GroupMemory, *, spin: int, timeout_s: float = WAIT_S) -> None:
        self.rank, self.size = memory.rank, memory.layout.ranks
        self._words = memory.words
        self._word = memory.summed_at(self.rank)
        self._wakeup = Wakeup(memory, self._word)
        self._given = 0
        self._waiters = [
            Waiter(
                memory,
                memory.summed_at(rank),
                spin=spin,
                trouble=Trouble.LATE_FOR_SUM,
                timeout_s=timeout_s,
            )
            for rank in range(self.size)
            if rank != self.rank
        ]
        self._banks = [torch.from_numpy(memory.banks(bank)) for bank in range(BANKS)]
        self._kept: dict[tuple[torch.dtype, int], list[_Parts]] = {}

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace contiguous ``x``, on the CPU, by the sum over all ranks."""
        flat = x.view(-1)
        most = BANK_BYTES // x.element_size()
        if len(flat) <= most:
            self._sum(flat)
            return
        for first in range(0, len(flat), most):
            self._sum(flat[first : first + most])

    def close(self) -> None:
        """Nothing is open."""

    def _sum(self, x: torch.Tensor) -> None:
        number = self._given
        parts = self._parts(x)[number % BANKS]
        parts.own.copy_(x)
        self._given = number = number + 1
        store_fence()
        self._words[self._word] = number
        self._wakeup.wake()
        for waiter in self._waiters:
            waiter.reach(number)
        if self.size == 2:
            torch.add(parts.first, parts.second, out=x)
        else:
            torch.sum(parts.by_rank, 0, out=x)

    def _parts(self, x: torch.Tensor) -> list[_Parts]:
        key = (x.dtype, len(x))
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= _KEPT_SHAPES:
                self._kept.clear()
            found = self._kept[key] = [self._cut(bank, x) for bank in self._banks]
        return found

    def _cut(self, bank: torch.Tensor, x: torch.Tensor) -> _Parts:
        by_rank = bank.view(x.dtype)[:, : len(x)]
        return _Parts(by_rank[self.rank], by_rank, by_rank[0], by_rank[1])
