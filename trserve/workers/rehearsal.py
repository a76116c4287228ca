"""The end of a step gone through before its output is there, with nothing decided and nothing said.

A host that slept while a device computed finds none of what follows in its caches, and all of it
takes several times as long, with the device waiting. What is read and written then is touched here;
what is written lies past the committed lengths and in inactive banks, where the step's end, if it
writes there, writes again. Knows rows and requests; no outcome.
"""

from __future__ import annotations

from itertools import islice, repeat
from typing import Final

import numpy as np

from trserve.ipc.baton import hand_over
from trserve.ipc.extras import write_extras
from trserve.ipc.rings import Descriptor, Kind
from trserve.workers.question import DueRows
from trserve.workers.request import Request
from trserve.workers.rows import RowWriter

MOST_ROWS: Final = 16
"""Rows that are gone through one by one: the others find the code there, and time is short."""


def rehearse(rows: DueRows, writer: RowWriter) -> None:
    """Touch what the end of a step of ``rows`` will touch; they are settled."""
    if not rows.requests:
        return
    tokens = np.zeros(len(rows.requests), np.int64)
    writer.write(rows.places, tokens)
    destinations = repeat(0) if rows.destinations is None else rows.destinations
    rows_of = zip(rows.requests, tokens.tolist(), destinations, strict=False)
    for request, token, goes in islice(rows_of, MOST_ROWS):
        if goes:
            _rehearse_handoff(request)
        elif token not in request.stop_ids and request.length < request.limit:
            request.word.bit_length()


def _rehearse_handoff(request: Request) -> None:
    write_extras(request.banks[request.bank ^ 1], 0, request.pending_ns, False, request.length)
    Descriptor(Kind.RUN, request.slot, request.gen, request.hop)
    hand_over(request.word, 0, request.hop)
