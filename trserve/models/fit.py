"""Whether weights fit into memory, before any is taken.

Knows sizes; nothing of files, devices or KV caches. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from trserve.errors import ModelUnavailableError
from trserve.models.spec import ModelSpec

_GIB = 2**30


def check_weights_fit(models: Sequence[tuple[str, ModelSpec, int, bool]], available: int) -> None:
    """Refuse models whose weights cannot be loaded together.

    Args:
        models: name, spec, bytes per weight of each, and whether its projections become 8-bit.
        available: bytes of memory that are free.

    Raises:
        ModelUnavailableError: two lines: the numbers, and what to do.
    """
    sizes = [spec.weight_bytes(width, int8=int8) for _, spec, width, int8 in models]
    if sum(sizes) <= available:
        return
    parts = [
        f"{name} {size / _GIB:.1f} GiB ({spec.num_parameters / 1e9:.2f} billion weights of "
        f"{1 if int8 else width} bytes)"
        for (name, spec, width, int8), size in zip(models, sizes, strict=True)
    ]
    smaller = ", use --dtype bfloat16" if any(width > 2 for _, _, width, _ in models) else ""
    if not all(int8 for _, _, _, int8 in models):
        smaller += ", use --quantization int8"
    raise ModelUnavailableError(
        f"the weights need {sum(sizes) / _GIB:.1f} GiB of memory, but {available / _GIB:.1f} GiB "
        f"are free: {', '.join(parts)}\n"
        f"name smaller models{smaller}, or free memory"
    )
