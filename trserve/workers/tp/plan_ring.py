"""How rank 0 tells the other ranks what the next step is: one writer, a ring of plans, N readers.

A plan is what ``StepInputs`` holds, as it lies there: ids, positions, slots and lengths are copied
into an entry of fixed size, by as many bytes as the step has tokens and rows. The block tables are
not copied: rank 0 keeps its own in the group's memory (:meth:`PlanWriter.adopt`), where the others
read them. So nothing is packed, and no step costs more for a longer context.

That is safe because the sums of a step hold the ranks together. A rank reads the tables before it
gives its part of the step's last sum, and rank 0 writes them only after it has that sum; where it
does not wait for that, on a device, it waits until all have taken the plan instead. The
entries, of which a rank may still read something after the last sum, are two, and each is written
anew only when all ranks are done with it.

Once in so many steps both sides work out a digest of the plan; if they differ, memory order or a
bound was violated, and the group ends at once instead of computing two different things.

Memory order. Writer: arrays, counts, ``store_fence``, the number of plans, then the doorbells.
Reader: the number, ``load_fence``, counts, arrays. Knows no tensors and no sums.
"""

from __future__ import annotations

import select
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from trserve.ipc.doorbell import ring, silence
from trserve.ipc.fence import load_fence, store_fence
from trserve.workers.step import StepInputs
from trserve.workers.tp.memory import (
    PLANS,
    GroupLostError,
    GroupMemory,
    PlanArrays,
    Trouble,
)
from trserve.workers.tp.waiting import WAIT_S, Waiter, Wakeup

CHECK_EVERY: Final = 64
"""Steps between two digests."""
_WINDOW: Final = 32
"""Columns of the block tables in a digest: others each time, so that its cost is fixed."""
_BELT_MS: Final = 1000
_TOKENS, _ROWS, _ALSO, _DIGEST = range(4)
_NONE: Final = -1
_NO_DIGEST: Final = -1

_Int64Array = npt.NDArray[np.int64]


