"""flashinfer against torch in float32, over the shapes that models have: the largest difference.

The fallback in Triton is held against the same, whether flashinfer is here or not.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from bench.gpu_stages.parts import tell, told
from trserve.models.cuda.attention import (
    AttentionBackend,
    BatchGeometry,
    PagedLayers,
    choose_backend,
)

MOST_ERROR: Final = 1e-2
_BLOCK: Final = 16
_REPEATS: Final = 20
_BUCKET: Final = 8


class Shape(NamedTuple):
    """Heads, KV heads, head size; ``width`` tokens of each of the rows with these lengths."""

    heads: int
    kv_heads: int
    dim: int
    width: int
    lengths: tuple[int, ...]


SHAPES: Final = tuple(
    Shape(heads, kv_heads, dim, width, lengths)
    for heads, kv_heads, dim in ((14, 2, 64), (16, 8, 128), (64, 8, 128), (40, 8, 128))
    for width, lengths in ((1, (17, 900, 1, 64)), (4, (40, 300)), (0, (33, 5, 700)))
)
"""Groups of 7, 2, 8 and 5 query heads; decodes, extends of one width, ragged ones."""


def flashinfer(device: str, quick: bool) -> dict[str, Any]:
    """See the module."""
    where, dtype = torch.device(device), torch.bfloat16 if device == "cuda" else torch.float32
    names = ("flashinfer", "triton") if device == "cuda" else ("torch",)
    rows: list[dict[str, Any]] = []
    refusals: dict[str, str] = {}
    for name in names:
        for shape in SHAPES[:3] if quick else SHAPES:
            try:
                rows.append(compare(name, shape, where, dtype))
            except Exception as error:
                # A version that is called otherwise takes nothing from the other backend.
                traceback.print_exc()
                refusals[name] = told(error)
                break
        tell({"rows": rows, "refusals": refusals})
    errors = [row[name] for row in rows for name in ("error", "graph_error") if name in row]
    worst = float(np.max(errors, initial=0.0))  # NaN stays
    found: dict[str, Any] = {"tables": {"attention": rows}, "refusals": refusals}
    found["summary"] = f"largest difference {worst:.1e} over {len(rows)} shapes"
    if device == "cpu":
        found["summary"] = "torch against itself, a dry run: " + found["summary"]
    if worst > MOST_ERROR or not np.isfinite(worst):
        found["error"] = found["summary"] + f", more than {MOST_ERROR:g}"
    elif "triton" in refusals:
        found["error"] = refusals["triton"]
    elif "flashinfer" in refusals:
        found["unavailable"] = refusals["flashinfer"] + "; " + found["summary"] + " (triton)"
    return found


def compare(name: str, shape: Shape, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The largest difference of backend ``name`` over ``shape``, and what a plan takes.

    Rows of one width also as a graph has them, beside rows of padding, which must come out at zero.
    """
    generator = torch.Generator().manual_seed(5)
    blocks = [-(-length // _BLOCK) for length in shape.lengths]
    cache = torch.randn(sum(blocks) + 1, 2, shape.kv_heads, _BLOCK, shape.dim, generator=generator)
    cache[-1] = 0
    geometry = _geometry(shape, blocks)
    q = torch.randn(geometry.tokens, shape.heads, shape.dim, generator=generator)
    exact = _run(_backend("torch", cache.to(dtype).float(), shape), geometry, q.to(dtype).float())
    backend = _backend(name, cache.to(device, dtype), shape)
    found = _run(backend, geometry, q.to(device, dtype))
    began = time.perf_counter()
    for _ in range(_REPEATS):
        backend.plan(geometry)
    plan_us = (time.perf_counter() - began) / _REPEATS * 1e6
    row = {
        "backend": name,
        "heads": f"{shape.heads}/{shape.kv_heads} x {shape.dim}",
        "width": shape.width or "ragged",
        "error": _apart(found, exact),
        "plan_us": plan_us,
    }
    if shape.width:
        padded = torch.zeros(_BUCKET * shape.width, *q.shape[1:])
        padded[: len(q)] = q
        found = _run(backend, replace(geometry, bucket=_BUCKET), padded.to(device, dtype))
        wanted = torch.zeros(padded.shape)
        wanted[: len(q)] = exact
        row["graph_error"] = _apart(found, wanted)
    return row


def _apart(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.float().cpu() - exact).abs().max() / exact.abs().max())


def _geometry(shape: Shape, blocks: list[int]) -> BatchGeometry:
    lengths = shape.lengths
    widths = [shape.width or min(length, 3 + row) for row, length in enumerate(lengths)]
    tables = np.zeros((len(lengths), max(blocks)), np.int32)
    first = 0
    for row, count in enumerate(blocks):
        tables[row, :count] = np.arange(first, first + count)
        first += count
    starts = np.concatenate(([0], np.cumsum(widths))).astype(np.int32)
    kv_len = np.array(lengths, np.int32)
    return BatchGeometry(len(lengths), starts, kv_len, tables, shape.width)


def _backend(name: str, cache: torch.Tensor, shape: Shape) -> AttentionBackend:
    paged = PagedLayers(
        layers=[cache],
        num_heads=shape.heads,
        max_rows=8,
        max_tokens=64,
        max_blocks_per_row=128,
        graphs=[(_BUCKET, shape.width)] if shape.width else [],
    )
    return choose_backend(name, paged)


def _run(backend: AttentionBackend, geometry: BatchGeometry, q: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(q)
    backend.plan(geometry)
    backend.run(0, q, out)
    return out
