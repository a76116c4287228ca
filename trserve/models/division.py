"""Whether several processes can share a model evenly. Knows its shape; imports no torch."""

from __future__ import annotations

from trserve.errors import ModelUnavailableError
from trserve.models.spec import ModelSpec


def check_divisible(spec: ModelSpec, size: int, name: str) -> None:
    """Refuse a division of ``spec`` over ``size`` ranks that would not be one.

    Raises:
        ModelUnavailableError: the message says which number stands in the way.
    """
    if size == 1:
        return
    if spec.num_layers == 0:
        raise ModelUnavailableError(f"--tp {size}: {name} has no layers to divide; use --tp 1")
    if spec.num_kv_heads % size:
        count = spec.num_kv_heads
        possible = " or ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise ModelUnavailableError(
            f"--tp {size}: {name} has {count} KV heads, which {size} ranks cannot share evenly; "
            f"use --tp {possible}"
        )
    widths = {"an MLP": spec.intermediate_size}
    if spec.experts is not None:
        widths["experts"] = spec.experts.intermediate_size
    for what, width in widths.items():
        if width % size:
            raise ModelUnavailableError(
                f"--tp {size}: {name} has {what} of width {width}, which {size} ranks cannot share "
                "evenly; use another --tp"
            )
