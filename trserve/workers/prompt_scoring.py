"""Log probabilities of a prompt's own tokens, for requests that asked for them.

The logits after one token of the prompt say how probable the next one was. They are computed while
the prompt is, by whichever worker computes it first, and never twice: how far it has come stands
in the annotation book, so that a successor or a peer goes on from there. Knows requests and
annotation books; nothing of routing or sampling.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from trserve.workers.logprobs import Wanted, write_logprobs
from trserve.workers.memory import Plan
from trserve.workers.request import Request
from trserve.workers.runner import Runner

HEAD_ROWS: Final = 64
"""Logits computed at a time: a whole chunk's, over a large vocabulary, would be gigabytes."""


class PromptScores:
    """The prompt tokens that one step scores.

    Attributes:
        tokens: int64 [K], indices into the step's tokens whose hidden states are needed; empty
            where nobody asked.
    """

    def __init__(self, plan: Plan) -> None:
        self._wanted: list[Wanted] = []
        self._scored: list[tuple[Request, int]] = []
        indices: list[NDArray[np.int64]] = []
        first = 0
        for request, count in plan:
            if request.needs_scoring:
                indices.append(first + self._add(request, count))
            first += count
        self.tokens = np.concatenate(indices) if indices else np.empty(0, np.int64)

    def _add(self, request: Request, count: int) -> NDArray[np.int64]:
        """Note the positions that ``request`` scores; returns the chunk's offsets they follow."""
        book, tops = request.book, request.params.tops
        assert book is not None and tops is not None
        start = request.num_computed
        begin = max(1, book.scored, start + 1)
        end = min(start + count + 1, request.prompt_len)
        row = request.token_ids
        self._wanted += [Wanted(book, at, int(row[at]), tops) for at in range(begin, end)]
        if end > begin:
            self._scored.append((request, end))
        return np.arange(begin, end) - 1 - start

    def write(self, hidden: torch.Tensor, runner: Runner) -> None:
        """Write the records; ``hidden`` [K, H] belongs to ``tokens``, before any baton is stored.

        The count of what is scored is written last: a worker that ends in between leaves it low.
        """
        for start in range(0, len(self._wanted), HEAD_ROWS):
            part = slice(start, start + HEAD_ROWS)
            write_logprobs(runner.logits(hidden[part]).numpy(), self._wanted[part])
        for request, end in self._scored:
            assert request.book is not None
            request.book.scored = end
