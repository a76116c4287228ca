"""Every Triton kernel against its torch reference: on a device, or interpreted on the CPU.

Run as a program it needs TRITON_INTERPRET=1; it takes names of checks, or ``full`` for all of them
at full size, and prints a line for each that passed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from tests.models.cuda import batches
from trserve.models.cuda import ops
from trserve.models.cuda import ops_reference as reference
from trserve.models.cuda.attention import choose_backend

CLOSE = {"atol": 2e-5, "rtol": 2e-5}


def small_operations(device: str, full: bool) -> None:
    """Norms and the gated unit, of sizes that fill their blocks or not."""
    for size in (96, 256, 5120) if full else (96,):
        torch.manual_seed(size)
        for dtype in (torch.float32, _half(device)):
            x = torch.randn(3, size).to(device, dtype)
            weight = torch.randn(size).to(device, dtype)
            expected = torch.empty_like(x)
            reference.rms_norm(x, weight, 1e-6, expected)
            _close(ops.rms_norm(x, weight, 1e-6), expected, dtype)
            gate_up = torch.randn(3, 2 * size).to(device, dtype)
            reference.silu_mul(gate_up, expected)
            _close(ops.silu_mul(gate_up), expected, dtype)


def take_ids(device: str, full: bool) -> None:
    """Ids at addresses, over several programs; those without one stay."""
    count = 1000 if full else 130
    theirs = torch.arange(7, 7 + 5 * count, 5, dtype=torch.int32).to(device)
    ids = torch.full((count,), -1).to(device)
    given = torch.arange(count) % 3 > 0
    sources = torch.where(given, theirs.data_ptr() + 4 * torch.arange(count), 0).to(device)
    ops.take_ids(ids, sources)
    assert ids.cpu().equal(torch.where(given, theirs.cpu().long(), -1))


def rope_and_store(device: str, full: bool) -> None:
    """Rotation and storing, with and without norms, head sizes and groups that pad or not."""
    shapes = [(2, 7, 64), (8, 4, 128), (2, 3, 24)] if full else [(2, 3, 24)]
    for kv_heads, group, dim in shapes:
        for normed in (False, True):
            _check_rope(kv_heads, group, dim, normed, device)


def _check_rope(kv_heads: int, group: int, dim: int, normed: bool, device: str) -> None:
    torch.manual_seed(dim)
    tokens, size = 4, 4
    qkv = torch.randn(tokens, kv_heads, group + 2, dim).to(device, torch.bfloat16)
    positions = torch.tensor([0, 30, 2, 63], dtype=torch.int32).to(device)
    slots = torch.tensor([5, 0, -1, 11]).to(device)
    angles = torch.outer(torch.arange(64.0), torch.rand(dim // 2))
    rotations = torch.view_as_real(torch.polar(torch.ones_like(angles), angles)).to(device)
    norms = [torch.randn(dim).to(device, torch.bfloat16) if normed else None for _ in range(2)]
    results = []
    for function in (ops.rope_and_store, _reference_rope):
        kv = torch.zeros(4, 2, kv_heads, size, dim, device=device)
        q = torch.zeros(tokens, kv_heads * group, dim, device=device)
        function(
            qkv, positions, slots, rotations, kv, q, q_norm=norms[0], k_norm=norms[1], eps=1e-6
        )
        results.append((kv, q))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


def _reference_rope(*tensors: torch.Tensor, q_norm, k_norm, eps) -> None:
    reference.rope_and_store(*tensors, q_norm, k_norm, eps)


def epilogue(device: str, full: bool) -> None:
    """What routers read, over several parts of a row, and rows that are not finite."""
    vocab = 151_936 if full and device == "cuda" else 1000
    torch.manual_seed(1)
    logits = torch.randn(6, vocab + 8) * 3
    logits[1, 5] = torch.nan
    logits[2, 7] = torch.inf
    logits[3] = -torch.inf
    logits[4, [10, vocab - 1]] = 30.0
    logits[5, : vocab // 2] = -torch.inf
    logits[:, vocab:] = 99.0
    logits = logits.to(device)
    found, expected = (ops.Epilogue.allocate(6, device) for _ in range(2))
    ops.epilogue(logits, vocab, found)
    reference.epilogue(logits, vocab, expected)
    assert found.packed[:2].equal(expected.packed[:2])
    assert found.tokens[4] == 10
    values = (tensors.packed[2:].view(torch.float32) for tensors in (found, expected))
    torch.testing.assert_close(*values, **CLOSE, equal_nan=True)


def uniform(device: str, full: bool) -> None:
    """Random numbers, to the bit."""
    rows = 300 if full else 130
    seeds = np.random.default_rng(0).integers(0, 2**64, rows, dtype=np.uint64)
    tensors = torch.from_numpy(seeds.view(np.int64)).to(device), torch.arange(rows).to(device)
    found, expected = (torch.empty(rows, dtype=torch.float64, device=device) for _ in range(2))
    ops.uniform(*tensors, 5, 1, found)
    reference.uniform(*tensors, 5, 1, expected)
    assert found.equal(expected)


def sample(device: str, full: bool) -> None:
    """Tokens without filters, greedy and drawn, over several parts of a row."""
    for seed in range(20 if full else 2):
        _check_sample(4, 151_936 if full and device == "cuda" else 1000, None, device, seed)


def filtered_sample(device: str, full: bool) -> None:
    """Tokens with filters, alone and together, with ties at their edges."""
    each = [(6, 1.0, 0.0), (0, 0.9, 0.0), (6, 0.5, 0.01), (0, 1.0, 0.3), (500, 0.999, 0.0)]
    if not full:
        _check_sample(3, 300, each[:3], device, 0)
        return
    for seed in range(20 if device == "cuda" else 2):
        _check_sample(5, 151_936 if device == "cuda" else 1000, each, device, seed)


def _check_sample(rows, vocab, filters, device, seed) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(rows, vocab + 8) * 3
    if seed % 2:
        logits = logits.mul(4).round().div(4)
    logits[:, 7] = -torch.inf
    logits[:, vocab:] = 99.0
    if rows == 4:
        logits[1, 0] = torch.nan
    logits = logits.to(device)
    temperatures = torch.tensor([0.7, 1.0, 1.3, 0.0, 0.2], dtype=torch.float64)[:rows].to(device)
    numbers = torch.rand(rows, dtype=torch.float64).to(device)
    chosen = None
    if filters is not None:
        top_k, top_p, min_p = torch.tensor(filters, dtype=torch.float64).to(device).unbind(1)
        chosen = ops.Filters(top_k.int(), top_p.contiguous(), min_p.contiguous())
    best = ops.Epilogue.allocate(rows, device)
    reference.epilogue(logits, vocab, best)
    if chosen is not None:
        _check_thresholds(logits, vocab, best, temperatures, chosen)
    found, expected = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    ops.sample(logits, vocab, best, temperatures, numbers, found, chosen)
    reference.sample(logits, vocab, best, temperatures, numbers, expected, chosen)
    assert found.tolist() == expected.tolist()


def _check_thresholds(logits, vocab, best, temperatures, filters) -> None:
    """The lowest weights to keep of the rows that draw."""
    from trserve.models.cuda import kernels_filters

    rows = kernels_filters.Rows.of(logits, vocab, best.largest, temperatures)
    found = kernels_filters.thresholds(rows, filters)
    weights = ((logits[:, :vocab] - best.largest[:, None]).double() / temperatures[:, None]).exp()
    expected = reference.thresholds(weights, filters)
    drawn = (best.finite > 0) & (temperatures > 0)
    torch.testing.assert_close(found[drawn], expected[drawn], rtol=1e-12, atol=0.0)


def attention(device: str, full: bool) -> None:
    """Decodes with and without padding, suffixes of uniform and ragged width, a prompt chunk."""
    _check_attention([(1, 5), (1, 40), (1, 0)], 4, group=3, dim=24, device=device)
    _check_attention([(2, 5), (1, 150)], 0, group=2, dim=16, kv_heads=1, device=device)
    if not full:
        return
    cases = [
        ([(1, 0)], 1, 7, 64, 16),
        ([(1, 300), (1, 3)], 2, 5, 128, 16),
        ([(4, 30), (4, 0), (4, 17)], 4, 7, 64, 16),
        ([(8, 100)], 2, 8, 128, 16),
        ([(1, 9), (70, 20), (3, 0)], 0, 4, 128, 16),
        ([(33, 0)], 0, 1, 32, 4),
        ([(2, 2)], 1, 16, 80, 4),
    ]
    for dtype in (torch.float32, _half(device)):
        for rows, bucket, group, dim, size in cases:
            _check_attention(
                rows, bucket, group=group, dim=dim, block_size=size, dtype=dtype, device=device
            )


def _check_attention(rows, bucket, *, dtype=torch.float32, device="cpu", **shape) -> None:
    batch = batches.make(rows, bucket=bucket, dtype=dtype, device=device, **shape)
    backend = choose_backend("triton", batch.paged)
    out = torch.full_like(batch.q, torch.nan)
    backend.plan(batch.geometry)
    backend.run(0, batch.q, out)
    close = CLOSE if dtype == torch.float32 else {"atol": 0.01, "rtol": 0.01}
    torch.testing.assert_close(out.cpu().double(), batches.expected(batch), **close)


def _half(device: str) -> torch.dtype:
    """What models run in; the interpreter cuts bfloat16 off instead of rounding it."""
    return torch.float16 if device == "cpu" else torch.bfloat16


def _close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    close = CLOSE if dtype == torch.float32 else {"atol": 1e-3, "rtol": 1e-2}
    torch.testing.assert_close(found, expected, **close)


CHECKS: dict[str, Callable[[str, bool], None]] = {
    check.__name__: check
    for check in (
        small_operations,
        rope_and_store,
        take_ids,
        epilogue,
        uniform,
        sample,
        filtered_sample,
        attention,
    )
}


def main(full: bool) -> None:
    """Run all checks, interpreted. Several parts a row need fewer columns a part."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    from trserve.models.cuda import kernels_logits

    kernels_logits.COLUMNS = 256
    for name, check in CHECKS.items():
        began = time.monotonic()
        check("cpu", full)
        print(name, f"{time.monotonic() - began:.2f}", flush=True)


if __name__ == "__main__":
    main(full=sys.argv[1:] == ["full"])
