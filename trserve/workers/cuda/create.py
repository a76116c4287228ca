"""A worker's runner on a GPU from its plan; or, asked for by name, on the CPU in a GPU's place.

Knows plans, and puts the parts together. Unproven on a device.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from trserve.errors import ConfigError, ModelUnavailableError
from trserve.gpus.plan import OWN_GPU
from trserve.models.assembly import Progress
from trserve.models.cuda.attention import BACKENDS, AttentionBackend, BatchGeometry, PagedLayers
from trserve.models.cuda.attention import choose_backend as choose_attention
from trserve.models.cuda.decoder import CudaDecoder
from trserve.models.cuda.weights import check_device_memory, device_caches, load_onto
from trserve.models.decoder import Decoder
from trserve.models.spec import read_spec
from trserve.workers.cuda.buckets import Buckets, RunnerLimits, pieces_from_environment
from trserve.workers.cuda.graphs import GraphDevice, NoGraphsOnCpu, graph_device
from trserve.workers.cuda.runner import CudaRunner

if TYPE_CHECKING:
    from trserve.plan import ModelPlan, ServerPlan

log = logging.getLogger(__name__)

ATTENTION_VARIABLE: Final = "TRSERVE_ATTENTION"
"""What attends, one of ``BACKENDS``: lets an operator step over a flashinfer that does not work."""


def create_runner(plan: ServerPlan, index: int, progress: Progress | None = None) -> CudaRunner:
    """The runner of ``plan``'s model ``index``, on its GPU; on the CPU if that is the device.

    Raises:
        ModelUnavailableError: there is no such device, or the model does not fit there.
        ConfigError: the model cannot run there.
    """
    model, attention = plan.models[index], attention_from_environment()
    device = _device_of(plan, model)
    if model.int8:
        raise ConfigError(
            "--quantization int8 is for the CPU; a GPU runs bfloat16 or float32 (--dtype)"
        )
    spec, dtype = read_spec(Path(model.path)), getattr(torch, model.dtype)
    kv_tokens = model.num_blocks * plan.block_size
    check_device_memory(model.name, spec, dtype=dtype, kv_tokens=kv_tokens, device=device)
    if device.type == "cpu":
        log.warning("this runner emulates a GPU's on the CPU: its graphs are functions run again")
        torch.set_num_threads(model.threads)
    graphs = NoGraphsOnCpu(strict=False) if device.type == "cpu" else None
    decoder = load_onto(
        device,
        Path(model.path),
        spec,
        dtype=dtype,
        load_format=model.load_format,
        progress=progress,
        token_map=model.token_map,
    )
    return assemble_runner(
        decoder,
        num_blocks=model.num_blocks,
        block_size=plan.block_size,
        limits=RunnerLimits(plan.max_rows, plan.max_tokens, pieces_from_environment()),
        row_tokens=plan.layout.row_tokens,
        model=index,
        tokenizer_size=plan.tokenizer_size,
        attention=attention,
        graphs=graphs,
    )


def attention_from_environment() -> str:
    """What ``TRSERVE_ATTENTION`` names, ``auto`` where it is not set.

    Raises:
        ConfigError: there is no such backend. (One that cannot run here says so later.)
    """
    name = os.environ.get(ATTENTION_VARIABLE) or BACKENDS[0]
    if name not in BACKENDS:
        raise ConfigError(f"{ATTENTION_VARIABLE}={name}: is one of {', '.join(BACKENDS)}")
    return name


def assemble_runner(
    decoder: Decoder,
    *,
    num_blocks: int,
    block_size: int,
    limits: RunnerLimits,
    row_tokens: int,
    model: int,
    tokenizer_size: int,
    attention: str = "auto",
    graphs: GraphDevice | None = None,
) -> CudaRunner:
    """A runner of ``decoder`` where its tensors are, its caches beside it.

    Args:
        row_tokens: tokens of the longest row.
        attention: the backend, one of ``models.cuda.attention.BACKENDS``.
        graphs: what captures; the device's own without it.
    """
    device, spec = decoder.embedding.device, decoder.spec
    graphs = graphs or graph_device(device)
    caches = device_caches(
        spec, num_blocks=num_blocks, block_size=block_size, dtype=decoder.dtype, device=device
    )
    return CudaRunner(
        CudaDecoder(decoder, max_positions=row_tokens),
        caches,
        _attention(attention, caches, spec.num_heads, limits, -(-row_tokens // block_size)),
        decoder.lm_head(tokenizer_size),
        graphs,
        limits,
        model=model,
        tokenizer_size=tokenizer_size,
    )


def _attention(
    name: str, caches: list[torch.Tensor], heads: int, limits: RunnerLimits, blocks_per_row: int
) -> AttentionBackend:
    if not caches:
        return _NoAttention()
    paged = PagedLayers(
        layers=caches,
        num_heads=heads,
        max_rows=limits.max_rows,
        max_tokens=limits.max_tokens,
        max_blocks_per_row=blocks_per_row,
        graphs=Buckets.of(max_rows=limits.max_rows, max_tokens=limits.max_tokens).largest_first,
    )
    return choose_attention(name, paged)


class _NoAttention:
    """Of a model without layers."""

    name = "none"
    replays = True

    def plan(self, batch: BatchGeometry) -> None:
        """Nothing will be run."""

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """There is no layer."""
        raise AssertionError("a model without layers attends to nothing")


def _device_of(plan: ServerPlan, model: ModelPlan) -> torch.device:
    """The GPU of ``model``; the CPU where the plan's device is that.

    Raises:
        ModelUnavailableError: torch cannot use it.
    """
    if plan.device != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ModelUnavailableError(
            f"{model.name}: torch finds no GPU; see trserve doctor, or use --device cpu"
        )
    return torch.device("cuda", OWN_GPU)
