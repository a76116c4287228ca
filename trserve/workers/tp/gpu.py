"""Ranks on GPUs: the GPU's runner on each, NCCL between them, plans as everywhere.

The graphs hold the sums: every rank captures the same buckets in the same order, because all of
them read the same configuration, and replays the bucket that a plan's shape asks for. Rank 0 alone
samples and routes; the others have a head whose logits nobody reads, beside rank 0's own and so in
no time. Host code runs ahead of the device, but copies what it needs of a plan before it launches,
so that an entry of the ring is free when ``forward`` returns.

On the CPU the same code runs with emulated graphs and sums in shared memory. Unproven on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from trserve.errors import ConfigError, ModelUnavailableError
from trserve.gpus.plan import OWN_GPU
from trserve.models.assembly import Progress
from trserve.models.cuda.weights import check_device_memory, load_onto
from trserve.models.sharding import Collective, Shard, connect
from trserve.models.spec import read_spec
from trserve.plan import ModelPlan, ServerPlan
from trserve.router_lib.base import BaseRouter, RouterContext
from trserve.router_lib.none import NoRouter
from trserve.workers.cuda.buckets import RunnerLimits, pieces_from_environment
from trserve.workers.cuda.create import assemble_runner, attention_from_environment
from trserve.workers.cuda.runner import CudaRunner
from trserve.workers.in_step import StepAsk
from trserve.workers.runner import ForwardOutput
from trserve.workers.step import StepInputs
from trserve.workers.tp.plan_ring import PlanWriter


def rank_device(plan: ServerPlan, model: ModelPlan, rank: int) -> torch.device:
    """The GPU of ``rank``; the CPU where the plan's device is that.

    Raises:
        ModelUnavailableError: torch cannot use it.
    """
    if plan.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ModelUnavailableError(
            f"{model.name}, rank {rank}: torch finds no GPU; each rank has one of its own (--gpus)"
        )
    return torch.device("cuda", OWN_GPU)


def create_cuda_runner(
    plan: ServerPlan,
    index: int,
    rank: int,
    connect_to: Callable[[torch.device], Collective],
    progress: Progress | None = None,
) -> tuple[CudaRunner, Collective]:
    """The runner of ``rank``'s share of model ``index``, and its place among the others.

    Args:
        connect_to: makes the collective of this rank, on its device.

    Raises:
        ModelUnavailableError: there is no such device, or the share does not fit there.
        ConfigError: the model cannot run there.
    """
    model, attention = plan.models[index], attention_from_environment()
    if model.int8:
        raise ConfigError(
            "--quantization int8 is for the CPU; a GPU runs bfloat16 or float32 (--dtype)"
        )
    device, shard = rank_device(plan, model, rank), Shard(rank, model.tp)
    path, dtype = Path(model.path), getattr(torch, model.dtype)
    whole = read_spec(path)
    check_device_memory(
        f"{model.name}, rank {rank}",
        shard.spec(whole),
        dtype=dtype,
        kv_tokens=model.num_blocks * plan.block_size,
        device=device,
    )
    decoder = load_onto(
        device,
        path,
        whole,
        dtype=dtype,
        load_format=model.load_format,
        progress=progress,
        token_map=model.token_map,
        shard=shard,
    )
    group = connect_to(device)
    connect(decoder, group)
    runner = assemble_runner(
        decoder,
        num_blocks=model.num_blocks,
        block_size=plan.block_size,
        limits=RunnerLimits(plan.max_rows, plan.max_tokens, pieces_from_environment()),
        row_tokens=plan.layout.row_tokens,
        model=index,
        tokenizer_size=plan.tokenizer_size,
        attention=attention,
    )
    return runner, group


class FirstCudaRank:
    """Rank 0's runner: the GPU's own, which the other ranks follow.

    Attributes:
        routes: whether steps have the router's score.
        embedding: the model's input embedding.
    """

    def __init__(self, inner: CudaRunner, group: Collective, writer: PlanWriter) -> None:
        self._inner, self._group, self._writer = inner, group, writer
        self.embedding = inner.embedding

    @property
    def routes(self) -> bool:
        """Whether steps have the router's score."""
        return self._inner.routes

    @property
    def heartbeat(self) -> int:
        """Address of a word that may be set."""
        return self._inner.heartbeat

    @heartbeat.setter
    def heartbeat(self, address: int) -> None:
        self._inner.heartbeat = address

    @property
    def began_ns(self) -> int:
        """When the next step was decided."""
        return self._inner.began_ns

    @began_ns.setter
    def began_ns(self, moment: int) -> None:
        self._inner.began_ns = moment

    @property
    def on_layer(self) -> Callable[[], None]:
        """Called now and then in a step."""
        return self._inner.on_layer

    @on_layer.setter
    def on_layer(self, call: Callable[[], None]) -> None:
        self._inner.on_layer = call

    @property
    def on_submitted(self) -> Callable[[], None]:
        """Called in each step, once this rank's device has all of it."""
        return self._inner.on_submitted

    @on_submitted.setter
    def on_submitted(self, call: Callable[[], None]) -> None:
        self._inner.on_submitted = call

    def keep_tap(self) -> None:
        """Give ``tap`` with every step from now on; before :meth:`prepare`."""
        self._inner.keep_tap()

    def prepare(self, router: BaseRouter) -> None:
        """Capture all graphs, as the other ranks do at the same time."""
        self._inner.prepare(router)

    def forward(self, step: StepInputs, also: NDArray[np.int64] | None = None) -> ForwardOutput:
        """Compute ``step`` on all ranks. GroupLostError if one is gone or hangs."""
        self._writer.tell(step, also)
        output = self._inner.forward(step, also)
        # It is under way here and nobody waits for its sums, but its tables are about to change.
        self._writer.await_taken()
        return output

    def decide(self, step: StepInputs, ask: StepAsk) -> ForwardOutput:
        """:meth:`forward`, and decide here on its rows."""
        self._writer.tell(step, None)
        return self._inner.decide(step, ask)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raw logits of hidden states after the final norm, on the host."""
        return self._inner.logits(hidden)

    def close(self) -> None:
        """Let the other ranks end; graphs go before the communicator that they use."""
        self._writer.end()
        self._inner.close()
        self._group.close()


class CudaRank:
    """Another rank's runner: :class:`CudaRunner`, which decides nothing.

    Its graphs are captured at once, at the same time as rank 0's.
    """

    def __init__(self, inner: CudaRunner, tokenizer_size: int) -> None:
        self._inner = inner
        inner.prepare(NoRouter(RouterContext(0, ("",), tokenizer_size, {})))

    def forward(self, step: StepInputs, also: NDArray[np.int64] | None) -> torch.Tensor:
        """Compute this rank's share of ``step``; what rank 0 has as ``hidden``."""
        return self._inner.forward(step, also).hidden

    def close(self) -> None:
        """Free the graphs, before the communicator goes."""
        self._inner.close()
