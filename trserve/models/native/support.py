"""Which decoders the compiled kernels can run, if there are kernels here. Knows no weights."""

from __future__ import annotations

from typing import Final

import torch

from trserve.models.native.library import BFLOAT16, FLOAT32, INT8, load_library
from trserve.models.spec import ModelSpec

KINDS: Final = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.int8: INT8}
"""The kernels' numbers of types."""

_MAX_GROUP: Final = 16
_MAX_HEAD_DIM: Final = 256


def supported(spec: ModelSpec, dtype: torch.dtype) -> bool:
    """Whether the kernels run decoders of ``spec`` whose weights are in ``dtype``."""
    library = load_library()
    if library is None or dtype not in KINDS or spec.experts is not None:
        return False
    multiple = library.functions.trs_dim_multiple(KINDS[dtype])
    return (
        spec.head_dim % multiple == 0
        and spec.head_dim <= _MAX_HEAD_DIM
        and spec.num_heads // spec.num_kv_heads <= _MAX_GROUP
    )
