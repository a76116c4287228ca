"""The sampler's arrays for the requests of a step. Knows no logits and no slab.

In a steady state the same requests decode step after step, so what does not change with the
position is kept from one step to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trserve.workers.grammar import Constraint
from trserve.workers.request import Request
from trserve.workers.sampler import RowSampling, drawn_rows


class BatchSampling:
    """How the same requests draw, step after step."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = list(requests)
        self._fixed = _fixed(requests)
        self._varies = any(
            request.adjustment is not None
            or request.constraint is not None
            or request.sampling.min_tokens
            for request in requests
        )

    def at(self, positions: NDArray[np.integer]) -> RowSampling:
        """How each draws the token at its row's end, which is at its entry of ``positions``."""
        fixed = self.fixed(positions)
        if fixed is not None:
            return fixed
        return replace(
            self._fixed,
            positions=positions,
            banned=[
                (row, request.end_ids)
                for row, request in enumerate(self.requests)
                if request.constraint is None and _is_short(request)
            ],
            forbidden=[
                (row, _forbidden(request, request.constraint))
                for row, request in enumerate(self.requests)
                if request.constraint is not None
            ],
            adjustments=[
                (row, request.adjustment.advance(_committed(request)))
                for row, request in enumerate(self.requests)
                if request.adjustment is not None
            ],
        )

    def fixed(self, positions: NDArray[np.integer]) -> RowSampling | None:
        """The same, if nothing but the position varies from step to step; else None.

        It is one object for all steps.
        """
        if self._varies:
            return None
        self._fixed.positions = positions
        return self._fixed


def _committed(request: Request) -> NDArray[np.int32]:
    return request.token_ids[: request.length]


def _is_short(request: Request) -> bool:
    """Whether ``min_tokens`` keeps the answer from ending."""
    return request.num_generated < request.sampling.min_tokens


def _forbidden(request: Request, constraint: Constraint) -> NDArray[np.bool_]:
    return constraint.forbidden(_committed(request), is_short=_is_short(request))


class RowSamplings:
    """Makes the arrays of one step after the other."""

    def __init__(self) -> None:
        self._batch = BatchSampling(())

    def of(self, requests: Sequence[Request]) -> RowSampling:
        """How each of ``requests`` draws the token at its row's end."""
        return self._of(requests).at(_lengths(requests))

    def fixed(self, requests: Sequence[Request]) -> RowSampling | None:
        """The same, if nothing but the position varies from step to step; else None."""
        return self._of(requests).fixed(_lengths(requests))

    def _of(self, requests: Sequence[Request]) -> BatchSampling:
        if self._batch.requests != requests:
            self._batch = BatchSampling(requests)
        return self._batch


def _lengths(requests: Sequence[Request]) -> NDArray[np.int64]:
    return np.array([request.length for request in requests], np.int64)


def greedy(rows: int) -> RowSampling:
    """How ``rows`` rows draw that take the largest logit."""
    return RowSampling(
        temperatures=np.zeros(rows),
        top_k=np.zeros(rows, np.int64),
        top_p=np.ones(rows),
        min_p=np.zeros(rows),
        seeds=np.zeros(rows, np.uint64),
        positions=np.zeros(rows, np.int64),
        drawn=np.zeros(0, np.int64),
    )


def _fixed(requests: Sequence[Request]) -> RowSampling:
    """What of the arrays stays while the same requests go on."""
    sampling = [request.sampling for request in requests]
    temperatures = np.array([s.temperature for s in sampling])
    return RowSampling(
        temperatures=temperatures,
        top_k=np.array([s.top_k for s in sampling], np.int64),
        top_p=np.array([s.top_p for s in sampling]),
        min_p=np.array([s.min_p for s in sampling]),
        seeds=np.array([s.seed for s in sampling], np.uint64),
        positions=np.zeros(len(sampling), np.int64),
        drawn=drawn_rows(temperatures),
    )
