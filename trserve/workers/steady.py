"""The rows of steps in which the same requests decode, one token each, as in the step before.

What such a step needs is then what the last one needed, counted up by one: it is kept in arrays,
one entry a row, and nothing is asked of each request but at the start of a block and at the end.
What the arrays say is derived: requests, table and pool say the same after every step, so that the
rows may be given up at any time.

Knows the table and the step's inputs; no model and no router. Whoever uses it watches
``RequestTable.version``: once that has moved, the rows mean nothing any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from trserve.ipc.baton import ONE_TOKEN
from trserve.router_lib.base import StepResult
from trserve.workers.memory import Plan
from trserve.workers.question import early_question, question
from trserve.workers.request import Request
from trserve.workers.row_sampling import BatchSampling
from trserve.workers.runner import ForwardOutput
from trserve.workers.sampler import NO_TOKEN, RowSampling
from trserve.workers.step import MIN_WIDTH, StepInputs
from trserve.workers.table import RequestTable

STAY: Final = 0


def is_steady(plan: Plan, table: RequestTable) -> bool:
    """Whether ``plan`` is a step that can be followed by others like it.

    All that may run decode, nobody waits, and what is computed is in the prefix cache as far as it
    can be, so that the next change to a row's blocks comes where its next block begins.
    """
    # A prompt's chunk would be the last row.
    if table.waiting or len(plan) != len(table.runnable) or plan[-1][1] != 1:
        return False
    pool = table.pool
    return all(
        tokens == request.remaining == 1
        and request.prompt_len <= request.num_computed
        and not request.full
        and pool.cached_up_to_date(request)
        for request, tokens in plan
    )


class SteadyRows:
    """One entry a request, in the order of the step's rows; see the module.

    Args:
        requests: those of a plan that :func:`is_steady`, which have the blocks for one step.
        params: their router parameters, as in ``StepResult``.

    Attributes:
        version: the table's when this was made.
        pinned: whether none of them ever leaves, so that no router need be asked.
        stay: what a router says that sends none of them away.
        params: as they were given.
        inputs: of the next step.
        places: int64, where ``RowWriter.write`` puts what each row samples in it.
        destinations: what the router has said of it; None until it was asked.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        table: RequestTable,
        inputs: StepInputs,
        params: Mapping[str, torch.Tensor],
    ) -> None:
        self.requests = list(requests)
        self.version = table.version
        self.pinned = all(request.pinned for request in requests)
        self.stay = [STAY] * len(requests)
        self.params: Mapping[str, torch.Tensor] | None = params
        self.destinations: Sequence[int | None] | None = None
        self._is_prefill = torch.zeros(len(requests), dtype=torch.bool)
        self._table, self.inputs = table, inputs
        self._slots = [request.slot for request in requests]
        self._sampling = BatchSampling(requests)
        # Steps until the first of them is as long as it may get, this one included.
        self._room = min(request.limit - request.length for request in requests)
        self._exceptions = frozenset({NO_TOKEN}).union(*(r.stop_ids for r in requests))
        table.rows.fill_decodes(requests, inputs)
        # The row's length, at which its next token comes to be, is that of its KV after the step.
        self._lengths = inputs.kv_len[: len(requests)]
        # What grows, and by how much: the places of the next tokens, and the words to store.
        self._growing = np.zeros((2, max(len(requests), MIN_WIDTH)), np.int64)
        self._growth = np.array([[1], [ONE_TOKEN]]).repeat(self._growing.shape[1], axis=1)
        self.places, self._words = self._growing[:, : len(requests)]
        self.places[:] = table.rows.places(requests)
        self._words[:] = [request.word + ONE_TOKEN for request in requests]
        self._starts = self._block_starts()
        self._turn = 0

    def _block_starts(self) -> list[list[int]]:
        """The rows that begin a block after 0, 1, ... steps; it repeats after a block's tokens."""
        size = self.inputs.block_size
        starts: list[list[int]] = [[] for _ in range(size)]
        for row, request in enumerate(self.requests):
            starts[-request.num_computed % size].append(row)
        return starts

    @property
    def starts_blocks(self) -> bool:
        """Whether the step takes blocks, or puts any into the cache."""
        return bool(self._starts[self._turn])

    def take_blocks(self) -> bool:
        """Give the rows that begin a block the block; False where the pool is short of them.

        What was given until then is in the requests' tables, for a step that is chosen anew.
        """
        for row in self._starts[self._turn]:
            request = self.requests[row]
            if not self._table.pool.extend(request, request.length):
                return False
            index = request.num_computed // self.inputs.block_size
            self.inputs.start_block(row, index, int(request.block_table[index]))
        return True

    def note_computed(self) -> None:
        """After the forward: cache the blocks that a row's last token was the first behind."""
        tables = self.inputs.block_tables
        for row in self._starts[self._turn]:
            request = self.requests[row]
            request.num_computed = request.length
            first = request.num_cached
            self._table.pool.note_computed([(request, 1)])
            # The cache may have had a block that is put in the place of the request's own.
            tables[row, first : request.num_cached] = request.block_table[
                first : request.num_cached
            ]

    def sampling(self) -> RowSampling:
        """How each row draws its token."""
        return self._sampling.at(self._lengths)

    def fixed_sampling(self) -> RowSampling | None:
        """The same, if nothing but the position varies from step to step; else None."""
        return self._sampling.fixed(self._lengths)

    def show(self, tokens: NDArray[np.int64]) -> None:
        """Write ``tokens`` past the committed lengths, as ``RowWriter.show`` does."""
        self._table.rows.write(self.places, tokens)
        if not self.pinned:
            for request in self.requests:
                request.visible = request.length + 1

    def result(self, output: ForwardOutput, tokens: NDArray[np.int64]) -> StepResult:
        """What a router is asked about."""
        assert self.params is not None
        return question(output, tokens, self.params, self.requests, self._is_prefill)

    def early_result(self) -> StepResult:
        """The same before the step is over."""
        assert self.params is not None
        return early_question(self.params, self.requests, self._is_prefill)

    def count_computed(self) -> None:
        """Say in each request that the step computed its token."""
        for request in self.requests:
            request.num_computed = request.length

    def commit(self, tokens: list[int]) -> bool:
        """Commit ``tokens`` for requests that all go on here.

        False, and nothing, where a row is not finite or some request may end: each of them must
        then be looked at, after :meth:`count_computed`.
        """
        if self._room <= 1 or not self._exceptions.isdisjoint(tokens):
            return False
        for request in self.requests:
            request.num_computed = length = request.length
            request.length = length + 1
        self._table.stay_all(self._slots, self._words.tolist())
        return True

    def advance(self, tokens: NDArray[np.int64]) -> None:
        """Go on to the next step, after one in which all committed ``tokens`` and stayed."""
        self.inputs.advance_decode_rows(tokens)
        np.add(self._growing, self._growth, self._growing)
        self._room -= 1
        self._turn = (self._turn + 1) % len(self._starts)
