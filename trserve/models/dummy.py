"""Weights drawn at random, for runs whose subject is speed or memory and not text.

Knows shapes; nothing of files.
"""

from __future__ import annotations

import torch

from trserve.models.assembly import UNMAPPED, Progress, TensorSource, assemble, expected_tensors
from trserve.models.decoder import Decoder
from trserve.models.spec import ModelSpec
from trserve.models.token_map import TokenMap

_INIT_STD = 0.02
"""Standard deviation of dummy weights: the initializer_range of the supported families."""

_POOL_SIZE = 4_194_319
"""Numbers drawn; a prime, so that no two rows of a matrix start at the same one."""


def dummy_decoder(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    seed: int = 0,
    int8: bool = False,
    progress: Progress | None = None,
    token_map: TokenMap = UNMAPPED,
) -> Decoder:
    """A decoder of the given shape with random weights, the same for the same seed."""
    read = dummy_source(spec, dtype=dtype, seed=seed)
    return assemble(spec, read, progress, int8=int8, token_map=token_map)


def dummy_source(
    spec: ModelSpec, *, dtype: torch.dtype, seed: int = 0, device: torch.device | None = None
) -> TensorSource:
    """Random tensors of the given shape, the same for the same seed, wherever they are to be.

    Drawing billions of numbers takes minutes. So a few million are drawn, and every tensor runs
    around them from a start of its own, which depends on its name alone: the weights of one layer
    do not depend on the number of layers.
    """
    shapes = expected_tensors(spec)
    generator = torch.Generator().manual_seed(seed)
    pool = torch.empty(_POOL_SIZE).normal_(0.0, _INIT_STD, generator=generator).to(device, dtype)

    def draw(name: str) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shapes[name], dtype=dtype, device=device)
        tensor = torch.empty(shapes[name], dtype=dtype, device=device)
        _fill(tensor.view(-1), pool, _stable_hash(seed, name) % _POOL_SIZE)
        return tensor

    return draw


def _fill(flat: torch.Tensor, pool: torch.Tensor, start: int) -> None:
    """Fill ``flat`` from ``pool``, beginning at ``start`` and going around."""
    done = 0
    while done < len(flat):
        part = pool[start : start + len(flat) - done]
        flat[done : done + len(part)] = part
        done += len(part)
        start = 0


def _stable_hash(seed: int, name: str) -> int:
    """FNV-1a of seed and name: ``hash`` differs between processes."""
    state = 0xCBF29CE484222325
    for byte in f"{seed}/{name}".encode():
        state = ((state ^ byte) * 0x100000001B3) % (1 << 64)
    return state
