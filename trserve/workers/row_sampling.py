"""The sampler's arrays for the requests of a step. Knows no logits and no slab."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trserve.workers.request import Request
from trserve.workers.sampler import RowSampling


def row_sampling(requests: Sequence[Request]) -> RowSampling:
    """How each of ``requests`` draws the token at its row's end."""
    sampling = [request.sampling for request in requests]
    return RowSampling(
        temperatures=np.array([s.temperature for s in sampling]),
        top_k=np.array([s.top_k for s in sampling], np.int64),
        top_p=np.array([s.top_p for s in sampling]),
        min_p=np.array([s.min_p for s in sampling]),
        seeds=np.array([s.seed for s in sampling], np.uint64),
        positions=np.array([request.length for request in requests], np.int64),
        banned=[
            (row, request.end_ids)
            for row, request in enumerate(requests)
            if request.length < request.min_length
        ],
        adjustments=[
            (row, request.adjustment.advance(request.token_ids[: request.length]))
            for row, request in enumerate(requests)
            if request.adjustment is not None
        ],
    )
