"""Paged attention on a GPU: what is planned once a step, what runs once a layer, and who does it.

``plan`` takes a step's geometry on the host and runs outside any graph; ``run`` only launches
kernels that read device buffers, so a graph captured once replays over any lengths. Keys and
values lie in ``[blocks, 2, kv_heads, block_size, head_dim]`` a layer (flashinfer calls it HND) and
were stored by ``ops.rope_and_store`` before. The last block is the dummy: it stays zero, and the
padding rows of a graph read it.

Knows geometry and backends' names; nothing of weights, requests or graphs.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from trserve.errors import ConfigError, ModelUnavailableError
from trserve.workers.step import StepInputs

Int32Array = npt.NDArray[np.int32]

log = logging.getLogger(__name__)

BACKENDS: Final = ("auto", "flashinfer", "triton", "torch")


@dataclass(slots=True)
class BatchGeometry:
    """Which tokens a step computes and where their rows' keys and values lie: host arrays.

    Row ``b`` computes the tokens ``query_start[b] : query_start[b + 1]`` of the step; they are the
    last of its ``kv_len[b]`` tokens. A token sees its row's tokens up to itself.

    Attributes:
        num_rows: real rows, at least 1.
        query_start: int32, at least [num_rows + 1].
        kv_len: int32, at least [num_rows], including this step's tokens.
        block_tables: int32, at least [num_rows, blocks of the longest row]; what is beyond a row's
            own blocks is not read.
        width: tokens of each row where all have equally many, else 0.
        bucket: rows of the captured graph that is about to replay (or to be captured), at least
            ``num_rows``; 0 where no graph is. Needs a ``width``. The rows past ``num_rows`` become
            padding: ``width`` tokens in the dummy block each.
    """

    num_rows: int
    query_start: Int32Array
    kv_len: Int32Array
    block_tables: Int32Array
    width: int = 0
    bucket: int = 0

    @classmethod
    def of(cls, step: StepInputs, bucket: int = 0) -> BatchGeometry:
        """The geometry of ``step``, for a graph of ``bucket`` rows or none."""
        rows = step.num_rows
        counts = np.diff(step.query_start[: rows + 1])
        width = int(counts[0]) if (counts == counts[0]).all() else 0
        return cls(rows, step.query_start, step.kv_len, step.block_tables, width, bucket)

    @property
    def rows(self) -> int:
        """Rows including padding."""
        return max(self.num_rows, self.bucket)

    @property
    def tokens(self) -> int:
        """Tokens including those of padding: what ``q`` and ``out`` of ``run`` hold."""
        return self.bucket * self.width if self.bucket else int(self.query_start[self.num_rows])


@dataclass(frozen=True)
class PagedLayers:
    """The caches of all layers of one model, and what attention over them needs to know.

    Attributes:
        layers: [blocks + 1, 2, kv_heads, block_size, head_dim] each, the last block the dummy.
        num_heads: query heads; a multiple of the KV heads.
        max_rows: rows of the largest step, padding included.
        max_tokens: tokens of the largest step, padding included.
        max_blocks_per_row: blocks of the longest row.
        scale: factor of the scores; None for ``head_dim ** -0.5``.
        graphs: rows and width of each graph that there will be.
    """

    layers: Sequence[torch.Tensor]
    num_heads: int
    max_rows: int
    max_tokens: int
    max_blocks_per_row: int
    scale: float | None = None
    graphs: Sequence[tuple[int, int]] = ()

    @cached_property
    def dummy(self) -> int:
        """Index of the dummy block."""
        return self.layers[0].shape[0] - 1

    @cached_property
    def num_kv_heads(self) -> int:
        """KV heads."""
        return self.layers[0].shape[2]

    @cached_property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @cached_property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.layers[0].shape[3]

    @cached_property
    def head_dim(self) -> int:
        """Size of a head's key, and of its value."""
        return self.layers[0].shape[4]

    @cached_property
    def softmax_scale(self) -> float:
        """Factor of the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def dtype(self) -> torch.dtype:
        """Type of keys and values, which queries have too."""
        return self.layers[0].dtype

    @property
    def device(self) -> torch.device:
        """Where the caches lie."""
        return self.layers[0].device


class AttentionBackend(Protocol):
    """Attention of one model over its caches.

    Attributes:
        name: one of ``BACKENDS``.
        replays: whether a graph of ``run`` reads the plan that is current when it replays.
    """

    name: str
    replays: bool

    def plan(self, batch: BatchGeometry) -> None:
        """Prepare for ``batch``, on the current stream and outside any capture.

        Before a graph replays it needs a plan with its ``bucket`` and ``width``; before another
        plan is made the one before may still be in use on the device, but not be about to start.
        """

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Write to ``out`` the attention of ``q``, both [batch.tokens, heads, head_dim].

        May be captured. Padding rows come out at zero.
        """


