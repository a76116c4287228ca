"""What a worker's steps did, summed up in the slab: where requests went, and what steps took.

One writer, the worker; sums only grow, so that whoever reads them twice knows what happened in
between, and a restarted worker goes on where its predecessor ended. Knows no requests, no clocks
and nothing of what is concluded from the sums.

Words of one worker, of M and widths up to S (the slots): ``moved[M]`` (requests that a step sent
to each model; its own entry: those that stayed or ended), ``committed[M]`` (the tokens that were
committed for these), ``steps[1 + S]`` and ``nanoseconds[1 + S]`` by the number of rows, of steps
without prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trserve.ipc.slab import Slab

Words = NDArray[np.int64]


class TallyWriter:
    """The writing end of worker ``index``; a few words a step, nothing is allocated."""

    __slots__ = ("_own", "_own_committed", "_size", "_steps_at", "_times_at", "_words")

    def __init__(self, slab: Slab, index: int) -> None:
        models = slab.layout.workers
        self._words = slab.tally_words(index)
        self._size = models
        self._own = index
        self._own_committed = models + index
        self._steps_at = 2 * models
        self._times_at = self._steps_at + 1 + slab.layout.slots

    def stayed(self, requests: int, committed: int) -> None:
        """So many requests stayed or ended, with so many tokens committed."""
        words = self._words
        words[self._own] += requests
        words[self._own_committed] += committed

    def left(self, model: int, committed: int) -> None:
        """One request went to ``model``, with 0 or 1 token committed."""
        words = self._words
        words[model] += 1
        words[self._size + model] += committed

    def took(self, rows: int, nanoseconds: int) -> None:
        """A step of ``rows`` rows, none of them a prompt's, took so long."""
        words = self._words
        words[self._steps_at + rows] += 1
        words[self._times_at + rows] += nanoseconds


@dataclass(frozen=True)
class Tally:
    """A worker's sums, or the difference of two.

    ``moved``, ``committed`` int64 [M]; ``steps``, ``nanoseconds`` int64 [1 + S], by width.
    """

    moved: Words
    committed: Words
    steps: Words
    nanoseconds: Words

    def __sub__(self, before: Tally) -> Tally:
        return Tally(
            self.moved - before.moved,
            self.committed - before.committed,
            self.steps - before.steps,
            self.nanoseconds - before.nanoseconds,
        )


def read_tally(slab: Slab, worker: int) -> Tally:
    """The sums of ``worker`` as they are; two words of one step may be a step apart."""
    words = np.frombuffer(slab.tally_words(worker), np.int64).copy()
    models, widths = slab.layout.workers, 1 + slab.layout.slots
    ends = np.cumsum([models, models, widths])
    return Tally(*np.split(words, ends))
