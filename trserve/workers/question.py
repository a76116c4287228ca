"""What a router is asked, after a step or during it. Knows outputs and requests; not how rows were
chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from trserve.router_lib.base import StepResult
from trserve.workers.request import Request
from trserve.workers.runner import ForwardOutput
from trserve.workers.sampler import NO_TOKEN

_NO_COLUMNS: Final = torch.empty(1, 0)


class DueRows(Protocol):
    """The rows of a step that sample a token; ``ChosenRows`` and ``SteadyRows`` say the rest.

    Attributes:
        pinned: whether none of them ever leaves.
        params: their router parameters; None until somebody gives them.
        destinations: what the router has said of this step; None until it was asked.
        places: int64, where ``RowWriter.write`` puts what each of them samples.
    """

    requests: list[Request]
    pinned: bool
    params: Mapping[str, torch.Tensor] | None
    destinations: Sequence[int | None] | None
    places: NDArray[np.int64]

    def result(self, output: ForwardOutput, tokens: NDArray[np.int64]) -> StepResult: ...
    def early_result(self) -> StepResult: ...


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


def with_own_tensors(result: StepResult) -> StepResult:
    """``result`` with tensors of its own in the place of those that are read again after it.

    Of the logits and hidden states nothing is: the next step overwrites them.
    """
    result.token_ids = result.token_ids.clone()
    result.is_prefill = result.is_prefill.clone()
    result.params = own_params(result.params)
    return result


def own_params(params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``params`` in tensors of their own."""
    return {name: values.clone() for name, values in params.items()}


def early_question(
    params: Mapping[str, torch.Tensor], requests: Sequence[Request], is_prefill: torch.Tensor
) -> StepResult:
    """The same of a step that is still computed; see ``BaseRouter.decides_early``."""
    rows = len(requests)
    return StepResult(
        logits=_NO_COLUMNS.expand(rows, 0),
        hidden=_NO_COLUMNS.expand(rows, 0),
        token_ids=torch.full((rows,), NO_TOKEN),
        params=params,
        requests=requests,
        is_prefill=is_prefill,
    )
