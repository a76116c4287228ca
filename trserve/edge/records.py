"""Annotations of a slot as they lie in the slab: taken out to be sent, put in where they arrive.

Whole words, whatever they mean; ``ipc/annotations.py`` knows that. Both sides have the same layout,
which the link's protocol version stands for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trserve.edge.cloud import Records
from trserve.ipc.layout import PAGE_WORDS, record_words
from trserve.ipc.slab import Slab
from trserve.params import RequestParams


def read_records(
    slab: Slab, slot: int, params: RequestParams, prompt_len: int, rows: range
) -> Records | None:
    """The records of ``rows``; None where the request has none."""
    if not params.annotated or not rows:
        return None
    found = np.array([_place(slab, slot, params, prompt_len, row) for row in rows])
    return Records(rows.start, found)


def write_records(
    slab: Slab, slot: int, params: RequestParams, prompt_len: int, records: Records, end: int
) -> bool:
    """Put ``records`` in place, but none of row ``end`` or behind; False if they do not fit."""
    words = record_words(params.tops or 0)
    first = params.first_record(prompt_len)
    if not params.annotated or records.words.shape[1] != words or records.first < first:
        return False
    for row, content in enumerate(records.words[: max(0, end - records.first)], records.first):
        _place(slab, slot, params, prompt_len, row)[:] = content
    return True


def _place(
    slab: Slab, slot: int, params: RequestParams, prompt_len: int, row: int
) -> NDArray[np.int32]:
    words = record_words(params.tops or 0)
    page, record = divmod(row - params.first_record(prompt_len), PAGE_WORDS // words)
    start = record * words
    found: NDArray[np.int32] = slab.pages[int(slab.page_table[slot, page]), start : start + words]
    return found
