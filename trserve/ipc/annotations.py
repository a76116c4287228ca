"""Annotation pages: what is said of a token beside the token, for requests that asked for it.

A bounded pool of fixed pages in the slab; the gateway gives a request as many as its limit needs,
before it goes LIVE, and takes them back with the slot. Whoever holds the baton writes a token's
record before the store that commits the token, so a reader that saw the word sees all records
that it covers. Knows nothing of logits, text or JSON.

A record is one int32 or float32 word after the other: the token's own log probability, the
router's score, a word of how it came to be written, then the ``tops`` most probable ids, then their
log probabilities. What was not asked for holds anything. That third word's lowest bit says that the
token was written alone (its router wanted a peer that is lost); the others, less 1, are the
microseconds of the handoff that brought the request to its writer just before, or 0 for none.
No record spans two pages. The token at row position 0 follows nothing and has none of this: where a
prompt is scored, the first word of its record counts the positions that are done.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trserve.ipc.layout import PAGE_WORDS, record_words
from trserve.ipc.slab import Slab

_HEAD_WORDS: Final = 3
_ALONE: Final = 1
_MOST_US: Final = 2**30 - 2


class Annotation(NamedTuple):
    """One token's record: its log probability, and the most probable ids with theirs, falling.

    ``score`` is what the router decided on, None where there was nothing to decide. Of traced
    requests, ``alone`` says whether a peer was to go on that will not come back, and ``handoff_us``
    how long the request was under way to whoever wrote the token, None where it was there already.
    """

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]
    score: float | None = None
    alone: bool = False
    handoff_us: int | None = None


class AnnotationBook:
    """The records of one slot.

    Args:
        first: row position of the first record.
        tops: most probable tokens in a record.
    """

    __slots__ = ("_first", "_floats", "_ints", "_pages", "_per_page", "_tops", "_words")

    def __init__(self, slab: Slab, slot: int, *, first: int, tops: int) -> None:
        self._first = first
        self._tops = tops
        self._words = record_words(tops)
        self._per_page = PAGE_WORDS // self._words
        self._pages = slab.page_table[slot]
        self._ints = slab.pages
        self._floats = slab.pages.view(np.float32)

    def write(
        self,
        position: int,
        logprob: float,
        top_ids: NDArray[np.int64],
        top_logprobs: NDArray[np.float32],
    ) -> None:
        """Fill the record of row ``position``; ``top_ids`` and ``top_logprobs`` have ``tops``."""
        page, start = self._place(position)
        ids = start + _HEAD_WORDS
        values, end = ids + self._tops, ids + 2 * self._tops
        self._floats[page, start] = logprob
        self._ints[page, ids:values] = top_ids
        self._floats[page, values:end] = top_logprobs

    def write_score(self, position: int, score: float) -> None:
        """Fill in the router's score of row ``position``; NaN where there was none."""
        page, start = self._place(position)
        self._floats[page, start + 1] = score

    def write_arrival(self, position: int, handoff_us: int | None) -> None:
        """Fill in what brought the request to the writer of row ``position``, who is not alone."""
        page, start = self._place(position)
        word = 0 if handoff_us is None else min(max(handoff_us, 0), _MOST_US) + 1
        self._ints[page, start + 2] = word << 1

    def mark_alone(self, position: int) -> None:
        """Say, after :meth:`write_arrival`, that the token was written for want of a peer."""
        page, start = self._place(position)
        self._ints[page, start + 2] |= _ALONE

    @property
    def scored(self) -> int:
        """Prompt positions that are done, the first included; 0 before the first chunk."""
        return int(self._ints[self._place(0)])

    @scored.setter
    def scored(self, count: int) -> None:
        self._ints[self._place(0)] = count

    def read(self, start: int, stop: int) -> list[Annotation]:
        """The records of the row positions ``start`` to ``stop``, which are committed."""
        return [self._read(position) for position in range(start, stop)]

    def _read(self, position: int) -> Annotation:
        page, start = self._place(position)
        ids = start + _HEAD_WORDS
        values, end = ids + self._tops, ids + 2 * self._tops
        score = float(self._floats[page, start + 1])
        arrival = int(self._ints[page, start + 2])
        return Annotation(
            float(self._floats[page, start]),
            self._ints[page, ids:values].tolist(),
            self._floats[page, values:end].tolist(),
            score if math.isfinite(score) else None,
            bool(arrival & _ALONE),
            (arrival >> 1) - 1 if arrival > _ALONE else None,
        )

    def _place(self, position: int) -> tuple[int, int]:
        page, record = divmod(position - self._first, self._per_page)
        return int(self._pages[page]), record * self._words
