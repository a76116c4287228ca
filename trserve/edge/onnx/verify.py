"""Whether an exported model computes what torch computes: logits, hidden states, taps.

Both run the same steps: a prompt in two parts, decodes, and a suffix as a request brings it that
comes back from another model. Knows runners; nothing of graphs or files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from trserve.workers.runner import Runner
from trserve.workers.step import StepInputs

PARTS: Final = (24, 1, 1, 7, 1, 1, 3, 1)
"""Tokens computed at once, one after another in one row."""
LENGTH: Final = sum(PARTS)


class Difference(msgspec.Struct, frozen=True):
    """How far two models are apart.

    Attributes:
        logits, hidden, tap: the largest absolute difference.
        agreement: share of steps whose most probable token is the same.
        size: the largest logit's magnitude, to set these against.
    """

    logits: float
    hidden: float
    tap: float
    agreement: float
    size: float

    @property
    def largest(self) -> float:
        """Of all outputs."""
        return max(self.logits, self.hidden, self.tap)

    def __str__(self) -> str:
        """For people."""
        return (
            f"logits {self.logits:.2g} (of up to {self.size:.3g}), "
            f"hidden states {self.hidden:.2g}, taps {self.tap:.2g}"
        )


def compare(
    first: Runner, block_size: int, other: Runner, capacity: int, vocabulary: int
) -> Difference:
    """Run the steps on both, which keep taps; ids are drawn below ``vocabulary``.

    Args:
        block_size: KV block of ``first``, which has enough of them for :data:`LENGTH` tokens.
        capacity: of the rows of ``other``.
    """
    tokens = np.random.default_rng(0).integers(0, vocabulary, LENGTH)
    found = [
        [_outputs(runner, step) for step in _steps(tokens, size)]
        for runner, size in ((first, block_size), (other, capacity))
    ]
    logits, hidden, tap = (
        torch.stack([(a - b).abs().max() for a, b in zip(*parts, strict=True)]).max().item()
        for parts in ([[step[kind] for step in run] for run in found] for kind in range(3))
    )
    same = [bool(a[0].argmax() == b[0].argmax()) for a, b in zip(found[0], found[1], strict=True)]
    size = max(step[0].abs().max().item() for step in found[0])
    return Difference(logits, hidden, tap, sum(same) / len(same), size)


def _outputs(runner: Runner, step: StepInputs) -> tuple[torch.Tensor, ...]:
    output = runner.forward(step)
    assert output.tap is not None
    return output.logits.clone(), output.hidden.clone(), output.tap.clone()


def _steps(tokens: NDArray[np.int64], block_size: int) -> Iterator[StepInputs]:
    blocks = -(-LENGTH // block_size)
    table = np.arange(blocks, dtype=np.int32)
    step = StepInputs(
        max_tokens=LENGTH, max_rows=1, max_blocks_per_row=blocks, block_size=block_size
    )
    start = 0
    for count in PARTS:
        step.clear()
        step.add_row(tokens[start : start + count], start, table)
        yield step
        start += count
