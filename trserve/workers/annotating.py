"""Writing what is said of the tokens that a step sampled: log probabilities, scores, handoffs.

Knows requests, logits and scores; nothing of how a token is chosen or where a request goes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from numpy import int64
from numpy.typing import NDArray

from trserve.workers.logprobs import Wanted, write_logprobs
from trserve.workers.request import Request


def annotate(requests: Sequence[Request], logits: torch.Tensor, sampled: NDArray[int64]) -> None:
    """Write the records of ``sampled`` [B]; they count once the tokens are committed."""
    for request in requests:
        if request.book is not None and request.params.trace:
            request.book.write_score(request.length, math.nan)
            request.book.write_arrival(request.length, _handoff_us(request))
            if request.arrived_alone and request.length == request.arrival_length:
                mark_alone(request)
    rows = [row for row, request in enumerate(requests) if request.params.tops is not None]
    rows = [row for row in rows if sampled[row] >= 0]
    if rows:
        wanted = [_record(requests[row], int(sampled[row])) for row in rows]
        write_logprobs(logits[rows].numpy(), wanted)


def write_scores(requests: Sequence[Request], scores: Sequence[float]) -> None:
    """Say in the records of traced requests what the router is about to decide on."""
    for request, score in zip(requests, scores, strict=False):
        if request.params.trace and request.book is not None and not request.pinned:
            request.book.write_score(request.length, score)


def mark_alone(request: Request) -> None:
    """Say of the token that is about to be committed that it is written for want of a peer."""
    if request.book is not None and request.params.trace:
        request.book.mark_alone(request.length)


def _handoff_us(request: Request) -> int | None:
    """From the sender's store to our taking it in, of the first token that is written here since.

    Both times were read for other reasons, from the one clock that all processes share.
    """
    if not request.hop or request.length != request.arrival_length:
        return None
    return (request.runnable_since_ns - request.last_store_ns) // 1000


def _record(request: Request, token: int) -> Wanted:
    """The record of ``token``, drawn for the position at the row's end."""
    assert request.book is not None and request.params.tops is not None
    return Wanted(request.book, request.length, token, request.params.tops)
