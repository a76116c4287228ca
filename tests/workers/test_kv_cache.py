"""Storage of keys and values: its shape, and that it takes memory only where it is used."""

from __future__ import annotations

import pytest
import torch

from trserve.demo import model_path
from trserve.models.spec import read_spec
from trserve.workers.kv_cache import KVCache

SPEC = read_spec(model_path("small"))


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_of_the_right_shape_and_alignment(dtype: torch.dtype) -> None:
    kv = KVCache(SPEC, num_blocks=7, block_size=16, dtype=dtype)
    assert len(kv.layers) == SPEC.num_layers
    for layer in kv.layers:
        assert layer.dtype is dtype
        assert layer.shape == (8, SPEC.num_kv_heads, 2, 16, SPEC.head_dim)
        assert layer.data_ptr() % 64 == 0
        assert layer.is_contiguous()
        assert not layer.any()


def test_only_written_blocks_take_memory() -> None:
    before = resident_bytes()
    kv = KVCache(SPEC, num_blocks=2**15, block_size=16, dtype=torch.float32)
    size = sum(layer.nbytes for layer in kv.layers)
    assert size > 2**30 // 2
    assert resident_bytes() - before < size / 20
    for layer in kv.layers:
        layer[: len(layer) // 2] = 1.0
    assert resident_bytes() - before > size / 3
