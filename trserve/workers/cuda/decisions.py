"""From logits to tokens and destinations on the device, captured, with one transfer to the host.

What follows the logits depends on the number of rows alone, so it is captured apart from the
forward, once a number of rows and way of drawing, and replays behind any of its graphs, and behind
steps that have none. Random numbers and definitions are the CPU engine's (``workers.sampler``).
Per row, one entry each of int32, arrive: the token (``NO_TOKEN`` where the logits are not finite),
whether the router's score crosses its bound, and the score's bits.

Knows logits, routers and buffers; nothing of models or of what becomes of a decision.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from trserve.models.cuda import ops
from trserve.params import GREEDY_BELOW
from trserve.router_lib.base import BaseRouter, StepResult
from trserve.workers.cuda.buckets import row_buckets
from trserve.workers.cuda.graphs import Graph, GraphDevice, Work
from trserve.workers.cuda.static_inputs import StaticInputs
from trserve.workers.random_numbers import PURPOSE_SAMPLE
from trserve.workers.sampler import RowSampling

log = logging.getLogger(__name__)

GREEDY: Final = "greedy"
PLAIN: Final = "plain"
FILTERED: Final = "filtered"
WAYS: Final = (GREEDY, PLAIN, FILTERED)
"""Of drawing: nobody draws; some do; some of these filter. Each does what the one before does."""

_FIELDS: Final = 3


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What a forward leaves for as many rows as a step may have; entries of float32.

    Attributes:
        logits: [max_rows, V].
        hidden: [max_rows, H], after the final norm.
        tap: [max_rows, H], or None.
    """

    logits: torch.Tensor
    hidden: torch.Tensor
    tap: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Decided:
    """What arrived of a step: tokens int64 [B], crossings int32 [B], scores float32 [B]."""

    tokens: NDArray[np.int64]
    crosses: NDArray[np.int32]
    scores: NDArray[np.float32]


def way_of(rows: RowSampling, count: int) -> str:
    """How the first ``count`` of ``rows`` draw."""
    if not (rows.temperatures[:count] >= GREEDY_BELOW).any():
        return GREEDY
    filtered = (rows.top_k[:count] > 0) | (rows.top_p[:count] < 1.0) | (rows.min_p[:count] > 0.0)
    return FILTERED if filtered.any() else PLAIN


class Decisions:
    """Decides for the rows of a step.

    Args:
        tensors: where forwards leave their results.
        router: asked for scores, if it is capturable; else None.
        captures: whether to capture; else everything is launched operation by operation.
    """

    def __init__(
        self,
        inputs: StaticInputs,
        tensors: StepTensors,
        device: GraphDevice,
        *,
        model: int,
        tokenizer_size: int,
        max_rows: int,
        router: BaseRouter | None,
        captures: bool,
    ) -> None:
        on = tensors.logits.device
        self._inputs, self._tensors, self._device = inputs, tensors, device
        self._model, self._tokenizer_size = model, tokenizer_size
        self._router = router
        self._buckets = row_buckets(max_rows)
        self._bucket_of = _next_bucket(self._buckets)
        self._best = ops.Epilogue.allocate(max_rows, on)
        self._numbers = torch.zeros(max_rows, dtype=torch.float64, device=on)
        self._filters = ops.Filters(inputs.device.top_k, inputs.device.top_p, inputs.device.min_p)
        self._is_prefill = torch.zeros(max_rows, dtype=torch.bool, device=on)
        self._packed = {
            rows: torch.zeros(_FIELDS, rows, dtype=torch.int32, device=on) for rows in self._buckets
        }
        pinned = on.type == "cuda"
        self._arrived = {
            rows: torch.zeros(_FIELDS, rows, dtype=torch.int32, pin_memory=pinned)
            for rows in self._buckets
        }
        self._read = {rows: _views(arrived) for rows, arrived in self._arrived.items()}
        self._run: dict[tuple[int, str], Work] = {}
        self._graphs: list[Graph] = []
        self.scores = router is not None
        self._prepare(captures)

    def _prepare(self, captures: bool) -> None:
        for rows in reversed(self._buckets):
            for way in WAYS:
                work = self._work(rows, way)
                self._run[rows, way] = self._captured(work) if captures else work

    def _captured(self, work: Work) -> Work:
        graph = self._device.graph()
        graph.capture(work)
        self._graphs.append(graph)
        return graph.replay

    def _work(self, rows: int, way: str) -> Work:
        return lambda: self._decide(rows, way)

    def _decide(self, rows: int, way: str) -> None:
        """Fill and send the packed results of ``rows`` rows."""
        logits, packed = self._tensors.logits[:rows], self._packed[rows]
        best = self._best.first(rows)
        ops.epilogue(logits, self._tokenizer_size, best)
        if way == GREEDY:
            packed[0].copy_(best.tokens)
        else:
            self._draw(rows, logits, best, packed[0], filtered=way == FILTERED)
        if self._router is not None:
            self._score(self._router, rows, packed)
        self._arrived[rows].copy_(packed, non_blocking=True)

    def _draw(
        self,
        rows: int,
        logits: torch.Tensor,
        best: ops.Epilogue,
        out: torch.Tensor,
        *,
        filtered: bool,
    ) -> None:
        fields, numbers = self._inputs.device, self._numbers[:rows]
        positions = fields.draw_positions[:rows]
        ops.uniform(fields.seeds[:rows], positions, self._model, PURPOSE_SAMPLE, numbers)
        filters = self._filters.first(rows) if filtered else None
        temperatures = fields.temperatures[:rows]
        ops.sample(logits, self._tokenizer_size, best, temperatures, numbers, out, filters)

    def _score(self, router: BaseRouter, rows: int, packed: torch.Tensor) -> None:
        tensors = self._tensors
        score = router.score(
            StepResult(
                logits=tensors.logits[:rows],
                hidden=tensors.hidden[:rows],
                token_ids=packed[0].long(),
                params={},
                requests=(),
                is_prefill=self._is_prefill[:rows],
                tap=None if tensors.tap is None else tensors.tap[:rows],
            )
        )
        if score is None:
            self.scores = False
            return
        # The bounds are float32's numbers in float64: comparing says the same.
        packed[1].copy_(router.crosses(score, self._inputs.device.bounds[:rows]))
        packed[2].view(torch.float32).copy_(score)

    def launch(self, rows: int, way: str) -> None:
        """Decide for ``rows`` rows and start the transfer."""
        self._run[self._bucket_of[rows], way]()

    def arrived(self, rows: int) -> Decided:
        """What has arrived for ``rows`` rows; crossings and scores are overwritten by the next."""
        tokens, crosses, scores = self._read[self._bucket_of[rows]]
        return Decided(tokens[:rows].astype(np.int64), crosses[:rows], scores[:rows])

    def close(self) -> None:
        """Free the graphs."""
        for graph in self._graphs:
            graph.reset()


def _views(
    arrived: torch.Tensor,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    words: NDArray[np.int32] = arrived.numpy()
    return words[0], words[1], words[2].view(np.float32)


def _next_bucket(buckets: list[int]) -> list[int]:
    """The bucket for each number of rows from 0 on."""
    found = [buckets[0]]
    for bucket in buckets:
        found += [bucket] * (bucket + 1 - len(found))
    return found
