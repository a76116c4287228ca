"""How an answer stands to the row that it goes on with, and what of it counts there.

Pure functions of an answer and the committed row. Knows no slab, no far side and no policy.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trserve.edge.agent_held import Held
from trserve.edge.cloud import STAYS, Answer, Records
from trserve.ipc.baton import Finish

_ARRIVAL_WORD: Final = 2
_NS_PER_US: Final = 1000


def without_known(answer: Answer, row: NDArray[np.int32]) -> Answer:
    """``answer`` without the tokens that ``row`` has already, if that leaves anything.

    A visit that was sent twice is answered from its beginning twice, and what was answered
    before is then not answered by itself any more.
    """
    known = len(row) - answer.start
    if not 0 < known <= len(answer.ids) or (known == len(answer.ids) and not _is_over(answer)):
        return answer
    if not np.array_equal(row[answer.start :], answer.ids[:known]):
        return answer
    ids, sources = answer.ids[known:], answer.sources[known:]
    return answer._replace(start=len(row), ids=ids, sources=sources)


def is_known(answer: Answer, row: NDArray[np.int32]) -> bool:
    """Whether ``row`` has all that ``answer`` says: it came twice, or of a visit sent twice."""
    end = answer.start + len(answer.ids)
    if _is_over(answer) or end > len(row):
        return False
    return np.array_equal(row[answer.start : end], answer.ids)


def end_of(held: Held, tokens: list[int]) -> tuple[int, Finish]:
    """How many of ``tokens`` count, and why the request is over with the last of them."""
    for count, token in enumerate(tokens, 1):
        if token in held.stop_ids:
            return count, Finish.STOP
        if held.length + count >= held.limit:
            return count, Finish.LENGTH
    return len(tokens), Finish.NONE


def with_handoff(held: Held, answer: Answer, records: Records) -> Records:
    """The far side knows how long its own handoff took; the way there and back is ours."""
    at = held.length - records.first
    fresh = held.length == held.arrival_length
    count, width = records.words.shape
    there = 0 <= at < count and width > _ARRIVAL_WORD
    if not (held.params.trace and held.hop and fresh and there):
        return records
    words = records.words.copy()
    own = int(words[at, _ARRIVAL_WORD]) >> 1
    way = max(0, time.monotonic_ns() - held.stored_ns - answer.remote_ns) // _NS_PER_US
    words[at, _ARRIVAL_WORD] = min(way + max(own, 1), 2**30 - 1) << 1
    return records._replace(words=words)


def _is_over(answer: Answer) -> bool:
    return answer.destination != STAYS or bool(answer.finish)
