"""What a router is asked after a step. Knows outputs and requests; not how rows were chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trserve.router_lib.base import StepResult
from trserve.workers.request import Request
from trserve.workers.runner import ForwardOutput


def question(
    output: ForwardOutput,
    tokens: NDArray[np.int64],
    params: Mapping[str, torch.Tensor],
    requests: Sequence[Request],
    is_prefill: torch.Tensor,
) -> StepResult:
    """Of the B ``requests`` of ``output``, which sampled ``tokens`` [B]; see ``StepResult``."""
    return StepResult(
        logits=output.logits,
        hidden=output.hidden,
        token_ids=output.tensor_of(tokens),
        params=params,
        requests=requests,
        is_prefill=is_prefill,
        tap=output.tap,
    )
