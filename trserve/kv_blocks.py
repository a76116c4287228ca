"""How many KV blocks each model of a configuration gets on this machine.

Knows the models' shapes and the free memory; takes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from trserve.config import LaunchConfig
from trserve.errors import ConfigError
from trserve.ipc.slab import available_memory
from trserve.kv_capacity import common_capacity, kv_budget
from trserve.models.aliases import ResolvedModel

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2}
_MEMORY_SHARE: Final = 4
_MEMORY_MOST: Final = 4 * 2**30


def kv_blocks(
    config: LaunchConfig,
    models: Sequence[ResolvedModel],
    dtypes: Sequence[str],
    lengths: Sequence[int],
) -> list[int]:
    """Blocks for each model: as many as fit for all alike, or what ``--kv-tokens`` says.

    No more than all slots can use.
    """
    engine, size = config.engine, config.engine.block_size
    widths = [DTYPE_BYTES[dtype] for dtype in dtypes]
    pairs = list(zip(models, widths, strict=True))
    per_token = [model.spec.kv_bytes_per_token(width) for model, width in pairs]
    usable = [-(-length // size) * size * engine.max_requests for length in lengths]
    if engine.kv_tokens:
        return _given_blocks(engine.kv_tokens, per_token, size)
    int8, free = config.model.quantization == "int8", available_memory()
    weights = [model.spec.weight_bytes(width, int8=int8) for model, width in pairs]
    most = min(_MEMORY_MOST, free // _MEMORY_SHARE)
    budget = engine.memory or kv_budget(free, weights, most)
    capacity = common_capacity(budget, per_token)
    if capacity is None:
        return [tokens // size for tokens in usable]
    if capacity < size:
        raise ConfigError(
            f"--memory {budget}: the KV cache needs {sum(per_token)} bytes a token over all "
            f"models, so one block of {size} tokens does not fit"
        )
    return [min(capacity, tokens) // size for tokens in usable]


def _given_blocks(tokens: Sequence[int], per_token: Sequence[int], size: int) -> list[int]:
    shown = ",".join(map(str, tokens))
    if len(tokens) != len(per_token):
        raise ConfigError(f"--kv-tokens {shown}: {len(per_token)} models need a number each")
    if min(tokens) < size:
        raise ConfigError(f"--kv-tokens {shown}: a block has {size} tokens, and each needs one")
    needed = sum(count * each for count, each in zip(tokens, per_token, strict=True))
    if needed > available_memory():
        raise ConfigError(
            f"--kv-tokens {shown}: {needed / 2**30:.1f} GiB, more than the memory that is free"
        )
    return [count // size for count in tokens]
