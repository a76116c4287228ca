"""The sampler's arrays for the requests of a step. Knows no logits and no slab.

In a steady state the same requests decode step after step, so what does not change with the
position is kept from one step to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trserve.workers.request import Request
from trserve.workers.sampler import RowSampling


class RowSamplings:
    """Makes the arrays of one step after the other."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._fixed = _fixed(())
        self._varies = False

    def of(self, requests: Sequence[Request]) -> RowSampling:
        """How each of ``requests`` draws the token at its row's end."""
        if self._requests != requests:
            self._requests = list(requests)
            self._fixed = _fixed(requests)
            self._varies = any(
                request.adjustment is not None or request.sampling.min_tokens
                for request in requests
            )
        positions = np.array([request.length for request in requests], np.int64)
        if not self._varies:
            self._fixed.positions = positions
            return self._fixed
        return replace(
            self._fixed,
            positions=positions,
            banned=[
                (row, request.end_ids)
                for row, request in enumerate(requests)
                if request.num_generated < request.sampling.min_tokens
            ],
            adjustments=[
                (row, request.adjustment.advance(request.token_ids[: request.length]))
                for row, request in enumerate(requests)
                if request.adjustment is not None
            ],
        )


def _fixed(requests: Sequence[Request]) -> RowSampling:
    """What of the arrays stays while the same requests go on."""
    sampling = [request.sampling for request in requests]
    return RowSampling(
        temperatures=np.array([s.temperature for s in sampling]),
        top_k=np.array([s.top_k for s in sampling], np.int64),
        top_p=np.array([s.top_p for s in sampling]),
        min_p=np.array([s.min_p for s in sampling]),
        seeds=np.array([s.seed for s in sampling], np.uint64),
        positions=np.zeros(len(sampling), np.int64),
    )
