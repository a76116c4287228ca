"""The rows of a step that was chosen anew, and what follows for its requests from its plan alone.

None of that waits for the step's output: where a device computes, it is done meanwhile. Knows the
table, and what a router is to be asked; samples, decides and commits nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trserve.router_lib.base import StepResult
from trserve.workers.memory import Plan
from trserve.workers.question import early_question, question
from trserve.workers.request import Request
from trserve.workers.runner import ForwardOutput
from trserve.workers.states import State
from trserve.workers.table import RequestTable

_WAITING = State.WAITING


class ChosenRows:
    """One row an entry of ``plan``; what it says of them holds once they are settled.

    Attributes:
        due: the rows that sample a token.
        over: those of requests that wanted nothing but their prompts, which end with the step.
        requests: of the rows that are due, in their order.
        pinned: whether none of these ever leaves, so that no router need be asked.
        params: their router parameters, as in ``StepResult``; None until somebody gives them.
        destinations: what the router has said of them; None until it was asked.
        places: int64, where ``RowWriter.write`` puts what each of these samples.
        prompts: how many rows computed some of a prompt.
    """

    __slots__ = (
        "_is_prefill",
        "_table",
        "destinations",
        "due",
        "over",
        "params",
        "pinned",
        "places",
        "plan",
        "prompts",
        "requests",
    )

    def __init__(self, plan: Plan, table: RequestTable) -> None:
        self.plan = plan
        self._table = table
        self.due: list[int] = []
        self.over: list[int] = []
        self.requests: list[Request] = []
        self.pinned = True
        self.params: Mapping[str, torch.Tensor] | None = None
        self.destinations: Sequence[int | None] | None = None
        self.places: NDArray[np.int64] = _NONE
        self.prompts = 0

    @property
    def all_due(self) -> bool:
        """Whether every row samples a token."""
        return len(self.due) == len(self.plan)

    @property
    def has_rest(self) -> bool:
        """Whether some row is in the middle of its prompt or suffix."""
        return len(self.due) + len(self.over) < len(self.plan)

    def settle(self) -> None:
        """Note in each request and in the pool what the step computes. Once, after it has begun."""
        table = self._table
        if table.waiting:
            self._start_waiting()
        prefill = list[bool]()
        for row, (request, tokens) in enumerate(self.plan):
            before = request.num_computed
            request.num_computed = after = before + tokens
            prefills = before < request.prompt_len
            self.prompts += prefills
            if after != request.length:
                continue
            if prefills and request.full:
                self.over.append(row)
            else:
                self.due.append(row)
                self.requests.append(request)
                prefill.append(prefills)
        table.pool.note_computed(self.plan)
        if self.requests:
            self.places = table.rows.places(self.requests)
            self.pinned = all(request.pinned for request in self.requests)
            self._is_prefill = torch.from_numpy(np.array(prefill))

    def result(self, output: ForwardOutput, tokens: NDArray[np.int64]) -> StepResult:
        """What a router is asked about, of the rows that are due; ``params`` are there by then."""
        assert self.params is not None
        return question(output, tokens, self.params, self.requests, self._is_prefill)

    def early_result(self) -> StepResult:
        """The same before the step is over."""
        assert self.params is not None
        return early_question(self.params, self.requests, self._is_prefill)

    def _start_waiting(self) -> None:
        for request, _ in self.plan:
            if request.state is _WAITING:
                self._table.start(request)


_NONE = np.zeros(0, np.int64)
