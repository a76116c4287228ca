"""The steps of one model on a GPU: graphs where the shape has one, single launches where not.

A step's inputs go over in one copy; the forward replays or is launched; where the step decides by
itself (``in_step``), sampling, score and decision follow on the device, and a few words a row come
back. Logits stay on the device until somebody asks for them. On the CPU the same code runs over
operations' references, with functions run again in place of graphs; it then says so.

Knows the decoder, its caches and steps; nothing of requests or outcomes. Unproven on a device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trserve.errors import ConfigError
from trserve.models.cuda.attention import AttentionBackend, BatchGeometry
from trserve.models.cuda.decoder import CudaDecoder
from trserve.models.layers import Linear
from trserve.router_lib.base import BaseRouter
from trserve.router_lib.promises import is_capturable
from trserve.workers.cuda.buckets import Bucket, Buckets, RunnerLimits
from trserve.workers.cuda.decisions import Decisions, StepTensors, way_of
from trserve.workers.cuda.graphs import Graph, GraphDevice, freeze_after_capture
from trserve.workers.cuda.static_inputs import StaticInputs, TokenViews
from trserve.workers.in_step import StepAsk
from trserve.workers.runner import ForwardOutput
from trserve.workers.sampler import RowSampling
from trserve.workers.step import StepInputs

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Shape:
    """One bucket: its views, what launches it, and its geometry but for lengths and blocks."""

    views: TokenViews
    launch: Callable[[], None]
    query_start: NDArray[np.int32]


class CudaRunner:
    """Runs ``decoder`` over ``caches``; see :class:`trserve.workers.runner.Runner`.

    Args:
        caches: of each layer, as ``attention`` and the decoder have them.
        head: to logits of the whole vocabulary, minus infinity beyond ``tokenizer_size``.
        model: index of the model, which its random numbers depend on.

    Attributes:
        on_submitted: called in each step, once the device has its graph, or before the first layer
            that is launched by itself.
        routes: whether steps have the router's score.
        embedding: the model's input embedding, on the device.
    """

    def __init__(
        self,
        decoder: CudaDecoder,
        caches: list[torch.Tensor],
        attention: AttentionBackend,
        head: Linear,
        device: GraphDevice,
        limits: RunnerLimits,
        *,
        model: int,
        tokenizer_size: int,
    ) -> None:
        self.heartbeat = 0
        self.began_ns = 0
        self.on_layer: Callable[[], None] = _nothing_more
        self.on_submitted: Callable[[], None] = _nothing_more
        self.routes = False
        self.decoder = decoder
        self.embedding = decoder.embedding
        self._caches, self._attention, self._head, self._device = caches, attention, head, device
        self._limits, self._model, self._tokenizer_size = limits, model, tokenizer_size
        on, rows = decoder.device, limits.max_rows
        self._inputs = StaticInputs(on, max_rows=rows, max_tokens=limits.max_tokens)
        self._tensors = StepTensors(
            logits=torch.zeros(rows, decoder.spec.vocab_size, device=on),
            hidden=torch.zeros(rows, decoder.spec.hidden_size, device=on),
            tap=None,
        )
        self._decisions: Decisions | None = None
        self._shapes: dict[Bucket, _Shape] = {}
        self._graphs: list[Graph] = []
        self._buckets = Buckets({})
        nothing = np.zeros((1, 1), np.int32)
        self._geometry = BatchGeometry(0, nothing[0], nothing[0], nothing)
        self._sampling: RowSampling | None = None
        self._way = ""
        self._under_way = False
        self._told = True

    # ---------------------------------------------------------------- once

    def keep_tap(self) -> None:
        """Give ``tap`` with every step from now on; before :meth:`prepare`."""
        if not self.decoder.source.layers:
            raise ConfigError("a router reads the last layer's input, but the model has no layers")
        self.decoder.keeps_tap = True
        hidden = self._tensors.hidden
        self._tensors = StepTensors(self._tensors.logits, hidden, torch.zeros_like(hidden))

    def read_sources(self) -> None:
        """Take ids from where a step says that they lie on the device; before :meth:`prepare`."""
        rows, tokens = self._limits.max_rows, self._limits.max_tokens
        on = self.decoder.device
        self._inputs = StaticInputs(on, max_rows=rows, max_tokens=tokens, with_sources=True)

    @torch.inference_mode()
    def prepare(self, router: BaseRouter) -> None:
        """Capture the graphs of all buckets, with ``router`` where it can be part of them."""
        began = time.monotonic()
        limits = self._limits
        if self.decoder.capturable:
            self._buckets = Buckets.of(max_rows=limits.max_rows, max_tokens=limits.max_tokens)
        else:
            log.info("a model with experts chooses them on the host: its steps run without graphs")
        for bucket in self._buckets.largest_first:
            self._shapes[bucket] = self._make_ready(bucket)
        self._decisions = self._create_decisions(router)
        self._device.synchronize()
        freeze_after_capture()
        log.info(
            "%s: %d shapes captured in %.1f s; pieces: %s",
            self._device.name,
            len(self._graphs),
            time.monotonic() - began,
            ", ".join(sorted(limits.pieces)) or "none",
        )

    def _create_decisions(self, router: BaseRouter) -> Decisions:
        """With the router's score if that can be captured, else without."""
        if not is_capturable(router):
            return self._decisions_with(None)
        router.to(self.decoder.device)
        try:
            decisions = self._decisions_with(router)
        except Exception as error:
            log.warning("the router's score cannot be captured: %r; it is asked after steps", error)
            router.to(torch.device("cpu"))
            return self._decisions_with(None)
        self.routes = decisions.scores
        return decisions

    def _decisions_with(self, router: BaseRouter | None) -> Decisions:
        return Decisions(
            self._inputs,
            self._tensors,
            self._device,
            model=self._model,
            tokenizer_size=self._tokenizer_size,
            max_rows=self._limits.max_rows,
            router=router,
            captures="router" in self._limits.pieces,
        )

    def _make_ready(self, bucket: Bucket) -> _Shape:
        """Capture the forward of ``bucket``, if it is of a piece that is to be captured."""
        views = self._inputs.tokens(bucket.tokens)
        starts = np.arange(bucket.rows + 1, dtype=np.int32) * bucket.width
        last = None
        if bucket.width > 1:
            ends = torch.arange(bucket.width - 1, bucket.tokens, bucket.width)
            last = ends.to(self.decoder.device)

        def work() -> None:
            self._forward(views, bucket.rows, last, self._in_launches)

        launch = work
        if bucket.piece in self._limits.pieces and self._attention.replays:
            views.pad(0)
            lengths = np.full(1, bucket.width, np.int32)
            # However small blocks are, a row of so many tokens has no more of them.
            blocks = np.zeros((1, bucket.width), np.int32)
            self._attention.plan(
                BatchGeometry(1, starts, lengths, blocks, bucket.width, bucket.rows)
            )
            graph = self._device.graph()
            graph.capture(work)
            self._graphs.append(graph)
            launch = graph.replay
        return _Shape(views, launch, starts)

    def close(self) -> None:
        """Free all graphs; before any communicator that they use is destroyed."""
        self._device.synchronize()
        for graph in self._graphs:
            graph.reset()
        if self._decisions is not None:
            self._decisions.close()
        self._shapes.clear()
        self._buckets = Buckets({})

    # ---------------------------------------------------------------- once per step

    @torch.inference_mode()
    def forward(self, step: StepInputs, also: NDArray[np.int64] | None = None) -> ForwardOutput:
        """Compute ``step``: its KV is stored; what is returned lies on the device, under way."""
        further = self._compute(step, also)
        self._under_way = True
        self._device.submitted()
        self._tell()
        if step.sources is not None and not self._read_well(step):
            return self.forward(step, also)
        return self._output(step.num_rows, further)

    @torch.inference_mode()
    def decide(self, step: StepInputs, ask: StepAsk) -> ForwardOutput:
        """Compute ``step`` and decide on its rows; returns once that has arrived here."""
        decisions, rows, sampling = self._decisions, step.num_rows, ask.sampling
        assert decisions is not None, "prepare() comes first"
        self._await_previous()
        self._inputs.load(sampling, rows)
        self._inputs.host.bounds[:rows] = np.nan if ask.bounds is None else ask.bounds
        if sampling is not self._sampling:
            self._sampling, self._way = sampling, way_of(sampling, rows)
        self._compute(step, None)
        decisions.launch(rows, self._way)
        self._device.submitted()
        self._tell()
        self._device.wait()
        if step.sources is not None and not self._read_well(step):
            return self.decide(step, ask)
        self.on_layer()
        found, output = decisions.arrived(rows), self._output(rows, None)
        output.tokens = found.tokens
        if ask.bounds is not None and self.routes:
            output.destinations, output.scores = found.crosses.tolist(), found.scores
        return output

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raw logits of hidden states after the final norm, on the host."""
        on = hidden.to(self.decoder.device, self.decoder.dtype)
        return self._head(on).float().cpu()

    def _in_launches(self) -> None:
        """A layer is about to be launched: that of a whole step may take the host as long."""
        self.on_layer()
        self._tell()

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            self.on_submitted()

    def _await_previous(self) -> None:
        """The buffers may be written to again once the step before has read them."""
        if self._under_way:
            self._device.wait()
            self._under_way = False

    def _read_well(self, step: StepInputs) -> bool:
        """Whether what the ids were read from was theirs until the step was done.

        If not, ``step`` is left without sources: computed again, it stores over what it stored.
        """
        assert step.sources is not None
        self._device.wait()
        if step.sources.hold():
            return True
        log.warning("ids on the device were written over in a step; it is computed again")
        step.sources = None
        return False

    def _output(self, rows: int, further: torch.Tensor | None) -> ForwardOutput:
        tensors = self._tensors
        return ForwardOutput(
            logits=tensors.logits[:rows],
            hidden=tensors.hidden[:rows],
            also=further,
            tap=None if tensors.tap is None else tensors.tap[:rows],
        )

    def _compute(self, step: StepInputs, also: NDArray[np.int64] | None) -> torch.Tensor | None:
        self._await_previous()
        self._told = False
        bucket = self._buckets.find(step) if also is None else None
        if bucket is None:
            return self._eager(step, also)
        shape = self._shapes[bucket]
        self._inputs.fill(shape.views, step, bucket)
        self._plan(step, shape.query_start, bucket)
        self.on_layer()
        shape.launch()
        return None

    def _plan(self, step: StepInputs, query_start: NDArray[np.int32], bucket: Bucket) -> None:
        geometry = self._geometry
        geometry.num_rows, geometry.query_start = step.num_rows, query_start
        geometry.kv_len, geometry.block_tables = step.kv_len, step.block_tables
        geometry.width, geometry.bucket = bucket.width, bucket.rows
        self._attention.plan(geometry)

    def _eager(self, step: StepInputs, also: NDArray[np.int64] | None) -> torch.Tensor | None:
        rows = step.num_rows
        views = self._inputs.tokens(step.num_tokens)
        self._inputs.fill_ragged(views, step)
        self._attention.plan(BatchGeometry.of(step))
        last: torch.Tensor | None = None
        if also is not None:
            ends = np.concatenate((step.query_start[1 : rows + 1] - 1, also))
            last = torch.from_numpy(ends.astype(np.int64)).to(self.decoder.device)
        elif not step.decode_only:
            last = self._inputs.device.last[:rows]
        return self._forward(views, rows, last, self._in_launches)

    def _forward(
        self,
        views: TokenViews,
        rows: int,
        last: torch.Tensor | None,
        on_layer: Callable[[], None],
    ) -> torch.Tensor | None:
        """Inputs over, layers, head: results to the static tensors, those of further tokens back.

        All that is launched, and nothing else, so that it can be captured.
        """
        views.copy()
        hidden, tap = self.decoder.forward(
            views.device, self._caches, self._attention, last, on_layer
        )
        tensors, further = self._tensors, None
        if len(hidden) > rows:
            hidden, further = hidden[:rows], hidden[rows:]
        tensors.hidden[:rows].copy_(hidden)
        if tensors.tap is not None and tap is not None:
            tensors.tap[:rows].copy_(tap[:rows])
        if self.decoder.dtype == torch.float32:
            self._head.into(hidden, tensors.logits[:rows])
        else:
            tensors.logits[:rows].copy_(self._head(hidden.to(self.decoder.dtype)))
        return further


def _nothing_more() -> None:
    """Nobody waits for a sign of life."""
