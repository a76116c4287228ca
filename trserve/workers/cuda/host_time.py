"""How long the host takes for a decode step beside the graphs' replays.

A step as a worker has it, over the worker's own runner and a model of one layer. On a GPU what is
counted is all but the wait for the device: launches and copies are in it. On the CPU graphs do
nothing, copies are copies in memory and events are nothing: what is left is choosing the bucket,
filling the inputs, planning attention and taking the results. What stands for something else says
so in its name.

Used by the checks of a device; knows no server.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from trserve.models.assembly import assemble
from trserve.models.cuda.attention import BatchGeometry, PagedLayers
from trserve.models.cuda.attention_plan import PlanArrays, memory_size
from trserve.models.cuda.decoder import CudaDecoder
from trserve.models.cuda.weights import device_caches
from trserve.models.dummy import dummy_source
from trserve.models.spec import ModelSpec, spec_from_config
from trserve.router_lib.base import BaseRouter, RouterContext
from trserve.router_lib.uncertainty import Entropy
from trserve.workers.cuda.buckets import PIECES, RunnerLimits
from trserve.workers.cuda.create import assemble_runner
from trserve.workers.cuda.graphs import (
    Graph,
    GraphDevice,
    NoGraphsOnCpu,
    ReplayOnCpu,
    Work,
    graph_device,
)
from trserve.workers.cuda.runner import CudaRunner
from trserve.workers.in_step import StepAsk
from trserve.workers.row_sampling import greedy
from trserve.workers.step import StepInputs

_BLOCK: Final = 16
_ROW_TOKENS: Final = 4096
_MAX_TOKENS: Final = 2048
_VOCAB: Final = 512
_CPU: Final = torch.device("cpu")
_CONTEXT: Final = 1000
"""Tokens of each row when the measurement begins."""


@dataclass(frozen=True)
class HostTime:
    """Microseconds of a step over ``rows`` rows: the median, and that of the slowest in 100.

    ``where`` names the graphs.
    """

    where: str
    rows: int
    steps: int
    p50_us: float
    p99_us: float


class EmptyGraph(ReplayOnCpu):
    """Runs the work once, as a capture does, and then replays nothing."""

    def __init__(self) -> None:
        super().__init__(strict=False)

    def capture(self, work: Work) -> None:
        """Run ``work``; keep a function that does nothing."""
        work()
        super().capture(_nothing)


class EmptyGraphsOnCpu(NoGraphsOnCpu):
    """Stands for a GPU that needs no time."""

    name = "empty graphs on the CPU"

    def graph(self) -> Graph:
        """One that does nothing."""
        return EmptyGraph()


class PlannedAttention:
    """Plans as the fallback's attention does, to a copy in memory; computes nothing."""

    name = "planned only"
    replays = True

    def __init__(self, paged: PagedLayers) -> None:
        size = memory_size(paged)
        self._staging = torch.zeros(size, dtype=torch.int32)
        self._device = torch.zeros(size, dtype=torch.int32)
        self._host = PlanArrays(paged, self._staging.numpy())

    def plan(self, batch: BatchGeometry) -> None:
        """Fill the arrays, and copy what is in use."""
        self._host.fill(batch)
        self._device[: self._host.used].copy_(self._staging[: self._host.used])

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Nothing is attended to."""
        out.zero_()


class TimedWaits:
    """``inner``, and how long was waited for it.

    Attributes:
        waited_ns: in all.
    """

    def __init__(self, inner: GraphDevice) -> None:
        self._inner = inner
        self.name = inner.name
        self.graph = inner.graph
        self.submitted = inner.submitted
        self.synchronize = inner.synchronize
        self.waited_ns = 0

    def wait(self) -> None:
        """As ``inner``'s."""
        began = time.perf_counter_ns()
        self._inner.wait()
        self.waited_ns += time.perf_counter_ns() - began


def measure_host_time(
    rows: int = 8, steps: int = 2000, *, max_rows: int = 64, device: torch.device = _CPU
) -> HostTime:
    """Host time of decode steps over ``rows`` rows whose requests stay the same."""
    timed = TimedWaits(EmptyGraphsOnCpu() if device.type == "cpu" else graph_device(device))
    runner, step = _runner(max_rows, device, timed), _step(rows, max_rows)
    runner.prepare(_router())
    sampling = greedy(rows)
    sampling.positions = step.kv_len[:rows]
    bounds = np.full(rows, 0.5, np.float32)
    ids = np.zeros(rows, np.int64)
    took = np.empty(steps)
    for number in range(-steps // 10, steps):
        began, waited = time.perf_counter_ns(), timed.waited_ns
        step.advance_decode_rows(ids)
        output = runner.decide(step, StepAsk(sampling, bounds))
        took[max(number, 0)] = time.perf_counter_ns() - began - (timed.waited_ns - waited)
        assert output.destinations is not None
    runner.close()
    p50, p99 = np.percentile(took, [50, 99]) / 1e3
    return HostTime(timed.name, rows, steps, float(p50), float(p99))


def _runner(max_rows: int, device: torch.device, graphs: GraphDevice) -> CudaRunner:
    spec, dtype = _tiny_spec(), torch.float32 if device.type == "cpu" else torch.bfloat16
    decoder = assemble(spec, dummy_source(spec, dtype=dtype, device=device))
    limits = RunnerLimits(max_rows, _MAX_TOKENS, frozenset(PIECES))
    num_blocks = max_rows * _ROW_TOKENS // _BLOCK
    if device.type != "cpu":
        return assemble_runner(
            decoder,
            num_blocks=num_blocks,
            block_size=_BLOCK,
            limits=limits,
            row_tokens=_ROW_TOKENS,
            model=0,
            tokenizer_size=spec.vocab_size,
            graphs=graphs,
        )
    caches = device_caches(
        spec, num_blocks=num_blocks, block_size=_BLOCK, dtype=dtype, device=device
    )
    paged = PagedLayers(
        layers=caches,
        num_heads=spec.num_heads,
        max_rows=max_rows,
        max_tokens=_MAX_TOKENS,
        max_blocks_per_row=_ROW_TOKENS // _BLOCK,
    )
    return CudaRunner(
        CudaDecoder(decoder, max_positions=_ROW_TOKENS),
        caches,
        PlannedAttention(paged),
        decoder.lm_head(spec.vocab_size),
        graphs,
        limits,
        model=0,
        tokenizer_size=spec.vocab_size,
    )


def _step(rows: int, max_rows: int) -> StepInputs:
    """A step of ``rows`` decodes, each in blocks of its own."""
    blocks = _ROW_TOKENS // _BLOCK
    step = StepInputs(
        max_tokens=_MAX_TOKENS, max_rows=max_rows, max_blocks_per_row=blocks, block_size=_BLOCK
    )
    for row in range(rows):
        table = np.arange(row * blocks, (row + 1) * blocks, dtype=np.int32)
        step.add_decode_row(0, _CONTEXT, table)
        step.block_tables[row] = table
    return step


def _router() -> BaseRouter:
    config = {parameter.name: parameter.default for parameter in Entropy.parameters}
    return Entropy(RouterContext(0, ("small", "large"), _VOCAB, config))


def _tiny_spec() -> ModelSpec:
    """One layer: what the model is makes no difference to the host."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": _VOCAB,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": _ROW_TOKENS,
    }
    return spec_from_config(config, {}, source="the measurement's own model")


def _nothing() -> None:
    """No work."""