def choose_backend(name: str, paged: PagedLayers) -> AttentionBackend:
    """The backend ``name`` over ``paged``; the kernels that it needs are there when this returns.

    ``auto`` takes flashinfer where it can be imported, knows the head size and has kernels or can
    build them, triton on other CUDA devices, and torch on the CPU.

    Raises:
        ConfigError: there is no such backend, or it cannot run over these caches.
        ModelUnavailableError: its package is missing, or cannot build its kernels.
    """
    from trserve.models.cuda.attention_trial import try_out

    chosen = _resolve(name, paged)
    try:
        backend = _backend(chosen, paged)
        if chosen != "torch":
            try_out(backend, paged)
        return backend
    except Exception as error:
        # Whatever flashinfer lacks here, triton needs nothing of it.
        if name != "auto" or chosen != "flashinfer":
            raise
        log.warning("flashinfer is installed but not usable (%s): triton attends instead", error)
    backend = _backend("triton", paged)
    try_out(backend, paged)
    return backend


def _backend(name: str, paged: PagedLayers) -> AttentionBackend:
    match name:
        case "flashinfer":
            from trserve.models.cuda.attention_flashinfer import FlashinferAttention

            return FlashinferAttention(paged)
        case "triton":
            from trserve.models.cuda.attention_triton import TritonAttention

            return TritonAttention(paged)
        case _:
            from trserve.models.cuda.attention_torch import TorchAttention

            return TorchAttention(paged)


def flashinfer_refusal(paged: PagedLayers) -> str:
    """Why flashinfer cannot run over ``paged``; empty if it can, should it be installed."""
    if paged.device.type != "cuda":
        return "it needs a CUDA device"
    if paged.dtype not in (torch.float16, torch.bfloat16):
        return f"it knows float16 and bfloat16, not {_short(paged.dtype)}"
    if paged.head_dim not in FLASHINFER_HEAD_DIMS:
        return f"it has no kernel for heads of {paged.head_dim}"
    return ""


FLASHINFER_HEAD_DIMS: Final = (64, 128, 256, 512)


def _resolve(name: str, paged: PagedLayers) -> str:
    """The name of the backend that ``name`` stands for."""
    if name not in BACKENDS:
        raise ConfigError(
            f"attention backend {name!r} is not one of {', '.join(BACKENDS)}; take auto"
        )
    if name == "auto":
        return _automatic(paged)
    if name == "flashinfer":
        _check_flashinfer(paged)
    if name == "triton" and paged.device.type != "cuda":
        _check_interpreted(paged)
    return name


def _automatic(paged: PagedLayers) -> str:
    if paged.device.type != "cuda":
        return "torch"
    if flashinfer_refusal(paged) or importlib.util.find_spec("flashinfer") is None:
        return "triton"
    if why := _import_failure():
        log.warning("flashinfer is installed but not usable (%s): triton attends instead", why)
        return "triton"
    return "flashinfer"


def _import_failure() -> str:
    """Why flashinfer cannot be imported; empty if it can."""
    try:
        importlib.import_module("flashinfer")
    except Exception as error:  # of whatever a package does that meets others than it expects
        return f"{type(error).__name__}: {error}"
    return ""


def _check_flashinfer(paged: PagedLayers) -> None:
    if why := flashinfer_refusal(paged):
        raise ConfigError(f"attention backend flashinfer cannot run here: {why}; take auto")
    if why := _import_failure():
        raise ModelUnavailableError(
            f"attention backend flashinfer cannot be imported ({why}): pip install --no-deps "
            "flashinfer-python, with apache-tvm-ffi; or take triton"
        )


def _check_interpreted(paged: PagedLayers) -> None:
    from trserve.models.cuda.ops import INTERPRETED

    if not INTERPRETED:
        raise ConfigError("attention backend triton needs a CUDA device; take auto or torch")
    if paged.dtype == torch.bfloat16:
        raise ConfigError(
            "triton's interpreter multiplies no bfloat16 matrices; take float32 or float16"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