def digest(number: int, plan: PlanArrays, tables: npt.NDArray[np.int32]) -> int:
    """A checksum of plan ``number``: its arrays, and a window of its rows' block tables."""
    tokens, rows, also = (max(0, plan.counts[at]) for at in (_TOKENS, _ROWS, _ALSO))
    windows = -(-tables.shape[1] // _WINDOW)
    first = number // CHECK_EVERY % windows * _WINDOW
    arrays: tuple[npt.NDArray[np.integer], ...] = (
        np.array([number, tokens, rows, also], np.int64),
        plan.token_ids[:tokens],
        plan.positions[:tokens],
        plan.slots[:tokens],
        plan.also[:also],
        plan.query_start[: rows + 1],
        plan.kv_len[:rows],
        np.ascontiguousarray(tables[:rows, first : first + _WINDOW]),
    )
    found = 0
    for array in arrays:
        found = zlib.crc32(array.data, found)
    return found


class PlanWriter:
    """Rank 0's end.

    Args:
        bells: the doorbells of the other ranks.
        spin: rounds to stay awake for a rank that is late.
    """

    def __init__(
        self,
        memory: GroupMemory,
        bells: Sequence[int],
        *,
        spin: int,
        timeout_s: float = WAIT_S,
    ) -> None:
        self._memory, self._bells = memory, tuple(bells)
        self._number = 0
        self._adopted: StepInputs | None = None
        self._done = [
            Waiter(
                memory,
                memory.done_at(rank),
                spin=spin,
                trouble=Trouble.LATE_FOR_PLAN,
                timeout_s=timeout_s,
            )
            for rank in range(1, memory.layout.ranks)
        ]

    def tell(self, step: StepInputs, also: _Int64Array | None) -> None:
        """Tell all ranks to compute ``step``, with the further tokens ``also``.

        Raises:
            GroupLostError: another rank has stopped, or hangs.
        """
        self.adopt(step)
        self.publish(step, also)

    def adopt(self, step: StepInputs) -> None:
        """Let the block tables of ``step`` lie where all ranks read them, from now on.

        Rank 0 has one set of inputs for all its steps, as a worker does.
        """
        if step is self._adopted:
            return
        if self._adopted is not None or step.block_tables.shape != self._memory.tables.shape:
            raise GroupLostError(
                "the ranks of a model follow one set of step inputs, made for them"
            )
        self._memory.tables[:] = step.block_tables
        step.block_tables = self._memory.tables
        self._adopted = step

    def publish(self, step: StepInputs, also: _Int64Array | None) -> None:
        """:meth:`tell`, once the tables of ``step`` are adopted."""
        number, tokens, rows = self._number, step.num_tokens, step.num_rows
        for waiter in self._done:
            waiter.reach(number - PLANS + 1)
        plan = self._memory.plans[number % PLANS]
        plan.token_ids[:tokens] = step.token_ids[:tokens]
        plan.positions[:tokens] = step.positions[:tokens]
        plan.slots[:tokens] = step.slots[:tokens]
        plan.query_start[: rows + 1] = step.query_start[: rows + 1]
        plan.kv_len[:rows] = step.kv_len[:rows]
        counts = plan.counts
        counts[_TOKENS], counts[_ROWS] = tokens, rows
        counts[_ALSO] = _NONE if also is None else len(also)
        if also is not None:
            plan.also[: len(also)] = also
        checked = number % CHECK_EVERY == 0
        counts[_DIGEST] = digest(number, plan, self._memory.tables) if checked else _NO_DIGEST
        self._ring(number + 1)

    def await_taken(self) -> None:
        """Return once all ranks are done with the plan that was told last.

        For whoever writes the block tables again without having waited for the step's sums.

        Raises:
            GroupLostError: another rank has stopped, or hangs.
        """
        for waiter in self._done:
            waiter.reach(self._number)

    def end(self) -> None:
        """Let the other ranks leave: there will be no further step."""
        self._memory.stop(Trouble.ENDED)
        for bell in self._bells:
            ring(bell)

    def _ring(self, number: int) -> None:
        store_fence()
        self._memory.words[self._memory.published_at] = number
        self._number = number
        for bell in self._bells:
            ring(bell)


class PlanReader:
    """The end of a rank other than 0.

    Args:
        bell: this rank's doorbell.
        block_size: of the KV cache, in tokens.
        watched: further descriptors, with what to do when one can be read: False is to leave.
        spin: rounds that it stays awake after a step, in which the next one may come.

    Attributes:
        leaving: whether to leave as soon as it has slept for a second, whatever rank 0 says.
        late_wakeups: sleeps that ended by the belt and found a plan. A bell was lost: a defect.
    """

    def __init__(
        self,
        memory: GroupMemory,
        bell: int,
        block_size: int,
        watched: Mapping[int, Callable[[], bool]],
        *,
        spin: int,
    ) -> None:
        self._memory, self._bell, self._watched = memory, bell, watched
        self._rounds = range(spin)
        self._number = 0
        self._done_word = memory.done_at(memory.rank)
        self._wakeup = Wakeup(memory, self._done_word)
        self._steps = [_inputs_over(plan, memory.tables, block_size) for plan in memory.plans]
        self._poller = select.poll()
        for fd in (bell, *watched):
            self._poller.register(fd, select.POLLIN)
        self.leaving = False
        self.late_wakeups = 0

    def next(self) -> tuple[StepInputs, _Int64Array | None] | None:
        """The next step, in place, and the further tokens wanted; None once there is none to come.

        What is returned is valid until :meth:`done`.

        Raises:
            GroupLostError: another rank has stopped, or this plan is not what rank 0 wrote.
        """
        if not self._wait():
            return None
        memory, number = self._memory, self._number
        plan, step = memory.plans[number % PLANS], self._steps[number % PLANS]
        counts = plan.counts
        step.num_tokens, step.num_rows = counts[_TOKENS], counts[_ROWS]
        expected = counts[_DIGEST]
        if expected != _NO_DIGEST and expected != digest(number, plan, memory.tables):
            memory.stop(Trouble.PLAN_DIFFERS)
            memory.check()
        also = None if counts[_ALSO] == _NONE else plan.also[: counts[_ALSO]]
        return step, also

    def done(self) -> None:
        """Say that the step is computed: nothing of it is read any more."""
        self._number += 1
        store_fence()
        self._memory.words[self._done_word] = self._number
        self._wakeup.wake()

    def _wait(self) -> bool:
        """Whether there is a next plan; sleeps until there is, or it is time to leave."""
        words, word, number = self._memory.words, self._memory.published_at, self._number
        for _ in self._rounds:
            if words[word] > number:
                break
        by_belt = False
        while words[word] <= number:
            if words[self._memory.trouble_at(0)] == Trouble.ENDED or (by_belt and self.leaving):
                return False
            self._memory.check()
            ready = [fd for fd, _ in self._poller.poll(_BELT_MS)]
            by_belt = not ready
            silence(self._bell)
            if not all(self._watched[fd]() for fd in ready if fd != self._bell):
                return False
        self.late_wakeups += by_belt
        load_fence()
        return True


def _inputs_over(plan: PlanArrays, tables: npt.NDArray[np.int32], block_size: int) -> StepInputs:
    """Step inputs whose arrays are those of ``plan``, in place."""
    step = StepInputs(max_tokens=1, max_rows=1, max_blocks_per_row=1, block_size=block_size)
    step.token_ids, step.positions, step.slots = plan.token_ids, plan.positions, plan.slots
    step.query_start, step.kv_len, step.block_tables = plan.query_start, plan.kv_len, tables
    return step
