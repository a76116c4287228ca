"""Weights and caches onto a device, one tensor after the other.

Host memory never holds more than a layer: a tensor is read, cut to this rank's share, moved, and
assembled there as it would be on the CPU. Dummy weights are drawn on the device, the same numbers.
Projections stay as they lie in the checkpoint; no layout of the CPU is made.

Knows files through ``models.loading`` and devices through torch; nothing of steps or requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from trserve.errors import ModelUnavailableError
from trserve.models.aliases import LoadFormat
from trserve.models.assembly import UNMAPPED, Progress, TensorSource, assemble
from trserve.models.decoder import Decoder
from trserve.models.dummy import dummy_source
from trserve.models.loading import tensors_of
from trserve.models.sharding import WHOLE, Shard
from trserve.models.spec import ModelSpec
from trserve.models.token_map import TokenMap

_GIB = 2**30


def load_onto(
    device: torch.device,
    path: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    load_format: LoadFormat = "auto",
    progress: Progress | None = None,
    token_map: TokenMap = UNMAPPED,
    shard: Shard = WHOLE,
) -> Decoder:
    """The decoder of ``path``, or one rank's share of it, on ``device``.

    Args:
        spec: of the whole model.
        dtype: float32 or bfloat16; the weights are converted to it.

    Raises:
        ModelUnavailableError: as :func:`trserve.models.loading.load_model`.
    """
    share = shard.spec(spec)
    with _tensors(device, path, spec, dtype, load_format, shard) as read:
        decoder = assemble(
            share, lambda name: read(name).to(device), progress, token_map=token_map, shard=shard
        )
    # Parts of weights that were put together stay with torch, where nothing else can have them.
    torch.cuda.empty_cache()
    return decoder


@contextmanager
def _tensors(
    device: torch.device,
    path: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    load_format: LoadFormat,
    shard: Shard,
) -> Iterator[TensorSource]:
    """This rank's parts of the tensors; of a mapped file no more is read."""
    if load_format == "dummy":
        whole = dummy_source(spec, dtype=dtype, device=device)
        yield lambda name: shard.part(name, whole(name))
        return
    with tensors_of(path, spec, dtype=dtype, load_format=load_format, part=shard.part) as read:
        yield read


def device_caches(
    spec: ModelSpec, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Zeroed keys and values of every layer, [num_blocks + 1, 2, kv_heads, block_size, head_dim].

    The last block is the dummy: no block table names it, nothing is stored in it, and what pads a
    graph's rows reads its zeros.
    """
    shape = (num_blocks + 1, 2, spec.num_kv_heads, block_size, spec.head_dim)
    return [_zeros(shape, dtype, device) for _ in range(spec.num_layers)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy leaves it to the kernel, which hands out pages as they are written.
    memory = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


def check_device_memory(
    name: str, spec: ModelSpec, *, dtype: torch.dtype, kv_tokens: int, device: torch.device
) -> None:
    """Refuse what cannot fit on ``device`` before anything is allocated there.

    Raises:
        ModelUnavailableError: the numbers, and what to do.
    """
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    weights = spec.num_parameters * dtype.itemsize
    kv = spec.kv_bytes_per_token(dtype.itemsize) * kv_tokens
    if weights + kv <= free:
        return
    raise ModelUnavailableError(
        f"{name} needs {weights / _GIB:.1f} GiB of GPU memory for weights and {kv / _GIB:.1f} GiB "
        f"for {kv_tokens} tokens of KV, but {free / _GIB:.1f} GiB of {device} are free\n"
        "lower --kv-tokens, take a smaller model or another GPU (--gpus), or free memory"
    )
